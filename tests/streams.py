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
        used_together: By storage, the streams that used it.
        races: What was read without a wait.
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
        self.races: list[str] = []
        self._current: dict[Any, Stream] = {}
        self.entered: list[Any] = []

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
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._device.current_stream(torch.device("cpu"))
        stream.known[stream] += 1
        written = set()
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            for tensor in _tensors(given.get(argument.name)):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written.add(self._key(tensor))
                else:
                    self._read(tensor, stream, func)
        result = func(*args, **kwargs)
        seen = {self._key(tensor) for tensor in _tensors((args, kwargs))}
        written |= {self._key(tensor) for tensor in _tensors(result)} - seen
        for key in written:
            self._written[key] = (stream, stream.known[stream], str(func))
        return result

    def _key(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.untyped_storage()._cdata

    def _read(self, tensor: Tensor, stream: Stream, func: Any) -> None:
        writer, time, by = self._written.get(self._key(tensor), (stream, 0, ""))
        if stream.known[writer] < time:
            self._device.races.append(f"{func} reads what {by} writes on another stream")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """All devices have streams and events while the test runs."""
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        device.recorded.append((tensor, stream))

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    return device
