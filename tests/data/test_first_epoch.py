"""Training while the store is built: as from a finished store, and no row is read twice."""

import gc
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, StackDataset, Subset

from lightning_memmap import ColumnDataset, MemmapDataModule
from lightning_memmap.data.set_up import FIRST_STEPS
from lightning_memmap.errors import DatasetError, SchemaError, StoreError, StoreNotFoundError
from lightning_memmap.loading import loader
from lightning_memmap.sampling import Bucketed, Mixture, Weighted
from lightning_memmap.store import (
    append_store,
    build_store,
    building,
    open_store,
    verify_store,
)
from lightning_memmap.store.directory import DRAFT, StoreDirectory
from lightning_memmap.store.growing import SharedBuild
from lightning_memmap.store.samples import RandomDatasetError, choose_probe_rows
from lightning_memmap.store.sources.arrow_columns import RowGroups
from tests.contract.data.test_first_epoch_in_processes import (
    GLOBAL_BATCH,
    ORDERS,
    POINTS,
    RAGGED,
    ROWS,
    SEVERAL,
    assert_none_is_read_twice,
    sets_of,
)
from tests.support.command_line import CommandLine
from tests.support.datasets import Logged, Replaced, Slow
from tests.support.models import Points, Regression, make_trainer, set_up, weights
from tests.support.rows import rows_in

_num_read = Counter[tuple[str, int]]()


def _asked_for(stores: Path) -> bool:
    """Whether training has asked for rows: it may take long to begin. One is for its set-up."""
    with suppress(FileNotFoundError):
        return any(path.stat().st_size > 16 for path in stores.rglob("requests/requested-*"))
    return False


class Gated(Logged):
    """Gives each of two processes less than half of its rows, and the others once the file
    ``open`` is beside its log. A process that is slow is not kept from rows that are needed."""

    def __getitem__(self, row: int) -> Any:
        log, process, deadline = Path(self.log), (self.log, os.getpid()), monotonic() + 60
        _num_read[process] += 1
        while log.exists() and (
            _num_read[process] > 16 + len(self) * 0.45
            or (_num_read[process] > 16 and not _asked_for(log.parent / "stores"))
        ):
            if (log.parent / "open").exists():
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
        assert "stored" not in trainer.callback_metrics
        self.shown.append(trainer.progress_bar_metrics.get("stored"))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, step: int) -> None:
        pending = trainer.datamodule.stores["train"].pending
        self.is_finished.append(pending is None)
        self.is_growing.append(pending is not None and pending.progress < 1)
        if self.is_growing == [True]:
            # Nobody else builds at this place.
            stores = Path(trainer.datamodule.store_dir) / "train"
            built = next(path.parent for path in stores.rglob("g-*"))
            lock = StoreDirectory(built).locked(wait=False)
            with pytest.raises(StoreError, match="another process is writing"), lock:
                pass


def fit(
    path: Path,
    module: Any,
    dataset: Dataset[Any] | dict[str, Dataset[Any]],
    build: str,
    *,
    grows: bool = True,
    devices: int = 1,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Watching:
    """Train for two epochs, and say at which steps rows were missing."""
    path /= build
    path.mkdir(exist_ok=True)
    # The log is an attribute of the dataset, and changes.
    options = {
        "fingerprint": "1",
        "seed": 5,
        "num_workers": 2,
        "batch_size": GLOBAL_BATCH // devices,
        **options,
    }
    sets = dataset if isinstance(dataset, dict) else {"rows": dataset}
    gated: dict[str, Any] = {
        name: Gated(each, path / f"{name}.rows") for name, each in sets.items()
    }
    data = MemmapDataModule(
        gated.get("rows", gated), store_dir=path / "stores", build=build, **options
    )
    watching = Watching(path / "open")
    if build == "first" or not grows:
        watching.gate.touch()
    defaults = {"strategy": "memmap_superbatch", "max_epochs": 2, "num_sanity_val_steps": 0}
    given = {**defaults, **(trainer_options or {})}
    trainer = make_trainer(path, devices=devices, callbacks=[watching], **given)
    trainer.fit(module, datamodule=data)
    assert "stored" not in trainer.callback_metrics | trainer.progress_bar_metrics
    return watching


def doubled(batch: Any) -> Any:
    return {**batch, "x": batch["x"] * 2}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_training_is_that_from_a_finished_store_on_any_number_of_devices(
    tmp_path: Path, order: str
) -> None:
    options = dict(ORDERS[order])
    kind, dataset = options.pop("of", POINTS)
    if kind is Regression:
        options["transform"] = doubled
    first = kind()
    fit(tmp_path, first, dataset, "first", **options)
    # On one device, too, where no process of several shows it.
    for devices in (4,) if order in SEVERAL else (1, 4):
        (path := tmp_path / str(devices)).mkdir()
        module = kind()
        watching = fit(path, module, dataset, "while_training", devices=devices, **options)
        assert watching.is_growing[0]
        assert 0 < max(each for each in watching.shown if each is not None) <= 1
        # It is not shown any more once the rows come from the finished store.
        pairs = zip(watching.shown[1:], watching.is_finished, strict=False)
        assert {shown for shown, is_finished in pairs if is_finished} <= {None}
        assert module.seen == first.seen
        assert torch.equal(weights(module), weights(first))
        path /= "while_training"
        if watching.is_growing[-1]:
            # Rows that no epoch draws are read when there is time: here there was none.
            finish(path, sets_of(order), options)
        read = assert_none_is_read_twice(order, path)
        assert len(read) == sum(map(len, sets_of(order).values()))
        for manifest in (path / "stores").rglob("manifest.json"):
            store, within = manifest.parent, manifest.parent.relative_to(path)
            whole = open_store(tmp_path / "first" / within).manifest
            assert open_store(store).manifest.content == whole.content
            assert verify_store(store) == []


def finish(path: Path, sets: dict[str, Dataset[Any]], options: dict[str, Any]) -> None:
    """Build what a training has left unfinished."""
    kept = {"num_shards": options.get("num_shards"), "variable": [*options.get("layout", ())]}
    for name, dataset in sets.items():
        store = path / "stores" / "train" / (name if len(sets) > 1 else "")
        gated = Gated(dataset, path / f"{name}.rows")
        build_store(gated, store, fingerprint="1", progress=False, **kept)


def test_rows_are_read_in_the_order_of_need_some_steps_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = list[int]()
    request = SharedBuild.request

    def noted(self: SharedBuild, rows: Any, *priorities: Any) -> None:
        num_asked.append(len(rows))
        request(self, rows, *priorities)

    monkeypatch.setattr(SharedBuild, "request", noted)
    monkeypatch.setattr(loader, "_LOCATED_STEPS", 5)
    module, size = Regression(), 4
    fit(tmp_path, module, Points(ROWS), "while_training", num_workers=1, batch_size=size)
    # A single row is what a set-up looks at.
    first, *later = [count for count in num_asked if count > 1]
    assert first == FIRST_STEPS * size
    assert max(later) == 5 * size
    read = [*map(int, (tmp_path / "while_training" / "rows.rows").read_text().split())]
    read = read[len(choose_probe_rows(ROWS)) :]
    seen = [row for batch in module.seen["train"] for row in batch]
    # Nothing else is read before training asks first.
    assert read[: 5 * size] == seen[: 5 * size]


def test_rows_of_several_sets_are_read_in_the_order_of_need(tmp_path: Path) -> None:
    every = Logged(Slow(Points(ROWS), 0.004, every=1), tmp_path / "rows")
    sets = {"often": Subset(every, range(231)), "rarely": Subset(every, range(231, ROWS))}
    data = MemmapDataModule(
        sets,
        store_dir=tmp_path / "stores",
        num_workers=1,
        batch_size=4,
        build="while_training",
        fingerprint="1",
        sampler=Mixture({"often": 0.9, "rarely": 0.1}),
    )
    set_up(data, "fit")
    needed = np.array(rows_in(data.train_dataloader())[:60])
    data.teardown()
    read = np.loadtxt(tmp_path / "rows", int)[2 * len(choose_probe_rows(ROWS)) :][:60]
    # A few of one set are read at once, and not all that are wanted of it.
    assert abs(int((read >= 231).sum()) - int((needed >= 231).sum())) < 10


@pytest.mark.parametrize(("order", "is_picked"), [("shuffled", True), ("blocks", False)])
def test_each_row_group_of_a_parquet_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, is_picked: bool
) -> None:
    log, read = tmp_path / "groups", RowGroups.read

    def noted(self: Any, group: int, name: str) -> Any:
        with log.open("a") as file:
            file.write(f"{group} {name}\n")
        return read(self, group, name)

    table = pa.table({"x": np.sin(np.arange(600.0)), "row": np.arange(600)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
    rows = ColumnDataset(tmp_path / "rows.parquet")
    numbers = np.random.default_rng(0).permutation(600) if is_picked else np.arange(600)
    seen = []
    for build in ("first", "while_training"):
        data = MemmapDataModule(
            Subset(rows, numbers.tolist()) if is_picked else rows,
            store_dir=tmp_path / build,
            num_workers=2,
            build=build,
            **ORDERS[order],
        )
        with monkeypatch.context() as patch:
            if build == "while_training":
                patch.setattr(RowGroups, "read", noted)
            set_up(data, "fit")
            seen.append(rows_in(data.train_dataloader()))
            data.teardown()
    assert seen[0] == seen[1]
    probed = {f"{numbers[row] // 20}" for row in choose_probe_rows(600)}
    found = Counter(log.read_text().splitlines())
    assert {count for each, count in found.items() if each.split()[0] not in probed} == {1}
    assert len(found) == 60


class Many(Logged):
    """Gives many rows at once."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


@pytest.mark.parametrize("kind", ["many items at once", "slices"])
def test_rows_that_are_read_together_are_those_of_a_finished_store(
    tmp_path: Path, kind: str
) -> None:
    points, seen, log = Points(ROWS), [], tmp_path / "rows"
    for build in ("first", "while_training"):
        log.unlink(missing_ok=True)
        dataset = (
            StackDataset(row=points.row, x=points.x) if kind == "slices" else Many(points, log)
        )
        data = MemmapDataModule(
            dataset, store_dir=tmp_path / build, num_workers=2, fingerprint="1", build=build
        )
        batches = [*set_up(data, "fit").train_dataloader()]
        seen.append(torch.cat([torch.cat([b["row"][:, None], b["x"]], 1) for b in batches]))
        data.teardown()
    assert torch.equal(*seen)
    if kind != "slices":
        read = Counter(map(int, log.read_text().split()))
        assert {read[row] for row in read.keys() - {*choose_probe_rows(ROWS)}} == {1}


def test_second_run_trains_from_what_the_first_one_builds(tmp_path: Path) -> None:
    def run() -> MemmapDataModule:
        return MemmapDataModule(
            Logged(Slow(Points(ROWS), 0.004, every=1), tmp_path / "rows"),
            store_dir=tmp_path / "stores",
            num_workers=1,
            fingerprint="1",
            build="while_training",
        )

    first, second = set_up(run(), "fit"), run()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.prepare_data)
        batches = iter(first.train_dataloader())
        seen = next(batches)["row"].tolist()
        assert not waiting.done()
        seen += rows_in(batches)
        first.teardown()
        waiting.result()
    second.setup("fit")
    assert second.stores["train"].pending is None
    assert rows_in(second.train_dataloader()) == seen
    second.teardown()
    read = Counter(map(int, (tmp_path / "rows").read_text().split()))
    assert {read[row] for row in read.keys() - {*choose_probe_rows(ROWS)}} == {1}


def test_mixture_of_which_one_set_is_stored_already(tmp_path: Path) -> None:
    seen = []
    for build in ("first", "while_training"):
        sets: dict[str, Dataset[Any]] = {"a": Points(231), "b": Points(100, 5000)}
        build_store(sets["a"], tmp_path / build / "train" / "a", progress=False)
        sampler = Mixture({"a": 0.5, "b": 0.5})
        data = MemmapDataModule(
            sets, store_dir=tmp_path / build, num_workers=1, sampler=sampler, build=build
        )
        seen.append(rows_in(set_up(data, "fit").train_dataloader()))
        data.teardown()
    assert seen[0] == seen[1]


class Interrupting(L.Callback):
    """Saves a checkpoint, and raises some steps later."""

    def __init__(self, saved: Path, error: type[BaseException]) -> None:
        self.saved, self.error = saved, error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.saved)
        if trainer.global_step == 7:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_run_that_is_interrupted_in_the_first_epoch_goes_on_bit_for_bit(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def run(build: str, *callbacks: L.Callback, ckpt_path: Any = None) -> torch.Tensor:
        dataset = Logged(Slow(Points(ROWS), 0.01, every=1), tmp_path / f"{build}.rows")
        data = MemmapDataModule(
            dataset,
            store_dir=tmp_path / build,
            num_workers=2,
            batch_size=4,
            fingerprint="1",
            build=build,
        )
        options: dict[str, Any] = {"strategy": "memmap_superbatch", "devices": 2, "max_epochs": 2}
        trainer = make_trainer(tmp_path, callbacks=[*callbacks], **options)
        trainer.fit(module := Regression(), data, ckpt_path=ckpt_path)
        return weights(module)

    whole, saved = run("first"), tmp_path / "saved.ckpt"
    with pytest.raises((SystemExit, RuntimeError)):
        run("while_training", Interrupting(saved, error))
    assert StoreDirectory(tmp_path / "while_training" / "train").unfinished(DRAFT)
    assert torch.equal(run("while_training", ckpt_path=saved), whole)
    assert verify_store(tmp_path / "while_training" / "train") == []
    read = Counter(map(int, (tmp_path / "while_training.rows").read_text().split()))
    assert {read[row] for row in read.keys() - {*choose_probe_rows(ROWS)}} == {1}


def test_store_that_cannot_be_finished_ends_training_at_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(building, "compute_checksums", fail)
    data = MemmapDataModule(Points(ROWS), store_dir=tmp_path, num_workers=1, build="while_training")
    loader, deadline = set_up(data, "fit").train_dataloader(), monotonic() + 60

    def train() -> None:
        while monotonic() < deadline:
            assert len(rows_in(loader)) == ROWS

    with pytest.raises(OSError, match="the disk is gone"):
        train()
    data.teardown()
    assert StoreDirectory(tmp_path / "train").unfinished(DRAFT)


@pytest.mark.parametrize("sampler", [Weighted("row"), Bucketed("sound", 4)])
def test_order_that_looks_up_a_field_builds_the_store_first(tmp_path: Path, sampler: Any) -> None:
    kind, dataset = (Regression, Points(150)) if isinstance(sampler, Weighted) else RAGGED
    modules = []
    for build in ("first", "while_training"):
        modules.append(kind())
        watching = fit(tmp_path, modules[-1], dataset, build, grows=False, sampler=sampler)
        assert not any(watching.is_growing)
    assert torch.equal(*map(weights, modules))


@pytest.mark.parametrize("limit", [3, 1.0])
@pytest.mark.slow
def test_training_on_some_steps_of_each_epoch(tmp_path: Path, limit: float) -> None:
    """The rows of the others are there when the next run begins, or are read then."""
    modules = []
    for build in ("first", "while_training"):
        modules.append(Regression())
        options = {"limit_train_batches": limit, "max_epochs": 2}
        fit(tmp_path, modules[-1], Points(ROWS), build, trainer_options=options)
    assert torch.equal(*map(weights, modules))
    fit(tmp_path, Regression(), Points(ROWS), "while_training")
    read = assert_none_is_read_twice("shuffled", tmp_path / "while_training")
    assert len(read) == ROWS


def test_error_of_a_build_is_its_own_in_a_relative_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = Replaced(Points(ROWS), {200: ValueError("no such file")})
    with pytest.raises(DatasetError, match=r"row 200.*no such file"):
        fit(Path(), Regression(), dataset, "while_training")


def test_dataset_that_fails_ends_training_and_keeps_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Replaced(Points(ROWS), {200: ValueError("no such file")})
    with pytest.raises(DatasetError, match=r"^train: .*row 200.*no such file"):
        fit(tmp_path, Regression(), dataset, "while_training", shuffle=False)
    directory = tmp_path / "while_training"
    data = MemmapDataModule(store_dir=directory / "stores")
    data.setup("fit")
    with pytest.raises(StoreNotFoundError, match=r"train_dataset=None.*331 rows .* not finished"):
        data.train_dataloader()
    run = CommandLine(capsys)
    assert run("store", "info", directory / "stores") == 0
    assert re.search(r"train: \d+ of 331 rows are there", run.out)
    assert "skipped" not in run.err
    before = (directory / "rows.rows").read_text().split()
    module = Regression()
    fit(tmp_path, module, Points(ROWS), "while_training", shuffle=False)
    assert verify_store(directory / "stores" / "train") == []
    again = len((directory / "rows.rows").read_text().split()) - len(before)
    assert again < ROWS


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
        assert StoreDirectory(tmp_path / str(number) / "train").unfinished(DRAFT)
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
        ({"residency": "stream"}, "residency='stream'.*shuffle_block"),
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
        if row == min({*range(len(self))} - {*choose_probe_rows(len(self))}):
            raise OSError("gone")
        return super().__getitem__(row)


class Random(Points):
    """Another row each time."""

    def __getitem__(self, row: int) -> Any:
        return {"x": torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.uint8)}


def test_random_dataset_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    data = MemmapDataModule(
        Random(60), store_dir=tmp_path, num_workers=2, batch_size=4, build="while_training"
    )
    with pytest.raises(RandomDatasetError, match="row"):
        list(set_up(data, "fit").train_dataloader())
    data.teardown()
    assert not StoreDirectory(tmp_path / "train").unfinished(DRAFT)


class Ages(Points):
    """Most rows have no age, and none of the first ones has."""

    def __getitem__(self, row: int) -> Any:
        return {"row": row, "age": row if row in (3, 200) else None}


def test_what_the_first_rows_do_not_tell_is_declared(tmp_path: Path) -> None:
    data = MemmapDataModule(
        Ages(ROWS),
        store_dir=tmp_path,
        num_workers=2,
        build="while_training",
        fingerprint="1",
        nullable=["age"],
    )
    assert sorted(rows_in(set_up(data, "fit").train_dataloader())) == list(range(ROWS))
    data.teardown()
    data = MemmapDataModule(Ages(ROWS), store_dir=tmp_path / "b", num_workers=2)
    with pytest.raises(SchemaError, match="age"):
        data.with_options(build="while_training").prepare_data()


@pytest.mark.parametrize("is_there", [False, True])
def test_what_another_build_has_left_is_not_trained_from(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        build_store(Points(60), tmp_path / "train", progress=False)
        with pytest.raises(DatasetError):
            append_store(Failing(40), tmp_path / "train", progress=False)
    else:
        with pytest.raises(DatasetError):
            build_store(Failing(60), tmp_path / "train", progress=False)
    assert list(StoreDirectory(tmp_path / "train").unfinished(DRAFT))
    given = Points(60) if is_there else None
    data = MemmapDataModule(given, store_dir=tmp_path, build="while_training", num_workers=1)
    if is_there:
        data.prepare_data()
    data.setup("fit")
    assert [(name, store.num_rows, store.pending) for name, store in data.stores.items()] == (
        [("train", 60, None)] if is_there else []
    )
    data.teardown()


def test_process_of_several_without_a_trainer_serves_only_its_own_rows(tmp_path: Path) -> None:
    data = MemmapDataModule(
        Points(96),
        store_dir=tmp_path / "stores",
        batch_size=4,
        num_workers=1,
        build="while_training",
    )
    ranks = [DistributedSampler(range(96), 2, rank) for rank in range(2)]  # type: ignore[arg-type]
    set_up(data, "fit")
    loader: Any = data.train_dataloader()
    # As Fabric makes them.
    loaders = [type(loader)(loader.loader, loader.device, sampler=rank) for rank in ranks]
    try:
        for _ in range(2):
            first, second = map(rows_in, loaders)
            assert len(first) == len(second) == 48
            assert sorted(first + second) == [*range(96)]
    finally:
        data.teardown()
