"""Packed sequences from a config: what `fit` trains on is what `rows` lists."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor

from lightning_memmap.cli import main
from tests.loading.test_packed_batch import LENGTH, Documents
from tests.support.command_line import CommandLine

# LightningCLI uses names that jsonargparse has changed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)
NUM_ROWS = 96
PACKED = "lightning_memmap.sampling.Packed"


class ManyDocuments(Documents):
    """As many documents as the tests count on."""

    def __init__(self, num_rows: int = NUM_ROWS, most: int = 20) -> None:
        super().__init__(num_rows, most)


class SeesRows(L.LightningModule):
    """Writes down which rows each step of training and validation has.

    Args:
        out: The file.
    """

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = Path(out)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[Any]] = {"train": [], "val": []}

    def _see(self, split: str, batch: Any) -> None:
        packing = batch["packing"]
        assert batch["tokens"].shape == packing.document_ids.shape
        rows = batch["row_number"]
        starts = packing.cu_seqlens[:, :-1].clamp(max=packing.length - 1)
        places = batch["tokens"].gather(1, starts.long())
        is_document = rows >= 0
        assert torch.equal(places[is_document] // 1000, rows[is_document] % 96)
        self.seen[split].append([self.current_epoch, sorted(rows[is_document].tolist())])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._see("train", batch)
        return self.weight * 2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._see("val", batch)

    def on_fit_end(self) -> None:
        self.out.write_text(json.dumps(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sampler(**options: Any) -> dict[str, Any]:
    return {"class_path": PACKED, "init_args": {"field": "tokens", "length": LENGTH, **options}}


def selection(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_memmap.sampling.{name}", "init_args": options}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Fits by a config with some options of the data, and returns what steps saw, and `rows`."""

    def fit(**options: Any) -> tuple[dict[str, Any], CommandLine]:
        data = {
            "train_dataset": {"class_path": f"{__name__}.ManyDocuments"},
            "store_dir": str(tmp_path / "stores"),
            "batch_size": 2,
            "num_shards": 4,
            "with_row_numbers": True,
            "sampler": sampler(),
            **options,
        }
        config = {
            "seed_everything": False,
            "model": {
                "class_path": f"{__name__}.SeesRows",
                "init_args": {"out": str(tmp_path / "seen.json")},
            },
            "data": {"class_path": "lightning_memmap.MemmapDataModule", "init_args": data},
            "trainer": {
                "accelerator": "cpu",
                "max_epochs": 3,
                "logger": False,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": str(tmp_path),
            },
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        main(["fit", "--config", str(tmp_path / "config.yaml")])
        rows = CommandLine(capsys, "rows", "--config", tmp_path / "config.yaml", "--json")
        return json.loads((tmp_path / "seen.json").read_text()), rows

    return fit


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subset": selection("Subset", rows=[*range(3, 60)])}, {*range(3, 60)}),
        ({"subset": selection("KFold", num_folds=3), "member": 1}, None),
        ({"subset": selection("RandomSplit", validation=0.25)}, None),
        ({"shuffle_block": 12}, {*range(NUM_ROWS)}),
        ({"residency": "stream", "shuffle_block": 12}, {*range(NUM_ROWS)}),
        (
            {
                "residency": "stream",
                "shuffle_block": 8,
                "subset": selection("KFold", num_folds=3),
                "member": 2,
            },
            None,
        ),
        ({"sampler": sampler(max_documents=2)}, {*range(NUM_ROWS)}),
        ({"sampler": sampler(overflow="drop", length=16)}, "short"),
        (
            {
                "sampler": {
                    "class_path": "lightning_memmap.sampling.Curriculum",
                    "init_args": {"stages": {0: sampler(), 1: sampler(max_documents=2)}},
                }
            },
            {*range(NUM_ROWS)},
        ),
    ],
)
def test_steps_have_the_rows_that_the_config_selects(run: Any, options: Any, expected: Any) -> None:
    seen, rows = run(**options)
    if expected == "short":
        expected = {row for row, n in enumerate(ManyDocuments().lengths.tolist()) if n <= 16}
    if expected is None:
        held_out = [row for epoch, step in seen["val"] for row in step if epoch == 0]
        assert held_out
        assert len({*held_out}) == len(held_out)
        expected = {*range(NUM_ROWS)} - {*held_out}
    for epoch in range(3):
        steps = [step for number, step in seen["train"] if number == epoch]
        trained = [row for step in steps for row in step]
        assert sorted(trained) == sorted(expected)
        for step in (0, len(steps) - 1):
            assert rows("--epoch", epoch, "--step", step) == 0, rows.err
            assert sorted(json.loads(rows.out)["rows"]) == steps[step]
        row = steps[1][0]
        assert rows("--epoch", epoch, "--find", row) == 0, rows.err
        assert json.loads(rows.out)["run_steps"] == [epoch * len(steps) + 1]


def test_shares_of_streamed_sets_change_by_config(run: Any) -> None:
    stages = {
        epoch: sampler(shares={"a": a, "b": 1 - a}, shares_of="documents")
        for epoch, a in ((0, 0.5), (1, 0.25))
    }
    sets = {
        name: {"class_path": f"{__name__}.ManyDocuments", "init_args": {"num_rows": count}}
        for name, count in (("a", 96), ("b", 64))
    }
    curriculum = {
        "class_path": "lightning_memmap.sampling.Curriculum",
        "init_args": {"stages": stages},
    }
    seen, _ = run(train_dataset=sets, sampler=curriculum)
    for epoch, share in enumerate((0.5, 0.25, 0.25)):
        rows = [row for number, step in seen["train"] if number == epoch for row in step]
        assert sum(row < 96 for row in rows) / len(rows) == pytest.approx(share, abs=0.01)
