"""Rows that go to a device through two buffers: all of them, unchanged, and never overwritten."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap.loading import SuperBatch, SuperBatchLoader
from lightning_memmap.loading.device_streams import Uploader, send
from lightning_memmap.placement import DataTopology, Residency
from lightning_memmap.store import Store
from tests.rows import (
    CPU,
    StridedRows,
    epoch_rows,
    joined,
    loader_over,
    make_loader,
    make_sampler,
    order_rows,
    split_with,
)
from tests.streams import Device, Operators
from tests.streams import device as device

Stores = Callable[..., Store]

#: A device without memory: what goes there has shapes and no values.
META = torch.device("meta")


class Source:
    """Rows to read, and what was asked for: the first row, the number of rows, the buffer."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.calls: list[tuple[int, int, Tensor]] = []

    def read(self, first: int, out: Tensor) -> None:
        self.calls.append((first, len(out), out))
        out.copy_(self.rows[first : first + len(out)])


class TestStaging:
    @given(
        fields=st.lists(
            st.tuples(
                st.integers(0, 40),
                st.sampled_from([(), (1,), (3,), (2, 3), (5, 1, 7), (0, 2)]),
                st.sampled_from(
                    [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64]
                ),
            ),
            max_size=4,
        ),
        buffer_bytes=st.integers(1, 300),
    )
    def test_fields_of_any_size_arrive_bit_by_bit(
        self, fields: list[tuple[int, tuple[int, ...], torch.dtype]], buffer_bytes: int
    ) -> None:
        with Uploader(CPU, buffer_bytes) as staging:
            for num_rows, shape, dtype in fields:
                size = torch.empty((num_rows, *shape), dtype=dtype).nbytes
                noise = torch.randint(0, 2 if dtype is torch.bool else 256, (size,))
                rows = noise.to(torch.uint8).view(dtype).view(num_rows, *shape)
                target, source = torch.zeros_like(rows), Source(rows)
                staging.copy(target, source.read)
                same = target.flatten().view(torch.uint8) == rows.flatten().view(torch.uint8)
                assert same.all()
                # Every row once, in order, as many at a time as a buffer holds.
                assert joined([[*range(first, first + count)] for first, count, _ in source.calls])[
                    :num_rows
                ] == (list(range(num_rows)) if size else [])
                row_bytes = size // max(1, num_rows)
                for _, count, _ in source.calls:
                    assert count == 1 or count * row_bytes <= buffer_bytes

    def test_two_buffers_take_turns_over_all_fields(self) -> None:
        sources = [Source(torch.arange(10.0)), Source(torch.arange(14).view(7, 2))]
        with Uploader(CPU, 16) as staging:
            for source in sources:
                staging.copy(torch.zeros_like(source.rows), source.read)
        buffers = [out.data_ptr() for source in sources for _, _, out in source.calls]
        assert len(buffers) == 3 + 7
        assert len(set(buffers)) == 2
        assert all(one != other for one, other in pairwise(buffers))

    def test_buffers_are_page_locked_and_no_larger_than_the_rows(self, device: Device) -> None:
        with Uploader(CPU, 64) as staging:
            for num_rows in (2, 3, 100):
                source = Source(torch.arange(num_rows))
                staging.copy(torch.zeros_like(source.rows), source.read)
        assert [buffer.nbytes for buffer in device.page_locked] == [16, 24, 64, 64]

    def test_no_buffer_is_filled_while_the_device_copies_from_it(self, device: Device) -> None:
        source, target = Source(torch.arange(100)), torch.zeros(100, dtype=torch.int64)
        with Operators(device), Uploader(CPU, 64) as staging:
            staging.copy(target, source.read)
        assert device.races == []
        main = device.current_stream(CPU)
        # Whoever leaves need not wait for anything.
        assert device.host[main] == main.known[main]
        assert torch.equal(target, source.rows)

    def test_a_buffer_that_is_filled_too_early_is_found(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device.Event, "synchronize", lambda event: None)
        source = Source(torch.arange(100))
        with Operators(device), Uploader(CPU, 64) as staging:
            staging.copy(torch.zeros(100, dtype=torch.int64), source.read)
        assert device.races


class TestLoading:
    """Shards that are brought to a device that has streams."""

    @pytest.mark.parametrize("num_devices", [1, 4, 5], ids=["one", "as stored", "re-striped"])
    def test_shards_that_are_staged_are_the_stream(
        self, numbered_store: Stores, device: Device, num_devices: int
    ) -> None:
        store = numbered_store(181, 24)
        loader = make_loader(store, num_devices, 4, residency="device", shuffle=True)
        assert len(device.page_locked) == 2
        expected = make_sampler(181, 25 if num_devices == 5 else 24, 0, True)
        assert joined(epoch_rows(loader)) == order_rows(expected, 0, 0, 181)

    @pytest.mark.parametrize("has_streams", [False, True])
    def test_rows_that_lie_apart_are_read_in_parts(
        self,
        numbered_store: Stores,
        monkeypatch: pytest.MonkeyPatch,
        request: pytest.FixtureRequest,
        has_streams: bool,
    ) -> None:
        if has_streams:
            request.getfixturevalue("device")
        monkeypatch.setattr("lightning_memmap.loading.memory._LOOKUP_ROWS", 3)
        store, topology = numbered_store(181, 24), DataTopology((CPU,) * 2)
        subset = StridedRows(1, 3, excluded=True)
        split = split_with(store, topology, (Residency.DEVICE,) * 24, subset)
        loader = loader_over(store, split, 4)
        assert joined(epoch_rows(loader)) == [row for row in range(181) if row % 3 != 1]


class TestHostToDevice:
    """Rows in host memory for data devices that have none of their own here."""

    @pytest.mark.parametrize("num_devices", [1, 2])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_rows_on_the_host_go_by_way_of_fresh_page_locked_memory(
        self, numbered_store: Stores, device: Device, num_devices: int, prefetch: int
    ) -> None:
        store = numbered_store(37, 24)
        loader = meta_loader(store, num_devices)
        sent = []
        for batch in loader.assembled(META, prefetch):
            assert {leaf.device for leaf in batch.values()} == {META}
            sent.append(len(batch["row"]))
        assert sent == [8, 8, 8, 13] if num_devices == 2 else [4] * 9 + [1]
        # Each take has buffers of its own: who knows when the device is done with them?
        images = [tensor for tensor in device.page_locked if tensor.shape[1:] == (1, 2, 3)]
        assert sum(len(image) for image in images) == 37
        assert len({image.data_ptr() for image in images}) == len(images)
        # So do the places of the rows, on their way to a device that holds its own.
        assert not any(tensor.is_meta for tensor in device.page_locked)

    def test_what_is_on_the_cpu_stays_where_it_is(self) -> None:
        tensor = torch.ones(3)
        assert send(tensor, CPU) is tensor

    def test_super_batch_of_rows_on_the_cpu_is_sent_from_page_locked_memory(
        self, numbered_store: Stores, device: Device
    ) -> None:
        for transform in (None, lambda batch: batch):
            loader = make_loader(numbered_store(36, 4), 2, 2, transform=transform)
            device.page_locked.clear()
            (first, *_) = loader
            assert isinstance(first, SuperBatch)
            batch = first.to(META)
            assert {leaf.device for leaf in batch.values()} == {META}
            assert {len(tensor) for tensor in device.page_locked} == {2 if transform else 4}


def meta_loader(store: Store, num_devices: int) -> SuperBatchLoader:
    """A loader whose shards are in the file mapping, for data devices without memory."""
    topology = DataTopology((META,) * num_devices)
    return loader_over(store, split_with(store, topology, (Residency.MMAP,) * 24), 4)
