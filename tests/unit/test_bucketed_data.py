"""Rows of similar length together, through the data module: the same under every division."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Bucketed, Weighted
from lightning_memmap.store import Store, build_store
from tests.datasets import Ragged
from tests.models import Sounds, make_trainer, weights
from tests.rows import joined
from tests.unit.commands.test_rows import Command

ROWS, GLOBAL_BATCH = 180, 12
FORMS = {"sound": "pad", "ids": "jagged", "image": "list"}


def make_data(path: Path, sampler: Any = None, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "variable": FORMS}
    return MemmapDataModule(
        Ragged(ROWS),
        store_dir=path / "stores",
        sampler=sampler or Bucketed("sound", GLOBAL_BATCH, num_buckets=5),
        **{**defaults, **options},
    )


def fit(path: Path, devices: int, **options: Any) -> Sounds:
    module = Sounds()
    trainer = make_trainer(
        path, strategy="memmap_superbatch", devices=devices, max_epochs=2, limit_val_batches=0
    )
    data = make_data(path, batch_size=GLOBAL_BATCH // devices, **options)
    trainer.fit(module, data)
    return module


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(Ragged(ROWS), tmp_path_factory.mktemp("bucketed") / "s", progress=False)


def test_lengths_are_read_from_the_index(store: Store) -> None:
    rows = [Ragged(ROWS)[row] for row in range(ROWS)]
    assert store.lengths("sound").tolist() == [len(row["sound"]) for row in rows]
    assert store.lengths("text").tolist() == [len(row["text"].encode()) for row in rows]
    # Of two dimensions, their product.
    assert store.lengths("image").tolist() == [int(np.prod(row["image"].shape[:2])) for row in rows]
    with pytest.raises(ValueError, match="field 'row': all its rows have one length"):
        store.lengths("row")
    with pytest.raises(ValueError, match="field 'words': the store at"):
        store.lengths("words")


@pytest.mark.parametrize("residency", ["mmap", "device"])
def test_global_batches_do_not_depend_on_the_number_of_data_devices(
    tmp_path: Path, residency: str
) -> None:
    one = fit(tmp_path, 1)
    assert all(
        sorted(joined(one.seen[first : first + 15])) == list(range(ROWS)) for first in (0, 15)
    )
    assert one.seen[:15] != one.seen[15:]
    for devices in (2, 3, 4):
        many = fit(tmp_path, devices, residency=residency)
        assert many.seen == one.seen
        assert torch.equal(weights(many), weights(one))


def test_batches_have_less_padding_than_shuffled_ones(tmp_path: Path, store: Store) -> None:
    lengths = store.lengths("sound")

    def padded_items(steps: list[list[int]]) -> int:
        return sum(len(rows) * int(lengths[rows].max()) for rows in steps)

    # With many shards, one has only few rows of a window.
    options: dict[str, Any] = {"num_shards": 2}
    bucketed = fit(tmp_path, 1, sampler=Bucketed("sound", GLOBAL_BATCH), **options)
    shuffled = fit(tmp_path, 1, sampler=Weighted(np.ones(ROWS)), **options)
    unpadded = 2 * lengths.sum()
    saved = padded_items(shuffled.seen) - padded_items(bucketed.seen)
    assert saved > 0.7 * (padded_items(shuffled.seen) - unpadded)


@pytest.mark.parametrize("devices", [1, 3])
def test_rows_command_lists_the_rows_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    seen = fit(tmp_path, devices).seen
    name = "lightning_memmap.sampling.Bucketed"
    numbers = {"lengths": "sound", "bucket_size": GLOBAL_BATCH, "num_buckets": 5}
    command = Command(tmp_path, capsys)
    command.write(
        {"strategy": "memmap_superbatch", "devices": devices},
        batch_size=GLOBAL_BATCH // devices,
        sampler={"class_path": name, "init_args": numbers},
        variable=FORMS,
    )
    for epoch, step in ((0, 0), (1, 14)):
        (found,) = command.steps("--epoch", epoch, "--step", step)
        assert found["rows"] == seen[15 * epoch + step]


def test_fit_is_resumed_bitwise(tmp_path: Path) -> None:
    whole = fit(tmp_path, 2)
    module, data = Sounds(), make_data(tmp_path, batch_size=GLOBAL_BATCH // 2)
    options: dict[str, Any] = {"strategy": "memmap_superbatch", "devices": 2}
    trainer = make_trainer(tmp_path, **options, max_steps=19, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    again = Sounds()
    trainer = make_trainer(tmp_path, **options, max_epochs=2, limit_val_batches=0)
    trainer.fit(again, make_data(tmp_path, batch_size=6), ckpt_path=tmp_path / "middle.ckpt")
    assert module.seen + again.seen == whole.seen
    assert torch.equal(weights(again), weights(whole))


def test_checkpoint_of_other_buckets_is_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.prepare_data()
    data.setup("fit")
    saved = data.train_dataloader()
    next(iter(saved))
    other = make_data(tmp_path, Bucketed("sound", 2 * GLOBAL_BATCH, num_buckets=5))
    other.setup("fit")
    loader = other.train_dataloader()
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="bucket_size=12, and this loader has bucket_size=24"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        (Bucketed("row", 12), {}, "field 'row': all its rows have one length"),
        (Bucketed("noise", 12), {}, "field 'noise': the store at"),
        (Bucketed([1], 12), {}, r"lengths of shape \(1,\), and the dataset has 180 rows"),
        (Bucketed("sound", 12), {"shuffle": False}, "shuffle=False with a sampler"),
    ],
)
def test_buckets_that_cannot_be_are_refused(
    tmp_path: Path, sampler: Bucketed, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, 1, sampler=sampler, **options)
