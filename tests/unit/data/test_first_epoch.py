"""Training while the store is built: as from a finished store, and no row is read twice."""

import gc
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.data.first_epoch import _FIRST_STEPS
from lightning_memmap.errors import DatasetError, StoreError, StoreNotFoundError
from lightning_memmap.loading import loader
from lightning_memmap.sampling import (
    Bucketed,
    KFold,
    RandomSplit,
    Subset,
    Weighted,
)
from lightning_memmap.store import append_store, build_store, open_store, verify_store
from lightning_memmap.store.directory import JOURNAL, KEY, StoreDirectory
from lightning_memmap.store.growing import Serving
from lightning_memmap.store.samples import probe_rows
from tests.command_line import CommandLine
from tests.datasets import FORMS, EncodedImages, Logged, Ragged, Replaced, Slow
from tests.models import Brightness, Points, Regression, Sounds, make_trainer, weights

NUM_ROWS, GLOBAL_BATCH = 331, 24


_num_read = Counter[tuple[str, int]]()


def _asked_for(stores: Path) -> bool:
    """Whether training has asked for rows: it may take long to begin. One is for its set-up."""
    with suppress(FileNotFoundError):
        return any(path.stat().st_size > 8 for path in stores.glob("train/g-*/serving/wanted-*"))
    return False


class Gated(Logged):
    """Gives each of two processes less than half of its rows, and the others once the file
    ``log.open`` is there. A process that is slow is not kept from rows that are needed."""

    def __getitem__(self, row: int) -> Any:
        log, process, deadline = Path(self.log), (self.log, os.getpid()), monotonic() + 60
        _num_read[process] += 1
        while log.exists() and (
            _num_read[process] > 16 + len(self) * 0.45
            or (_num_read[process] > 16 and not _asked_for(log.with_suffix("")))
        ):
            if log.with_suffix(".open").exists():
                break
            assert monotonic() < deadline, "the first step waits for rows that it does not need"
            sleep(0.01)
        sleep(0.002)
        return super().__getitem__(row)


class Watching(L.Callback):
    """Notes at each step whether rows of the store are missing."""

    def __init__(self, gate: Path) -> None:
        self.is_growing: list[bool] = []
        self.is_finished: list[bool] = []
        self.gate = gate
        #: How much of the store the progress bar says is there.
        self.shown: list[float | None] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.gate.touch()
        self.shown.append(trainer.progress_bar_metrics.get("stored"))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, step: int) -> None:
        serving = trainer.datamodule.stores["train"].supply
        self.is_finished.append(serving is None)
        self.is_growing.append(serving is not None and not serving.has_all)
        if self.is_growing == [True]:
            # Nobody else builds at this place.
            lock = StoreDirectory(Path(trainer.datamodule.store_dir) / "train").locked(wait=False)
            with pytest.raises(StoreError, match="another process is writing"), lock:
                pass


def fit(
    path: Path,
    module: Any,
    dataset: Dataset[Any],
    build: str,
    *,
    grows: bool = True,
    devices: int = 1,
    validated: Dataset[Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Watching:
    """Train for three epochs, and say at which steps rows were missing."""
    # The log is an attribute of the dataset, and changes.
    options = {
        "fingerprint": "1",
        "seed": 5,
        "num_workers": 2,
        "batch_size": GLOBAL_BATCH // devices,
        **options,
    }
    data = MemmapDataModule(
        Gated(dataset, path / f"{build}.log"),
        validated,
        store_dir=path / build,
        build=build,
        **options,
    )
    watching = Watching(path / f"{build}.open")
    if not grows:
        watching.gate.touch()
    has_val = float(validated is not None or isinstance(options.get("subset"), RandomSplit | KFold))
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=devices,
        callbacks=[watching],
        **{
            "max_epochs": 3,
            "limit_val_batches": has_val,
            "num_sanity_val_steps": 0,
            **(trainer_options or {}),
        },
    )
    trainer.fit(module, datamodule=data)
    return watching


def assert_alike(
    path: Path, kind: Callable[[], Any], dataset: Dataset[Any], grows: bool = True, **options: Any
) -> None:
    """Check that training is the same whether the store is built first or meanwhile."""
    modules = {build: kind() for build in ("first", "while_training")}
    for build, module in modules.items():
        is_growing = grows and build == "while_training"
        watching = fit(path, module, dataset, build, grows=is_growing, **options)
        assert watching.is_growing[0] is is_growing
        if is_growing:
            assert 0 < max(each for each in watching.shown if each is not None) <= 1
            # It is not shown any more once the rows come from the finished store.
            assert not all(watching.is_finished[-2:]) or watching.shown[-1] is None
    first, meanwhile = modules.values()
    assert first.seen == meanwhile.seen
    assert torch.equal(weights(first), weights(meanwhile))
    if watching.is_growing[-1]:
        # Rows that no epoch draws are read when there is time: here there was none.
        kept = {name: options[name] for name in ("num_shards", "variable") if name in options}
        gated = Gated(dataset, path / "while_training.log")
        kept |= {"store_dir": path / "while_training", "fingerprint": "1"}
        MemmapDataModule(gated, **kept).prepare_data()
    stores = [open_store(path / build / "train") for build in modules]
    assert stores[0].manifest.content == stores[1].manifest.content
    assert verify_store(path / "while_training" / "train") == []


def assert_each_is_read_once(path: Path) -> None:
    """Check that no row was read twice but those that a build, and one that goes on, compares."""
    read = rows_read(path / "while_training.log")
    others = {row: count for row, count in read.items() if row not in probe_rows(NUM_ROWS)}
    assert others == dict.fromkeys(others, 1)
    assert len(read) == NUM_ROWS


def rows_read(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split()))


def doubled(batch: Any) -> Any:
    return {**batch, "x": batch["x"] * 2}


SOUNDS: tuple[Any, Any] = (Sounds, Ragged(150))
#: How training goes: options, of another kind of rows as well.
ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "blocks": {"shuffle_window": 3},
    "streamed": {"shuffle_window": 3, "residency": "stream"},
    "on the device": {"residency": "device"},
    "by weight": {"sampler": Weighted(torch.arange(NUM_ROWS) % 5 + 0.5)},
    "a part": {"sampler": Weighted(torch.arange(NUM_ROWS) < 100), "shuffle_window": 4},
    "chosen rows": {"subset": {"train": Subset(rows=range(7, 200, 3))}},
    "held out": {"subset": RandomSplit(0.2)},
    "a fold": {"subset": KFold(5), "member": 2},
    "steps left out": {"skip_steps": [1, 2, 20], "drop_last": True},
    "row numbers": {"with_row_numbers": True, "num_shards": 8},
    **{
        f"{devices} devices": {
            "devices": devices,
            "validated": Points(60, 1000),
            "transform": doubled,
        }
        for devices in (1, 3, 4)
    },
    **{
        form: {"of": SOUNDS, "variable": {"sound": form, "ids": form, "image": "list"}}
        for form in ("pad", "jagged", "list")
    },
    "images": {"of": (Brightness, EncodedImages(100)), "variable": FORMS},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_training_is_that_from_a_finished_store(tmp_path: Path, order: str) -> None:
    options: dict[str, Any] = {"devices": 2, **ORDERS[order]}
    kind, dataset = options.pop("of", (Regression, Points(NUM_ROWS)))
    assert_alike(tmp_path, kind, dataset, **options)
    if "of" not in ORDERS[order]:
        assert_each_is_read_once(tmp_path)


def test_rows_are_read_in_the_order_of_need_some_steps_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked, want = list[int](), Serving.want

    def noted(self: Serving, rows: Any) -> None:
        num_asked.append(len(rows))
        want(self, rows)

    monkeypatch.setattr(Serving, "want", noted)
    monkeypatch.setattr(loader, "_BLOCK_STEPS", 5)
    module, size = Regression(), 4
    fit(tmp_path, module, Points(NUM_ROWS), "while_training", num_workers=1, batch_size=size)
    # A single row is what a set-up looks at.
    first, *later = [count for count in num_asked if count > 1]
    assert first == _FIRST_STEPS * size
    assert max(later) == 5 * size
    read = [*map(int, (tmp_path / "while_training.log").read_text().split())]
    read = read[len(probe_rows(NUM_ROWS)) :]
    seen = [row for batch in module.seen["train"] for row in batch]
    # Nothing else is read before training asks first.
    assert read[: 5 * size] == seen[: 5 * size]


def test_every_request_of_a_reader_is_heard(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(bytes(9))
    serving, heard = Serving.make(tmp_path, 9), set[Path]()
    for row in range(9):
        serving.want(np.array([row]))
        if row % 2:  # The number of a file's inode may be that of one before it.
            (path,) = serving.wanted()
            assert path not in heard
            assert np.fromfile(path, np.int64).tolist() == [row]
            heard.add(path)


@pytest.mark.parametrize("sampler", [Weighted("row"), Bucketed("sound", 4)])
def test_order_that_looks_up_a_field_builds_the_store_first(tmp_path: Path, sampler: Any) -> None:
    kind, dataset = (Regression, Points(150)) if isinstance(sampler, Weighted) else SOUNDS
    assert_alike(tmp_path, kind, dataset, grows=False, sampler=sampler)


@pytest.mark.parametrize("limit", [3, 1.0])
@pytest.mark.slow
def test_training_on_some_steps_of_each_epoch(tmp_path: Path, limit: float) -> None:
    """The rows of the others are there when the next run begins, or are read then."""
    modules = []
    for build in ("first", "while_training"):
        modules.append(Regression())
        options = {"limit_train_batches": limit, "max_epochs": 2}
        grows = build != "first"
        fit(tmp_path, modules[-1], Points(NUM_ROWS), build, grows=grows, trainer_options=options)
    assert torch.equal(*map(weights, modules))
    fit(tmp_path, Regression(), Points(NUM_ROWS), "while_training")
    assert_each_is_read_once(tmp_path)


def test_error_of_a_build_is_its_own_in_a_relative_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = Replaced(Points(NUM_ROWS), {200: ValueError("no such file")})
    with pytest.raises(DatasetError, match=r"row 200.*no such file"):
        fit(Path(), Regression(), dataset, "while_training")


def test_dataset_that_fails_ends_training_and_keeps_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Replaced(Points(NUM_ROWS), {200: ValueError("no such file")})
    with pytest.raises(DatasetError, match=r"^train: .*row 200.*no such file"):
        fit(tmp_path, Regression(), dataset, "while_training", shuffle=False)
    data = MemmapDataModule(store_dir=tmp_path / "while_training")
    data.setup("fit")
    with pytest.raises(StoreNotFoundError, match=r"of 331 rows .* not finished at .*give the data"):
        data.train_dataloader()
    run = CommandLine(capsys)
    assert run("store", "info", tmp_path / "while_training") == 0
    assert re.search(r"train: \d+ of 331 rows are there", run.out)
    assert "skipped" not in run.err
    before = rows_read(tmp_path / "while_training.log")
    module = Regression()
    fit(tmp_path, module, Points(NUM_ROWS), "while_training", shuffle=False)
    assert verify_store(tmp_path / "while_training" / "train") == []
    again = rows_read(tmp_path / "while_training.log") - before
    assert sum(again.values()) < NUM_ROWS


@pytest.mark.slow
def test_build_that_is_not_finished_keeps_no_file_open(tmp_path: Path) -> None:
    def fit_some(number: int) -> int:
        fails = {200: ValueError("no such file")} if number % 2 else {}
        data = MemmapDataModule(
            Replaced(Slow(Points(3000), 0.05), fails),
            store_dir=tmp_path / str(number),
            num_workers=1,
            build="while_training",
        )
        with suppress(DatasetError):
            steps = -1 if fails else 2
            make_trainer(tmp_path, max_epochs=1, max_steps=steps).fit(Regression(), data)
        assert StoreDirectory(tmp_path / str(number) / "train").unfinished(KEY)
        del data
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    first, *later = map(fit_some, range(5))
    assert max(later) <= first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"overwrite": True}, "overwrite=True"),
        ({"residency": "stream"}, "residency='stream'.*shuffle_window"),
        ({"build": "later"}, "build='later'"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    options = {"store_dir": "stores", "num_workers": 1, "build": "while_training", **options}
    with pytest.raises(ValueError, match=message):
        MemmapDataModule(Points(9), **options)


def test_stream_is_not_supported(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "build": "while_training"}
    data = MemmapDataModule(iter(Points(9)), store_dir=tmp_path, fingerprint="1", **options)
    with pytest.raises(ValueError, match=r"train_dataset.*build='first'"):
        data.prepare_data()


class Failing(Points):
    """Raises at a row that is not read before all others."""

    def __getitem__(self, row: int) -> Any:
        if row == min({*range(len(self))} - {*probe_rows(len(self))}):
            raise OSError("gone")
        return super().__getitem__(row)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_another_build_has_left_is_not_trained_from(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        build_store(Points(60), tmp_path / "train", progress=False)
        with pytest.raises(DatasetError):
            append_store(Failing(40), tmp_path / "train", progress=False)
    else:
        with pytest.raises(DatasetError):
            build_store(Failing(60), tmp_path / "train", progress=False)
    assert list(StoreDirectory(tmp_path / "train").unfinished(KEY))
    given = Points(60) if is_there else None
    data = MemmapDataModule(given, store_dir=tmp_path, build="while_training", num_workers=1)
    if is_there:
        data.prepare_data()
    data.setup("fit")
    assert [(name, store.num_rows, store.supply) for name, store in data.stores.items()] == (
        [("train", 60, None)] if is_there else []
    )
    data.teardown()
