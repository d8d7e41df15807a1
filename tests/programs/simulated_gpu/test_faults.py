"""Simulated devices notice it when a wait, or what keeps memory from early use, is left out."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap.loading import buffers, fetch
from lightning_memmap.store import Store
from tests.loading.test_gpu import gpu_loader
from tests.programs.simulated_gpu import devices
from tests.support.rows import assembled

Stores = Callable[..., Store]
ROOT = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You called `self.log.*but have no logger configured"),
]


def leave_out(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, caller: str) -> None:
    """Let calls of a method from functions of a name do nothing."""
    original = getattr(owner, method)

    def call(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_name == caller and "lightning_memmap" in frame.f_code.co_filename:
            return None
        return original(*args, **options)

    monkeypatch.setattr(owner, method, call, raising=False)


def read_epochs(path: Path, store: Store, residency: str = "device") -> None:
    """Whole epochs of prefetched steps, with work of the consumer on each."""
    loader = gpu_loader(store, residency)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in assembled(loader, ROOT, prefetch=2):
            batch["image"].float().sum()


def change_a_transform_between_epochs(path: Path, store: Store) -> None:
    """The consumer writes what the transforms of the next epoch read, and those still read that
    were made ahead of an epoch that is left early."""
    strength = torch.ones(1, device=ROOT)

    def scaled(batch: Any) -> Any:
        return {**batch, "image": batch["image"] * strength.to(batch["image"].device)}

    loader = gpu_loader(store, "device", transform=scaled)
    for epoch in range(3):
        loader.set_epoch(epoch)
        strength.add_(1)
        steps = iter(assembled(loader, ROOT, prefetch=3))
        next(steps)
        steps.close()


def read_apart(path: Path, store: Store, residency: str = "device") -> None:
    """Whole epochs of prefetched steps that are not assembled, with work on each batch."""

    def own(batch: Any) -> Any:
        # Memory that no other step has.
        return {**batch, "image": batch["image"] * 1}

    loader = gpu_loader(store, residency, transform=own)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for step in loader.assembled(None, prefetch=2):
            for batch in step.batches:
                batch["image"].float().sum()


read_host_epochs = partial(read_epochs, residency="host")
read_host_apart = partial(read_apart, residency="host")

#: What is left out, in the function of which name, and where it is noticed.
FAULTS: dict[str, tuple[type, str, str, Callable[[Path, Store], None]]] = {
    "side streams do not follow": (
        devices.Stream,
        "wait_stream",
        "follow",
        change_a_transform_between_epochs,
    ),
    "side streams are not joined": (
        devices.Stream,
        "wait_stream",
        "join",
        change_a_transform_between_epochs,
    ),
    "a step is used before it is ready": (devices.Event, "wait", "hand_over", read_epochs),
    "a step's memory is used again": (Tensor, "record_stream", "hand_over", read_epochs),
    "a step apart is used before it is ready": (devices.Event, "wait", "hand_over", read_apart),
    "memory of a step apart is used again": (Tensor, "record_stream", "hand_over", read_apart),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wait_that_is_left_out_is_noticed(
    tmp_path: Path, numbered_store: Stores, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, method, caller, scenario = FAULTS[fault]
    leave_out(monkeypatch, owner, method, caller)
    scenario(tmp_path, numbered_store(96, 24, 2**12))
    devices.check_open_copies()
    assert any(report.kind == "race" for report in devices.reports)
    devices.reports.clear()


@pytest.mark.parametrize(
    "scenario",
    [
        read_epochs,
        read_host_epochs,
        read_apart,
        read_host_apart,
        change_a_transform_between_epochs,
    ],
)
def test_nothing_is_noticed_where_nothing_is_left_out(
    tmp_path: Path,
    numbered_store: Stores,
    scenario: Callable[[Path, Store], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All copies to devices are from pinned memory.
    monkeypatch.setattr(devices, "noted", {*devices.noted, "pageable"})
    scenario(tmp_path, numbered_store(96, 24, 2**12))
    devices.check_open_copies()
    assert not devices.reports


def test_page_locked_memory_that_is_used_again_is_noticed(
    tmp_path: Path, numbered_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[Any, Any] = {}
    original = buffers.empty_buffers

    def empty(fields: Any, num_rows: int, *, pin_memory: bool = False) -> Any:
        if not pin_memory:
            return original(fields, num_rows)
        return kept.setdefault(num_rows, original(fields, num_rows, pin_memory=True))

    monkeypatch.setattr(buffers, "empty_buffers", empty)
    # One step after the other: several small ones would be in one fetch.
    monkeypatch.setattr(fetch, "_FETCH_STEPS", 1)
    read_host_epochs(tmp_path, numbered_store(96, 24, 2**12))
    devices.check_open_copies()
    assert any("host memory changed" in report.text for report in devices.reports)
    devices.reports.clear()


def test_copy_to_the_host_that_is_not_waited_for_is_noticed(
    numbered_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, non_blocking=True)

    for module in ("super_batch", "variable_rows"):
        monkeypatch.setattr(f"lightning_memmap.loading.{module}.send", send)
    loader = gpu_loader(numbered_store(96, 24, 2**12), "device")
    rows = [row for batch in loader for row in batch.to("cpu")["row"].tolist()]
    assert sorted(rows) != list(range(96))


def test_generator_of_another_device_is_noticed() -> None:
    torch.rand(3, device="cuda:1", generator=torch.Generator("cuda:1"))
    assert not devices.reports
    with torch.cuda.device(0):
        out = torch.empty(3, device="cuda:1")
        torch.ops.aten.uniform_(out, generator=torch.Generator("cuda:0"))
    assert [report.kind for report in devices.reports] == ["generator"]
    devices.reports.clear()
