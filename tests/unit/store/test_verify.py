from pathlib import Path

import torch

from lightning_memmap.sampling import Shards
from lightning_memmap.store import Damage, build_store, open_store, verify_store
from lightning_memmap.store.checksums import hashed_bytes
from tests.datasets import Numbered
from tests.unit.store.layout import files_of

NUM_ROWS, NUM_SHARDS = 100, 7


def test_all_bytes_that_are_read_are_counted_before(tmp_path: Path) -> None:
    rows = [torch.full((row % 7,), row) for row in range(100)]
    store = build_store(rows, tmp_path / "s", num_shards=NUM_SHARDS, progress=False)
    read: list[int] = []
    assert verify_store(store.path, advance=read.append) == []
    assert sum(read) == hashed_bytes(store.manifest.columns)


def test_verify_names_field_shard_and_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    build_store(Numbered(NUM_ROWS), path, num_shards=NUM_SHARDS, progress=False)
    assert verify_store(path) == []
    file = files_of(path) / "label.memmap"
    data = bytearray(file.read_bytes())
    data[int(Shards(NUM_ROWS, NUM_SHARDS).starts[1]) * 8] ^= 1
    file.write_bytes(data)
    for place, num_threads in ((path, 1), (str(path), 8)):
        (damage,) = verify_store(place, num_threads=num_threads)
        assert damage == Damage("label", 1, file)
        assert str(damage) == f"field 'label', shard 1 is damaged ({file})"
    # Opening reads no rows, so that it stays fast.
    assert len(open_store(path)) == NUM_ROWS
