"""Stores that are being built: who opens them, in which state, in which order they are locked."""

import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import DatasetError
from lightning_memmap.schema.forms import Declared, read_declared
from lightning_memmap.store import Store, build_part, build_store, finish_store, open_store
from lightning_memmap.store.build_spec import BuildSpec
from lightning_memmap.store.building import describe_unfinished_build
from lightning_memmap.store.directory import DRAFT, StoreDirectory, is_store
from lightning_memmap.store.growing import BackgroundBuild, GrowingStore, open_growing
from lightning_memmap.store.joined import JoinedStore
from tests.support.datasets import Numbered, NumberedSet, Replaced, Slow, holds
from tests.support.store.layout import rows_there


@contextmanager
def growing(
    path: Path, dataset: Any, variable: Mapping[str, int] | None = None
) -> Iterator[GrowingStore]:
    """A store while it is built."""
    spec = BuildSpec(dataset, path, None, 1, "one", read_declared(variable, None), progress=False)
    building = BackgroundBuild({"train": spec}, 1, lambda stores: {})
    try:
        store = open_growing(path)
        assert store is not None
        yield store
    finally:
        building.stop()


def leave_unfinished(path: Path) -> None:
    """A build from which rows were read until it failed."""
    broken = Slow(Replaced(Numbered(100), {60: ValueError("broken")}), 0.003, every=1)
    with pytest.raises(DatasetError, match="row 60"), growing(path, broken) as store:
        store.shared_build.wait_for_commit()
    assert StoreDirectory(path).unfinished(DRAFT)


def opened(path: Path) -> Store:
    """The store of the training rows as a run without a dataset has it."""
    options: dict[str, Any] = {"build": "while_training", "num_workers": 1}
    data = MemmapDataModule(store_dir=path.parent, **options)
    data.setup("fit")
    store = data.stores["train"]
    data.teardown()
    return store


def test_whole_store_is_opened_in_place_of_a_build_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "train"
    leave_unfinished(path)
    build_part(Numbered(50), path, (0, 1), progress=False)
    finish_store(path, progress=False)
    assert StoreDirectory(path).unfinished(DRAFT)
    assert opened(path).pending is None
    assert holds(opened(path), Numbered(50))


def test_store_whose_builder_was_killed_after_the_commit_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train"
    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "remove_unused", lambda self: None)
        with growing(path, Numbered(50)):
            while not is_store(path):
                sleep(0.001)
    assert (open_store(path).files / DRAFT).exists()
    assert opened(path).pending is None
    assert describe_unfinished_build(path) is None
    StoreDirectory(path).remove_unfinished()
    assert holds(open_store(path), Numbered(50))
    # The next one that changes something there removes what is left of the build.
    build_store(Numbered(50), path, fingerprint="one", progress=False)
    assert not (open_store(path).files / DRAFT).exists()


def test_two_builds_of_the_same_stores_do_not_wait_for_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    specs = {
        name: BuildSpec(Numbered(20), tmp_path / name, None, 1, "one", Declared(), progress=False)
        for name in ("b", "a")
    }
    with ThreadPoolExecutor(1) as pool:
        with StoreDirectory(tmp_path / "a").locked():
            begun = pool.submit(BackgroundBuild, specs, 1, lambda stores: {})
            while "waiting for it" not in caplog.text:
                sleep(0.001)
            # Who waits for one store holds none that comes after it.
            with StoreDirectory(tmp_path / "b").locked(wait=False):
                pass
        while any(map(begun.result().is_building, specs)):
            sleep(0.001)
    assert all(holds(open_store(tmp_path / name), Numbered(20)) for name in specs)


def test_growing_store_is_pickled_while_it_grows_and_opened_when_it_is_whole(
    tmp_path: Path,
) -> None:
    path, dataset = tmp_path / "train", Numbered(40)
    with growing(path, Slow(dataset, 0.02, every=1)) as store:
        sent = pickle.dumps(store)
        again = pickle.loads(sent)
        assert again.pending is not None
        assert again[33]["label"] == dataset[33]["label"]
        assert 0 < again.pending.progress <= 1
        store.shared_build.wait_for_commit()
    assert again.pending.progress == 1.0
    assert pickle.loads(sent).pending is None
    assert holds(pickle.loads(sent), dataset)


def test_share_goes_on_where_an_interrupted_build_stopped(tmp_path: Path) -> None:
    path = tmp_path / "train"
    leave_unfinished(path)
    done, num_rows = rows_there(path), 100
    assert 0 < done < num_rows
    with growing(path, Slow(Numbered(100), 0.005, every=1)) as store:
        shares = [store.shared_build.progress]
        while shares[-1] < 1.0:
            sleep(0.002)
            # The count follows the marks: no row is told of before it is there.
            shares.append(store.shared_build.progress)
            assert shares[-1] <= np.count_nonzero(store.shared_build.is_written) / num_rows
        assert store.shared_build.is_written.all()
    assert shares[0] >= done / num_rows
    assert shares == sorted(shares)
    assert holds(open_store(path), Numbered(100))


def test_rows_of_stores_of_which_one_is_being_built_are_those_of_the_whole_ones(
    tmp_path: Path,
) -> None:
    variable = {"steps": 1, "image": 2}
    other = build_store(NumberedSet(1, 30), tmp_path / "b", variable=variable, progress=False)
    order = np.random.default_rng(0).permutation(70)
    with growing(tmp_path / "a", Slow(NumberedSet(0, 40), 0.01, every=1), variable) as store:
        joined = JoinedStore(tmp_path, {"a": store, "b": other})
        assert joined.pending is not None
        found = joined.read(order)
        rows = [joined[row] for row in order[:9].tolist()]
        # Some of none: a step may have rows of one store alone.
        few = joined.read(order[order >= 40])[2]
        store.shared_build.wait_for_commit()
    whole = joined.completed()
    for one, other in zip(found, whole.read(order), strict=True):
        pairs = zip(one.rows(), other.rows(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert few.num_rows == 30
    for row, index in zip(rows, order.tolist(), strict=False):
        assert torch.equal(row["steps"], whole[index]["steps"])
        assert row["name"] == whole[index]["name"]
