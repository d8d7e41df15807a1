"""The data of a run: what a comparison changes for itself leaves the user's data module alone."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.run.data import batch_size_of, comparable, prepare_store
from lightning_memmap.compare.run.variants import parse_variants
from lightning_memmap.strategies import STRATEGIES
from tests.models import Points
from tests.unit.compare.runs import (
    BATCH_SIZE,
    DEVICES,
    ROWS,
    STEPS,
    Double,
    Jitter,
    check_all_parity,
    check_run,
)

pytestmark = [
    pytest.mark.usefixtures("quick_runs"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


class OwnData(MemmapDataModule):
    """A subclass, as a user may have."""


def options_of(data: MemmapDataModule) -> dict[str, Any]:
    return {**vars(data), "datasets": dict(data.datasets)}


def test_copy_has_other_options_and_the_class_of_the_original(tmp_path: Path) -> None:
    rows = Points(ROWS)
    data = OwnData(rows, test_dataset=rows, store_dir=tmp_path, batch_size=5, overwrite=True)
    before = options_of(data)
    copied = comparable(data).with_options(batch_size=7, transform=Double())
    assert type(copied) is OwnData
    assert (copied.batch_size, copied.drop_last, copied.overwrite) == (7, True, False)
    assert copied.datasets == {"train": rows, "val": None, "test": None, "predict": None}
    assert isinstance(copied.transform, Double)
    assert options_of(data) == before


def test_batch_size_is_the_share_of_a_data_device_under_every_strategy() -> None:
    sizes = {}
    for variant in parse_variants("ddp,auto," + ",".join(name for name, *_ in STRATEGIES)):
        options = {**variant.trainer_options(4), "accelerator": "cpu", "logger": False}
        trainer = L.Trainer(**options, enable_checkpointing=False)
        sizes[variant.strategy] = batch_size_of(trainer, 32, 4)
    alone = {"auto", "memmap_pipeline", "memmap_independent"}
    assert sizes == {name: 32 if name in alone else 8 for name in sizes}


def test_variants_have_the_rows_of_a_fold_of_a_member(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "store_dir": tmp_path / "site{member}",
        "batch_size": BATCH_SIZE,
        "num_folds": 4,
        "member": 1,
    }
    found, expected = prepare_store(
        comparable(MemmapDataModule(Points(ROWS), **options)), DEVICES, STEPS
    )
    assert found.store_path == str(tmp_path / "site1" / "train")
    # The fold that is held out has 25 rows.
    assert found.steps_per_epoch == (ROWS - 25) // (BATCH_SIZE * DEVICES) < STEPS
    checks = {
        variant: check_run(tmp_path, variant, **options)
        for variant in ("auto", "memmap_superbatch", "auto+workers0")
    }
    assert all(parity.holds for parity in check_all_parity(checks, expected).values())


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
