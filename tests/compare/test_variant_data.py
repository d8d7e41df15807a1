"""The data of a run: what a comparison changes for itself leaves the user's data module alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.config import parse_variants
from lightning_memmap.compare.prepare import prepare_store
from lightning_memmap.compare.variant_data import (
    StoredRows,
    batch_size_of,
    comparable_datamodule,
    plain_rows,
)
from lightning_memmap.sampling import Bucketed, Curriculum, KFold, Mixture, Subset, Weighted
from lightning_memmap.schema import Windows
from lightning_memmap.strategies import STRATEGIES
from tests.compare.runs import (
    BATCH_SIZE,
    DEVICES,
    ROWS,
    STEPS,
    Double,
    Jitter,
    check_all_parity,
    check_run,
)
from tests.support.models import Points, Regression

pytestmark = pytest.mark.usefixtures("quick_runs")


class OwnData(MemmapDataModule):
    """A subclass, as a user may have."""


def test_copy_has_other_options_and_the_class_of_the_original(tmp_path: Path) -> None:
    rows = Points(ROWS)
    data = OwnData(rows, test_dataset=rows, store_dir=tmp_path, batch_size=5, overwrite=True)
    before = dict(vars(data))
    copied = comparable_datamodule(data).with_options(batch_size=7, transform=Double())
    assert type(copied) is OwnData
    assert (copied.batch_size, copied.drop_last, copied.overwrite) == (7, True, False)
    assert copied.datasets == {"train": rows, "val": None, "test": None, "predict": None}
    assert isinstance(copied.transform, Double)
    assert vars(data) == before


def test_batch_size_is_the_share_of_a_data_device_under_every_strategy() -> None:
    sizes = {}
    names = {name for name, *_ in STRATEGIES} - {"memmap_independent"}
    for variant in parse_variants(",".join(["ddp", "auto", *names])):
        options = {**variant.variant_options(4), "accelerator": "cpu", "logger": False}
        trainer = L.Trainer(**options, enable_checkpointing=False)
        sizes[variant.strategy] = batch_size_of(trainer, 32, 4)
    alone = {"auto", "memmap_pipeline"}
    assert sizes == {name: 32 if name in alone else 8 for name in sizes}


def test_variants_have_the_rows_of_a_fold_of_a_member(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "store_dir": tmp_path / "site{member}",
        "batch_size": BATCH_SIZE,
        "subset": KFold(4, shuffle=False),
        "member": 1,
    }
    found, expected = prepare_store(
        comparable_datamodule(MemmapDataModule(Points(ROWS), **options)), DEVICES, STEPS
    )
    assert found["store_path"] == str(tmp_path / "site1" / "train")
    # The fold that is held out has 25 rows.
    assert found["steps_per_epoch"] == (ROWS - 25) // (BATCH_SIZE * DEVICES) < STEPS
    checks = {
        variant: check_run(tmp_path, variant, **options)
        for variant in ("auto", "memmap_superbatch", "auto+workers0")
    }
    assert all(parity.holds for parity in check_all_parity(checks, expected).values())


class Series(Dataset[dict[str, Any]]):
    """Points one after the other: row ``i`` has ``20 + i % 7`` of them, and a few more words."""

    def __init__(self, num_rows: int, offset: int = 0) -> None:
        self.num_rows, self.offset = num_rows, offset

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        points = Points(20 + row % 7, offset=100 * row + self.offset)
        words = torch.arange(row % 5)
        return {"row": row, "x": points.x, "y": points.y, "words": words, "name": f"no. {row}"}


class Streamed(IterableDataset[dict[str, Any]]):
    """Rows that cannot be looked up."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(Series(ROWS).__getitem__, range(ROWS))


class Sum(Regression):
    """Learns from the mean of rows that differ in length."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mask = torch.arange(batch["x"].values.shape[1]) < batch["x"].lengths[:, None]
        return ((self(batch["x"].values) - batch["y"].values).square()[..., 0] * mask).mean()


WINDOWS = Windows(["x", "y"], 6, 3)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (Series(60), {"windows": WINDOWS, "transform": Jitter()}),
        (
            Series(60),
            {
                "windows": WINDOWS,
                "subset": Subset(range(0, 60, 2)),
                "sampler": Weighted("row", num_samples=99),
            },
        ),
        (
            {"a": Series(30), "b": Series(20, offset=5000)},
            {"windows": WINDOWS, "sampler": Mixture({"a": 0.7, "b": 0.3}, num_samples=99)},
        ),
        ({"a": Series(60), "b": Series(40, 5000)}, {"sampler": Mixture({"a": 0.7, "b": 0.3})}),
        (Series(ROWS), {"sampler": Bucketed("x", 16, 2)}),
        (
            Series(ROWS),
            {"sampler": Curriculum({0: Weighted("row"), 1: None}), "layout": {"words": "jagged"}},
        ),
        (Streamed(), {}),
    ],
    ids=["windows", "weighted windows", "mixed windows", "mixture", "bucketed", "stages", "stream"],
)
def test_variants_have_the_same_rows_in_any_order(
    tmp_path: Path, rows: Any, options: dict[str, Any]
) -> None:
    options = {"store_dir": tmp_path / "stores", "batch_size": BATCH_SIZE, **options}
    data = comparable_datamodule(MemmapDataModule(rows, **options))
    found, expected = prepare_store(data, DEVICES, STEPS)
    assert found["transform_is_random"] == ("transform" in options)
    model = Regression if options.get("windows") is WINDOWS else Sum
    checks = {
        variant: check_run(tmp_path, variant, model, rows=rows, **options)
        for variant in ("auto", "memmap_superbatch", "auto+workers0")
    }
    parity = check_all_parity(checks, expected)
    assert {name: each.steps_with_equal_rows for name, each in parity.items()} == {
        name: [STEPS, STEPS] for name in checks
    }
    # Without `prepare`, nobody has found that a transform is random.
    assert all(each.holds or "transform" in options for each in parity.values())
    # The stores are enough.
    bare = dict.fromkeys(rows) if isinstance(rows, dict) else None
    data = comparable_datamodule(MemmapDataModule(bare, **options))
    assert prepare_store(data, DEVICES, STEPS)[1] == expected
    store = data.open_train_store()
    assert isinstance(plain_rows(data, store, data.make_train_order(store).pool.rows), StoredRows)


def test_run_leaves_the_data_module_of_the_user_as_it_was(tmp_path: Path) -> None:
    made: list[MemmapDataModule] = []

    class Kept(MemmapDataModule):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    transform = Jitter()
    for variant in ("memmap_superbatch", "memmap_superbatch+ideal", "auto+workers0"):
        check_run(tmp_path, variant, data_class=Kept, transform=transform, batch_size=5)
    assert len(made) == 3
    for data in made:
        assert (data.batch_size, data.transform) == (5, transform)
        assert data.placement is None
        assert data.trainer is None
