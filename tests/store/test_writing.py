"""Tables: rows from several writers in any order, all of them exactly once or no table."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store import build_store, open_store, verify_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.recognition import check_dataset
from lightning_memmap.store.table import TableBuild, TableWriter
from tests.support.datasets import Numbered, in_dataset_order
from tests.support.store.layout import is_empty, names_in

pytestmark = pytest.mark.slow


def numbers(num_rows: int, offset: int = 0) -> Tensor:
    return torch.arange(num_rows) + offset


def begin(
    path: Path, batch: Any, num_rows: int, num_shards: int = 4, num_writers: int = 1, **options: Any
) -> tuple[TableBuild, list[TableWriter]]:
    """Begin a table of rows like those of a batch, and let it be written."""
    path, draft = path / "table", Manifest.draft(num_rows, num_shards, Schema.from_batch(batch))
    build = TableBuild(path, draft, **options)
    return build, [TableWriter(path, draft, build.token) for _ in range(num_writers)]


def write(path: Path, rows: list[int], num_rows: int = 20, **options: Any) -> None:
    """Write these rows of a table of numbers, each with its own number."""
    build, (writer,) = begin(path, numbers(1), num_rows, **options)
    writer.write(rows, [Values(torch.tensor(rows))])
    writer.close()
    build.finish(len(rows))


@pytest.mark.parametrize(
    ("num_rows", "num_shards"), [(1, 4), (3, 24), (24, 24), (101, 7), (1000, 24)]
)
def test_rows_of_several_writers_in_any_order_are_in_dataset_order(
    tmp_path: Path, num_rows: int, num_shards: int
) -> None:
    values = {"x": torch.rand(num_rows, 3).bfloat16(), "row": numbers(num_rows)}
    values["none"] = torch.empty(num_rows, 0)
    build, writers = begin(tmp_path, values, num_rows, num_shards, num_writers=3)
    order = list(range(num_rows))
    random.Random(5).shuffle(order)
    for index, first in enumerate(range(0, num_rows, 7)):
        rows = order[first : first + 7]
        writers[index % 3].write(rows, [Values(each[rows]) for each in values.values()])
    for writer in writers:
        writer.close()
    store = build.finish(sum(writer.num_written for writer in writers), predictions="a test")
    assert torch.equal(in_dataset_order(store)["row"], values["row"])
    assert torch.equal(in_dataset_order(store)["x"], values["x"])
    assert [int(store[row]["row"]) for row in range(num_rows)] == list(range(num_rows))
    assert store[num_rows - 1]["none"].shape == (0,)
    assert verify_store(store.path) == []
    assert store.manifest.source["predictions"] == "a test"
    left = names_in(store.path)
    assert left == ["manifest.json", "row.memmap", "x.memmap"]


def test_files_are_those_of_a_build_of_the_same_rows(tmp_path: Path) -> None:
    dataset = Numbered(37)
    built = build_store(dataset, tmp_path / "built", num_shards=5, progress=False)
    build, (writer,) = begin(tmp_path, dataset.expected(), 37, 5)
    writer.write(range(37), list(map(Values, dataset.expected().values())))
    writer.close()
    table = build.finish(37)
    for name in ("x.memmap", "label.memmap"):
        assert (table.files / name).read_bytes() == (built.files / name).read_bytes()
    assert table.manifest.checksums == built.manifest.checksums
    assert table.manifest.probes == built.manifest.probes
    # So the table passes for a store of the dataset.
    check_dataset(table, built)


def test_missing_row_is_named_and_leaves_no_table(tmp_path: Path) -> None:
    rows = [row for row in range(20) if row not in (7, 13)]
    with pytest.raises(
        StoreError, match="2 of 20 rows were not written, the first of them is row 7"
    ):
        write(tmp_path, rows)
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "table")
    write(tmp_path, list(range(20)))
    assert verify_store(tmp_path / "table") == []


def test_row_written_twice_leaves_the_old_table(tmp_path: Path) -> None:
    write(tmp_path, list(range(20)))
    with pytest.raises(StoreError, match="21 rows were written, and the table has 20"):
        write(tmp_path, [*range(20), 4], overwrite=True)
    assert torch.equal(in_dataset_order(open_store(tmp_path / "table"))["value"], numbers(20))
    assert names_in(tmp_path / "table") == ["manifest.json", "value.memmap"]


@pytest.mark.parametrize("row", [-1, 20])
def test_row_outside_the_table_raises(tmp_path: Path, row: int) -> None:
    build, (writer,) = begin(tmp_path, numbers(1), 20)
    with pytest.raises(IndexError, match="the table has 20"):
        writer.write([3, row], [Values(numbers(2))])
    writer.abandon()
    build.abandon()
    assert is_empty(tmp_path / "table")


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_place_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / name).write_text("{}")
    with pytest.raises(StoreError, match=str(tmp_path / "table")):
        begin(tmp_path, numbers(1), 20, overwrite=True)
    assert (tmp_path / "table" / name).read_text() == "{}"
    (tmp_path / "table" / name).unlink()
    write(tmp_path, list(range(20)))
    with pytest.raises(StoreError, match="overwrite=True"):
        begin(tmp_path, numbers(1), 20)
    write(tmp_path, list(range(20)), overwrite=True)


def test_second_build_at_one_place_is_refused(tmp_path: Path) -> None:
    first, _ = begin(tmp_path, numbers(1), 20)
    with pytest.raises(StoreError, match="another process is writing"):
        begin(tmp_path, numbers(1), 20)
    first.abandon()
    begin(tmp_path, numbers(1), 20)[0].abandon()


def test_writer_of_a_build_that_is_over_writes_into_no_other(tmp_path: Path) -> None:
    first, (late,) = begin(tmp_path, numbers(1), 20)
    first.abandon()
    second, (writer,) = begin(tmp_path, numbers(1), 20)
    draft = Manifest.draft(20, 4, Schema.from_batch(numbers(1)))
    with pytest.raises(StoreError, match="must share one file system"):
        TableWriter(tmp_path / "table", draft, first.token)
    writer.write(range(20), [Values(numbers(20))])
    with pytest.raises(FileNotFoundError):
        late.write(range(20), [Values(numbers(20, 500))])
    writer.close()
    assert torch.equal(in_dataset_order(second.finish(20))["value"], numbers(20))
