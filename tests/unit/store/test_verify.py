import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import shard_starts
from lightning_memmap.store import Damage, build_store, open_store, verify_store
from lightning_memmap.store.checksums import hashed_bytes
from lightning_memmap.store.manifest import MANIFEST, Manifest
from tests.datasets import Numbered
from tests.unit.store.layout import files_of

NUM_ROWS, NUM_SHARDS = 100, 7
ROW_BYTES = {"x": 32, "label": 8}
STARTS = shard_starts(NUM_ROWS, NUM_SHARDS).tolist()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole store. Tests that damage it must mend it."""
    path = tmp_path_factory.mktemp("verify") / "s"
    build_store(Numbered(NUM_ROWS), path, num_shards=NUM_SHARDS, progress=False)
    return path


def test_all_bytes_that_are_read_are_counted_before(tmp_path: Path) -> None:
    rows = [torch.full((row % 7,), row) for row in range(100)]
    store = build_store(rows, tmp_path / "s", num_shards=NUM_SHARDS, progress=False)
    read: list[int] = []
    assert verify_store(store.path, advance=read.append) == []
    assert sum(read) == hashed_bytes(store.manifest.columns)


@pytest.fixture
def path(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared, tmp_path / "s"))


def flip(file: Path, byte: int, bit: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([value ^ (1 << bit)]))


def shard_of(field: str, byte: int) -> int:
    row = byte // ROW_BYTES[field]
    return max(shard for shard in range(NUM_SHARDS) if STARTS[shard] <= row)


def test_verify_names_field_shard_and_file(path: Path) -> None:
    file = files_of(path) / "label.memmap"
    flip(file, STARTS[1] * 8, 0)
    for place, num_threads in ((path, 1), (str(path), 8)):
        (damage,) = verify_store(place, num_threads=num_threads)
        assert damage == Damage("label", 1, file)
        assert str(damage) == f"field 'label', shard 1 is damaged ({file})"
    # Opening reads no rows, so that it stays fast.
    assert len(open_store(path)) == NUM_ROWS


@given(st.data())
def test_verify_any_flipped_bits_name_exactly_their_shards(
    shared: Path, data: st.DataObject
) -> None:
    flips = data.draw(
        st.lists(
            st.sampled_from(sorted(ROW_BYTES)).flatmap(
                lambda field: st.tuples(
                    st.just(field),
                    st.integers(0, NUM_ROWS * ROW_BYTES[field] - 1),
                    st.integers(0, 7),
                )
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    for field, byte, bit in flips:
        flip(files_of(shared) / f"{field}.memmap", byte, bit)
    try:
        found = {(damage.field, damage.shard) for damage in verify_store(shared)}
    finally:
        for field, byte, bit in flips:
            flip(files_of(shared) / f"{field}.memmap", byte, bit)
    assert found == {(field, shard_of(field, byte)) for field, byte, _ in flips}
    assert verify_store(shared) == []


def test_verify_any_flipped_bit_of_the_manifest_is_found_or_changes_nothing(path: Path) -> None:
    file, manifest = path / MANIFEST, Manifest.read(path)
    data = file.read_bytes()
    for byte in range(len(data)):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << byte % 8
        file.write_bytes(flipped)
        try:
            # As with a hexadecimal digit of an escape, which may be large or small.
            assert Manifest.read(path) == manifest
        except StoreError:
            continue
