"""Builds that are interrupted: rows in any order, some of them now and the others later."""

from contextlib import closing
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from lightning_memmap.errors import DatasetError
from lightning_memmap.schema import Schema, Values
from lightning_memmap.store import open_store, verify_store
from lightning_memmap.store.build import Asked
from lightning_memmap.store.building import Building, read_draft
from lightning_memmap.store.directory import KEY, StoreDirectory
from lightning_memmap.store.growing import BackgroundBuild, open_growing
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from tests.datasets import Logged, Numbered, holds


def write(building: Building, dataset: Numbered, rows: np.ndarray) -> None:
    columns = dataset.expected()
    values = [Values(columns[field.name][rows]) for field in building.draft.schema.fields]
    building.write(rows, values)


def test_rows_that_were_written_in_any_order_are_not_missing_in_the_next_build(
    tmp_path: Path,
) -> None:
    dataset, path = Numbered(100), tmp_path / "s"
    schema = Schema.from_batch(dataset.expected())
    draft = Manifest.draft(100, 7, schema, fingerprint=Fingerprint({}, "one"))
    first = np.array([50, 3, 4, 51, 99, 5, 0])
    with StoreDirectory(path).locked():
        with closing(Building.begin(path, draft, resume=True)) as building:
            write(building, dataset, first)
            building.sync()
            # Not on the disk for sure, and so written again.
            write(building, dataset, np.array([20]))
            assert read_draft(building.path, KEY).schema == schema
        with closing(Building.begin(path, draft, resume=True)) as building:
            assert building.num_done == len(first)
            missing = [row for rows in building.missing(range(100)) for row in rows]
            assert set(missing) == set(range(100)) - set(first.tolist())
            write(building, dataset, np.array(missing[::-1]))
            building.finish(num_threads=2, show=lambda *_: show_progress("", 0, 0, hidden=True))
    assert holds(open_store(path), dataset)
    assert verify_store(path) == []


class Failing(Logged):
    """Raises at a row that is no probe, and is so slow that a task has few rows."""

    def __getitem__(self, row: int) -> object:
        sleep(0.003)
        if row == 60:
            raise ValueError("broken")
        return super().__getitem__(row)


def test_background_build_that_failed_is_resumed_by_the_same_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(kind: type[Logged], log: str) -> set[str]:
        dataset = kind(Numbered(100), tmp_path / log)
        asked = Asked(dataset, tmp_path / "s", None, 1, "one", {}, progress=False)
        building = BackgroundBuild({"train": asked}, 1)
        store = open_growing(tmp_path / "s")
        assert store is not None
        try:
            store.serving.wait_for_commit()
        finally:
            building.stop()
        return {*Path(dataset.log).read_text().split()}

    with pytest.raises(DatasetError, match="row 60"):
        build(Failing, "first")
    # Nothing of the first one has kept the lock of its journal.
    assert "resuming" not in caplog.text
    assert len(build(Logged, "second")) < 100
    assert "resuming" in caplog.text
    assert holds(open_store(tmp_path / "s"), Numbered(100))
