"""Streams and events that note who waits for whom, so that a use without a wait is found on a CPU.

Every stream has a clock, and knows how far it has waited for the others: vector clocks, as race
detectors use them. An operator on a stream may read what another stream wrote only if it knows of
that write.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memmap._compat.tensors import storage_key
from lightning_memmap.loading.device_streams import _side_stream


class Stream:
    """Work in order. What it knows of each stream, itself included, is in ``known``."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.known: Counter[Stream] = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.known |= other.known


class Device:
    """Takes the place of ``torch.cuda``: streams and events for any device.

    Attributes:
        host: What the program has waited for.
        recorded: The tensors of which ``record_stream`` was called, with the stream.
        page_locked: The tensors that were made in pinned memory.
        races: What was read, or overwritten by the program, without a wait.
    """

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self) -> None:
                self.known: Counter[Stream] = Counter()

            def record(self, stream: Stream) -> None:
                self.known = stream.known.copy()

            def wait(self, stream: Stream) -> None:
                stream.known |= self.known

            def synchronize(self) -> None:
                device.host |= self.known

        self.Event = Event
        self.Stream = Stream
        self.host: Counter[Stream] = Counter()
        self.recorded: list[tuple[Tensor, Stream]] = []
        self.page_locked: list[Tensor] = []
        self.races: list[str] = []
        self._current: dict[Any, Stream] = {}
        self.entered: list[Any] = []

    def device_count(self) -> int:
        return 0  # Of those that have a generator of random numbers.

    def current_stream(self, device: torch.device) -> Stream:
        return self._current.setdefault(device, Stream(device))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        self.entered.append(stream.device)
        yield
        self.entered.pop()
        self._current[stream.device] = before


class Operators(TorchDispatchMode):
    """Notes on which stream of the CPU each operator runs, and what it reads and writes.

    It holds every tensor that it sees: no memory is used again.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._written: dict[int, tuple[Stream, int, str]] = {}
        self._read: dict[int, tuple[Stream, int, str]] = {}
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = [value.alias_info for value in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            # A view touches no memory.
            return func(*args, **kwargs)
        stream = self._device.current_stream(torch.device("cpu"))
        stream.known[stream] += 1
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        read, written = set(), set()
        for argument in func._schema.arguments:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given.get(argument.name)):
                (written if is_write else read).add(self._key(tensor))
        result = func(*args, **kwargs)
        written |= {self._key(tensor) for tensor in _tensors(result)} - read
        for key in read:
            self._check(self._written.get(key), stream.known, f"{func} reads")
            self._read[key] = (stream, stream.known[stream], str(func))
        page_locked = {self._key(tensor) for tensor in self._device.page_locked}
        for key in written:
            # To pinned memory the program itself writes, and not a stream.
            known = self._device.host if key in page_locked else stream.known
            self._check(self._read.get(key), known, f"{func} overwrites")
            if key not in page_locked:
                self._check(self._written.get(key), known, f"{func} overwrites")
        for key in written:
            self._written[key] = (stream, stream.known[stream], str(func))
        return result

    def _check(
        self, last: tuple[Stream, int, str] | None, known: "Counter[Stream]", what: str
    ) -> None:
        if last is not None and known[last[0]] < last[1]:
            self._device.races.append(f"{what} what {last[2]} may still be at work on")

    def _key(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """All devices have streams and events while the test runs, and memory can be pinned."""
    device, empty = Device(), torch.empty

    def make_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if pin_memory:
            device.page_locked.append(made)
        return made

    def pin_memory(tensor: Tensor) -> Tensor:
        device.page_locked.append(tensor.clone())
        return device.page_locked[-1]

    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch, "empty", make_empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(
        Tensor,
        "is_pinned",
        # As of a real device, by the memory: a view of pinned memory is pinned.
        lambda tensor: any(
            storage_key(tensor) == storage_key(other) for other in device.page_locked
        ),
    )
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: device.recorded.append((tensor, stream))
    )
    yield device
    # Kept for the whole process otherwise, with all tensors that it has seen.
    _side_stream.cache_clear()
