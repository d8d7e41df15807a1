"""Checksums of chunks: which bytes each covers, and what they find."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store import build_store, open_store, verify_store
from lightning_memmap.store import checksums as module
from lightning_memmap.store.checksums import CHUNK_BYTES, MAX_CHECKSUMS, ColumnChunks, num_chunks
from lightning_memmap.store.columns import FixedColumn, VariableColumn
from lightning_memmap.store.manifest import Manifest
from tests.support.store.layout import files_of
from tests.support.store.signing import sign_manifest


def ragged_column(num_rows: int, num_shards: int, shard_items: tuple[int, ...]) -> VariableColumn:
    field = Field("x", torch.uint8, (None,))
    return VariableColumn(field, Shards(num_rows, num_shards), shard_items)


def test_worked_example_of_the_module() -> None:
    column = ragged_column(3, 2, (12, 5))
    sums = b"".join(bytes([number]) * 8 for number in range(6))
    chunks = ColumnChunks(column, 8, sums)
    found = {
        chunk.checksum[0]: (chunk.shard, *chunk[1:4])
        for shard in range(2)
        for chunk in chunks.of_shard(shard)
    }
    assert found == {
        0: (0, "x.index", 0, 8),
        1: (0, "x.index", 8, 16),
        2: (1, "x.index", 16, 24),
        3: (0, "x.values", 0, 8),
        4: (0, "x.values", 8, 12),
        5: (1, "x.values", 12, 17),
    }


@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), min_size=9, max_size=9),
    st.integers(1, 50),
)
def test_chunks_of_all_shards_are_all_bytes_once(
    num_rows: int, num_shards: int, items: list[int], chunk_bytes: int
) -> None:
    column = ragged_column(num_rows, num_shards, tuple(items[:num_shards]))
    count = num_chunks(column, chunk_bytes)
    chunks = ColumnChunks(column, chunk_bytes, bytes(8 * count))
    by_shard = [chunk for shard in range(num_shards) for chunk in chunks.of_shard(shard)]
    assert len(by_shard) == count
    assert sorted(by_shard) == sorted(chunks.differing(b"\1" * (8 * count)))
    for name, bounds in column.bounds.items():
        covered = np.zeros(bounds[-1], np.int64)
        for shard, file, start, stop, _ in by_shard:
            if file == name:
                assert bounds[shard] <= start < stop <= bounds[shard + 1]
                assert stop - start <= chunk_bytes
                covered[start:stop] += 1
        assert (covered == 1).all()


def test_checksum_is_the_hash_of_8_mib_of_a_shard(tmp_path: Path) -> None:
    rows = torch.randint(0, 256, (5, 5 * 2**20), dtype=torch.uint8)
    manifest = build_store(list(rows), tmp_path / "s", num_shards=2, progress=False).manifest
    # Rows 0, 2 and 4, then rows 1 and 3.
    shards = [rows[0::2].numpy().tobytes(), rows[1::2].numpy().tobytes()]
    parts = [data[start : start + CHUNK_BYTES] for data in shards for start in (0, CHUNK_BYTES)]
    assert [len(part) for part in parts] == [2**23, 7 * 2**20, 2**23, 2 * 2**20]
    assert manifest.num_checksums == 4
    expected = [xxhash.xxh3_64_digest(part) for part in parts]
    assert manifest.checksums == {"value": b"".join(expected)}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_damage_names_the_bytes_of_adjacent_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    rows = [{"x": torch.arange(row, row + 16, dtype=torch.float32)} for row in range(10)]
    path = tmp_path / "s"
    build_store(rows, path, num_shards=2, progress=False)
    file = files_of(path) / "x.memmap"
    data = bytearray(file.read_bytes())
    assert len(data) == 640
    for byte in (0, 3 * 64 + 1, 5 * 64 - 1, 5 * 64, 9 * 64):
        data[byte] ^= 1
    file.write_bytes(data)
    damages = verify_store(path, num_threads=num_threads)
    # Shard 1 starts at byte 320: a range never crosses it.
    assert [(each.shard, each.start, each.stop) for each in damages] == [
        (0, 0, 64),
        (0, 192, 320),
        (1, 320, 384),
        (1, 576, 640),
    ]
    assert all(each.path == file for each in damages)


def test_larger_store_has_larger_chunks_and_a_manifest_that_can_be_read() -> None:
    schema = Schema.infer([torch.zeros(2**20, dtype=torch.uint8)], Declared())
    (field,) = schema.fields
    for num_rows, factor in ((10**6, 1), (2**22, 2), (2**26, 32)):
        column = FixedColumn(field, Shards(num_rows, 192))
        assert module.choose_chunk_bytes([column]) == factor * CHUNK_BYTES
        assert num_chunks(column, factor * CHUNK_BYTES) <= MAX_CHECKSUMS
        draft = Manifest.draft(num_rows, 192, schema)
        manifest = Manifest.decode(draft.encode(), "here")
        assert manifest.num_checksums == num_chunks(column, factor * CHUNK_BYTES)


def test_draft_without_checksums_is_not_a_store(tmp_path: Path) -> None:
    store = build_store([{"x": 1.0}] * 3, tmp_path / "s", progress=False)
    sign_manifest(store.path, lambda body: body.update(checksums={}))
    with pytest.raises(StoreError, match="checksums"):
        open_store(tmp_path / "s")
