"""`PredictionTable` in several processes: one table of all, or none."""

from pathlib import Path

import torch

from lightning_memmap import open_store, verify_store
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.writing import TableBuild, TableWriter
from tests.support.datasets import in_dataset_order
from tests.support.distributed.harness import launch, launch_any
from tests.support.models import Points, Regression
from tests.support.store.layout import is_empty

ROWS = 101
#: Tables that come to be: of two data-parallel ranks by ddp and with data devices in groups, of two
#: processes that share a rank and its rows, and of a stock loader.
WHOLE = ("data module", "groups", "shared", "stock")


def assert_holds_predictions(path: Path, rows: int = ROWS) -> None:
    points = Points(rows)
    found = in_dataset_order(open_store(path))
    assert found["row"].tolist() == points.row.tolist()
    with torch.no_grad():
        torch.testing.assert_close(found["y"], Regression().net(points.x))
    assert verify_store(path) == []


def test_ddp_tables_of_all_ranks_are_whole_or_refused_by_all(tmp_path: Path) -> None:
    ranks = launch("predicting.tables", tmp_path, processes=2, rows=ROWS)
    for rank in ranks:
        for name in (*WHOLE, "several", "sizes"):
            assert rank[name] == "", name
        assert "202 rows were written, and the table has 101" in rank["twice"]
        for name, difference in (("dtype", "row int32"), ("apart", str(tmp_path / "1" / "apart"))):
            assert rank[name].startswith("RankMismatchError: ")
            assert difference in rank[name]
            assert "on rank 0; 101 rows of " in rank[name]
    held = f"StoreError: another process is writing the store at {tmp_path / 'held'}: it "
    held += f"holds {tmp_path / 'held' / '.lock'}; wait for it"
    assert ranks[0]["held"] == held
    assert ranks[1]["held"] == f"RankMismatchError: another process failed. rank 0: {held}"
    assert ranks[0]["unforeseen"].startswith("RankMismatchError: ")
    assert "rank 1: MemoryError: too large" in ranks[0]["unforeseen"]
    assert ranks[1]["unforeseen"] == "MemoryError: too large"
    for name in WHOLE:
        assert_holds_predictions(tmp_path / name)
    # A rank's first batch shows that lengths differ; both together, that widths do.
    sizes = open_store(tmp_path / "sizes")
    assert sizes.schema.fields[0].num_variable == 2
    found = [sizes[row]["mask"] for row in range(ROWS)]
    assert all((mask == row).all() and len(mask) == 1 + row % 3 for row, mask in enumerate(found))
    assert {mask.shape[1] for mask in found} == {3, 5}
    assert_holds_predictions(tmp_path / "several" / "short", 7)
    assert_holds_predictions(tmp_path / "several" / "long")
    assert open_store(tmp_path / "data module").num_shards == 6
    for name in ("held", "unforeseen", "twice", "dtype", "apart"):
        assert all(map(is_empty, tmp_path.rglob(name)))


def test_ddp_rank_killed_in_the_middle_leaves_the_old_table(tmp_path: Path) -> None:
    write_old_table(tmp_path / "table")
    outcome = launch_any("predicting.die", tmp_path, processes=2, to_the_last=True, rows=ROWS)
    assert (tmp_path / "died").exists()
    assert outcome.codes != [0]
    assert in_dataset_order(open_store(tmp_path / "table"))["value"].tolist() == [7, 8, 9]
    assert verify_store(tmp_path / "table") == []


def write_old_table(path: Path) -> None:
    values = torch.tensor([7, 8, 9])
    draft = Manifest.draft(3, 2, Schema.from_batch(values))
    build = TableBuild(path, draft)
    writer = TableWriter(path, draft, build.token)
    writer.write(range(3), [Values(values)])
    writer.close()
    build.finish(3)
