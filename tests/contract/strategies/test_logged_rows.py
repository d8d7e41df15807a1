"""`log_rows` under each strategy: folds, AMP, accumulation, compiled steps, and documents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import RowLog, read_row_results
from lightning_memmap.sampling import KFold
from tests.support.documents import KEYS, PerDocument, check_documents, make_packs
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import each_case, in_processes, launch
from tests.support.training import make_strategy

NUM_ROWS = 61


class Logging(RowLog, Regression):
    """Logs in its loss, which a pipeline calls for each micro-batch on its last stage."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = (output - batch["y"]).square().mean(1)
        self.log_rows("row_loss", losses)
        self.log_rows("row", batch["row"])
        return losses.mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log_rows("twice", 2 * batch["row"])
        return self.loss(self(batch["x"]), batch)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.loss(self(batch["x"]), batch)


def fit_fold(
    out: Path,
    strategy: str,
    devices: int,
    *,
    strategy_options: dict[str, Any] | None = None,
    compiles: bool = False,
    **options: Any,
) -> None:
    """Train with one fold held out, and check the results of all rows.

    With a learning rate of 0, each row has the loss that it has by itself.
    """
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=2,
        callbacks=[
            RowResults(out / "train", ["row_loss", "row", "twice"]),
            RowResults(out / "val", ["row_loss", "row"], split="val"),
        ],
        **options,
    )
    data = MemmapDataModule(
        Points(NUM_ROWS),
        store_dir=out / "stores",
        batch_size=8 // devices,
        num_shards=4,
        subset=KFold(3),
        member=1,
    )
    module: Any = Logging()
    if compiles:
        module = torch.compile(module, backend="eager", fullgraph=True)
    trainer.fit(module, data)
    trainer.strategy.barrier()
    points = Points(NUM_ROWS)
    losses = (Regression()(points.x) - points.y).square().mean(1).detach()
    train, val = read_row_results(out / "train"), read_row_results(out / "val")
    assert torch.equal(train["seen"], ~val["seen"])
    assert int(val["seen"].sum()) == 20
    for table in (train, val):
        seen = table["seen"]
        assert torch.equal(table["row"][seen], torch.arange(NUM_ROWS)[seen])
        atol = 0.05 if "precision" in options else 1e-6
        torch.testing.assert_close(
            table["row_loss"][seen].float(), losses[seen], rtol=atol, atol=atol
        )
    assert torch.equal(train["twice"], 2 * torch.arange(NUM_ROWS) * train["seen"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"compiles": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp", "memmap_model_parallel"])
def test_logged_rows_in_one_process_equal_rows_computed_alone(
    tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    fit_fold(tmp_path, strategy, 2, **options)


IN_TWO_PROCESSES: list[tuple[str, dict[str, Any]]] = [
    ("memmap_superbatch_ddp", {}),
    ("ddp", {}),
    ("memmap_fsdp2", {}),
    ("memmap_fsdp2", {"accumulate_grad_batches": 3}),
    ("memmap_pipeline", {}),
    ("memmap_pipeline", {"accumulate_grad_batches": 3}),
    ("memmap_pipeline", {"precision": "bf16-mixed"}),
    ("memmap_pipeline", {"strategy_options": {"schedule": "gpipe", "num_microbatches": 3}}),
    ("memmap_pipeline", {"strategy_options": {"data_parallel_size": 2}}),
]


@in_processes(2)
def test_logged_rows_of_two_processes_equal_rows_computed_alone(tmp_path: Path) -> None:
    for number, (strategy, options) in each_case(IN_TWO_PROCESSES):
        fit_fold(tmp_path / str(number), strategy, 2, **options)


@pytest.mark.slow
def test_logged_rows_of_two_pipelines_equal_rows_computed_alone(tmp_path: Path) -> None:
    options = {"data_parallel_size": 2, "schedule": "interleaved"}
    launch(
        fit_fold,
        tmp_path,
        processes=4,
        strategy="memmap_pipeline",
        devices=4,
        strategy_options=options,
    )


def fit_packed(out: Path, strategy: str, devices: int) -> None:
    """Train on packed documents, and check that each has its own values."""
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        callbacks=[RowResults(out / "r", KEYS)],
    )
    trainer.fit(PerDocument(), make_packs(out, devices))
    trainer.strategy.barrier()
    check_documents(out / "r")


@pytest.mark.parametrize("strategy", ["memmap_dp", "memmap_model_parallel"])
def test_documents_in_one_process_have_a_value_each(tmp_path: Path, strategy: str) -> None:
    fit_packed(tmp_path, strategy, 2)


@in_processes(2)
def test_documents_of_two_processes_have_a_value_each(tmp_path: Path) -> None:
    for _, strategy in each_case(["ddp", "memmap_superbatch_ddp", "memmap_fsdp2"]):
        fit_packed(tmp_path / strategy, strategy, 2)
