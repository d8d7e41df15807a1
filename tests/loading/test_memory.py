"""Fetches from resident rows: the rows that were asked for, of every dtype and shape."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memmap.loading import memory
from lightning_memmap.loading.buffers import empty_buffers
from lightning_memmap.loading.memory import Columns, Memory, SlotMap
from lightning_memmap.placement.plan import Residency
from lightning_memmap.store import Store
from tests.support.rows import (
    CPU,
    StridedRows,
    cpus,
    epoch_rows,
    joined,
    loader_over,
    pool_of,
    split_with,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def resident(tensors: list[Tensor]) -> Memory:
    """Rows in memory, of one shard, in the order of an epoch."""
    return Memory(Columns(tensors, CPU), SlotMap(pool_of(len(tensors[0]), 1), np.array([0])))


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (70_000,)], ids=str)
@pytest.mark.usefixtures("threads")
def test_fetch_copies_the_rows_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty((11, *shape), dtype=dtype).nbytes
    rows = torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).reshape(11, *shape)
    rows_here = resident([rows, torch.arange(11)])
    chosen = torch.tensor([10, 0, 3, 3, 7])
    expected = b"".join(raw(rows[index]) for index in chosen.tolist())
    buffers = empty_buffers([(shape, dtype), ((), torch.int64)], 5)
    for out in (None, buffers):
        fetched, numbers = rows_here.take(chosen, out)
        assert raw(fetched) == expected
        assert fetched.shape == (5, *shape)
        assert fetched.dtype == dtype
        assert numbers.tolist() == chosen.tolist()
    assert fetched.data_ptr() == buffers[0].data_ptr()


def test_fetch_of_nothing_is_empty() -> None:
    rows_here = resident([torch.arange(6.0).reshape(3, 2)])
    (fetched,) = rows_here.take(torch.empty(0, dtype=torch.int64))
    assert fetched.shape == (0, 2)


@pytest.mark.parametrize("location", [11, -1, -12, 2**62])
@pytest.mark.parametrize("width", [1, 70_000])
@pytest.mark.usefixtures("threads")
def test_fetch_of_a_row_that_is_not_there_is_refused(width: int, location: int) -> None:
    rows_here = resident([torch.zeros(11, width)])
    with pytest.raises(IndexError):
        rows_here.take(torch.tensor([0, location, 1]))


def test_rows_that_lie_apart_are_read_in_parts(
    numbered_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LOOKUP_ROWS", 3)
    store, subset = numbered_store(181, 24), StridedRows(1, 3, excluded=True)
    topology = cpus(2)
    split = split_with(store, topology, (Residency.DEVICE,) * 24, subset)
    loader = loader_over(store, split, 4, topology)
    assert joined(epoch_rows(loader)) == [row for row in range(181) if row % 3 != 1]
