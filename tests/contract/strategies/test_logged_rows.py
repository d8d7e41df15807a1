"""`log_rows` under each strategy: folds, AMP, accumulation, compiled steps, and documents."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import RowLog, read_row_results
from lightning_memmap.sampling import KFold, Packed
from tests.support.documents import (
    KEYS,
    NUM_DOCUMENTS,
    Documents,
    PerDocument,
    check_documents,
    make_packs,
)
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
    ("memmap_superbatch_ddp", {"compiles": True}),
    ("ddp", {}),
    ("ddp", {"compiles": True}),
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


class Texts(Documents):
    """Documents whose tokens differ. The first one is the number of the document."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = len(super().__getitem__(index)["tokens"])
        return {"tokens": (index + 5 * torch.arange(length)) % NUM_DOCUMENTS}


class DocumentLosses(RowLog, L.LightningModule):
    """Logs the mean loss of each document, in the loss that pipelines call for micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(NUM_DOCUMENTS, 8), nn.Linear(8, NUM_DOCUMENTS))

    def forward(self, tokens: Tensor) -> Any:
        return self.layers(tokens)

    def stages(self) -> list[nn.Module]:
        return [*self.layers]

    def loss(self, logits: Tensor, batch: dict[str, Any]) -> Tensor:
        packing = batch["packing"]
        targets = packing.targets(batch["tokens"])
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses = losses.view_as(targets)
        self.log_rows("loss", packing.document_means(losses, targets))
        is_first = packing.position_ids == 0
        self.log_rows("document", packing.document_sums(batch["tokens"] * is_first))
        return losses.mean()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(self(batch["tokens"]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_texts(
    out: Path,
    strategy: str,
    strategy_options: dict[str, Any] | None = None,
    *,
    compiles: bool = False,
    **options: Any,
) -> None:
    """Train on packs on two devices, and check that each document has the loss it has alone."""
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=2,
        max_epochs=2,
        limit_val_batches=0,
        callbacks=[RowResults(out / "r", ["loss", "document"])],
        **options,
    )
    module: Any = DocumentLosses()
    if compiles:
        module = torch.compile(module, backend="eager", fullgraph=True)
    data = MemmapDataModule(
        Texts(), store_dir=out / "stores", batch_size=3, num_shards=2, sampler=Packed("tokens", 16)
    )
    trainer.fit(module, data)
    trainer.strategy.barrier()
    table = read_row_results(out / "r", "all")
    assert torch.equal(table["document"], torch.arange(NUM_DOCUMENTS).expand(2, -1))
    layers = DocumentLosses().layers
    documents = (Texts()[index]["tokens"] for index in range(NUM_DOCUMENTS))
    # A document of one token has no target.
    losses = [F.cross_entropy(layers(tokens[:-1]), tokens[1:]) for tokens in documents]
    expected = torch.stack(losses).detach().expand(2, -1)
    torch.testing.assert_close(table["loss"], expected, rtol=1e-5, atol=1e-6, equal_nan=True)


PACKED: list[tuple[str, dict[str, Any]]] = [
    ("memmap_superbatch_ddp", {"compiles": True}),
    ("memmap_pipeline", {}),
    ("memmap_pipeline", {"accumulate_grad_batches": 3}),
    ("memmap_pipeline", {"strategy_options": {"schedule": "gpipe", "num_microbatches": 3}}),
    ("memmap_pipeline", {"strategy_options": {"data_parallel_size": 2}}),
]


@in_processes(2)
def test_losses_of_packed_documents_equal_documents_computed_alone(tmp_path: Path) -> None:
    for number, (strategy, options) in each_case(PACKED):
        fit_texts(tmp_path / str(number), strategy, **options)
