"""Rows that go to a device through pinned memory: all of them, unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap.loading import SuperBatch, SuperBatchLoader
from lightning_memmap.loading.device_streams import upload
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
from tests.streams import Device
from tests.streams import device as device

Stores = Callable[..., Store]

#: A device without memory: what goes there has shapes and no values.
META = torch.device("meta")


class TestLoading:
    """Shards that are brought to a device that has streams."""

    @pytest.mark.parametrize("num_devices", [1, 4, 5], ids=["one", "as stored", "re-striped"])
    def test_shards_that_are_staged_are_the_stream(
        self, numbered_store: Stores, device: Device, num_devices: int
    ) -> None:
        store = numbered_store(181, 24)
        loader = make_loader(store, num_devices, 4, residency="device", shuffle=True)
        assert {tensor.dtype for tensor in device.page_locked} == {torch.int64, torch.uint8}
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

    def test_upload_holds_two_pieces_of_pinned_memory(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, waited = list[int](), list[int]()
        monkeypatch.setattr(device.Event, "synchronize", lambda event: waited.append(1))

        class Watching(Tensor):
            def pin_memory(self, *args: Any) -> Tensor:
                held.append(len(held) + 1 - len(waited))
                return self.as_subclass(Tensor)

        monkeypatch.setattr("lightning_memmap.loading.device_streams._PIECE_BYTES", 3 * 8)
        rows, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
        # However short the parts are.
        upload((part.as_subclass(Watching) for part in rows.split([1, 50, 2, 47])), target)
        assert target.tolist() == rows.tolist()
        assert len(held) == 1 + 17 + 1 + 16
        assert max(held) == 2


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

    def test_super_batch_of_rows_on_the_cpu_is_sent_from_page_locked_memory(
        self, numbered_store: Stores, device: Device
    ) -> None:
        for transform in (None, lambda batch: batch):
            loader = make_loader(numbered_store(36, 4), 2, 2, transform=transform)
            device.page_locked.clear()
            (first, *_) = loader
            assert isinstance(first, SuperBatch)
            batch = first.to(META, non_blocking=True)
            assert {leaf.device for leaf in batch.values()} == {META}
            assert {len(tensor) for tensor in device.page_locked} == {2 if transform else 4}


def meta_loader(store: Store, num_devices: int) -> SuperBatchLoader:
    """A loader whose shards are in the file mapping, for data devices without memory."""
    topology = DataTopology((META,) * num_devices)
    return loader_over(store, split_with(store, topology, (Residency.MMAP,) * 24), 4)
