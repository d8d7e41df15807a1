"""Lets ``torch.cuda`` use simulated devices. To be imported before torch.

The library does the work at torch's CUDA dispatch key. Missing in a torch that is built without
CUDA is only what its Python bindings add, and this module puts it in their place: devices, streams,
events, memory statistics and generators.
"""

import ctypes
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.programs.simulated_gpu.build import load_library

if "torch" in sys.modules:
    raise ImportError("tests.programs.simulated_gpu.devices must be imported before torch")

_library = load_library()
_library.sim_current_stream.restype = ctypes.c_int64
_library.sim_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
_library.sim_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.sim_memory.restype = ctypes.c_uint64
_library.sim_set_operation_s.argtypes = [ctypes.c_double]
_library.sim_page_locked.restype = ctypes.c_uint64

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # It reads what is replaced below when it is imported.
from torch import Tensor  # noqa: E402
from torch.cuda._utils import _get_device_index  # noqa: E402

_REPOSITORY = str(Path(__file__).resolve().parents[3])
_DEVICE_TYPE = 1  # c10::DeviceType::CUDA

#: What a device can be asked about its memory, in the order of `sim_memory`.
_RESERVED, _ALLOCATED, _MAX_ALLOCATED, _MAX_RESERVED, _TOTAL = range(5)


class Report(NamedTuple):
    """Something that the devices noticed."""

    kind: str
    """``race``: memory was used without a wait. ``wait``: the program waited for a device.
    ``generator``: random numbers came from another device. ``pageable``: a copy that was to be
    asynchronous was from memory that is not pinned."""
    text: str
    stack: list[traceback.FrameSummary]
    """Where in the program, the innermost call last."""

    def __str__(self) -> str:
        own = [frame for frame in self.stack if frame.filename.startswith(_REPOSITORY)]
        lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-3:]]
        return "\n    ".join([f"{self.kind}: {self.text}", *reversed(lines)])


#: All reports so far.
reports: list[Report] = []
#: The kinds that are noted. Lightning itself copies from pageable memory, and waits are frequent.
noted = {"race", "generator"}


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _on_report(kind: bytes, text: bytes) -> None:
    if kind.decode() in noted:
        stack = traceback.extract_stack()[:-1]
        reports.append(Report(kind.decode(), text.decode(), list(stack)))


_library.sim_set_callback(_on_report)


def check_open_copies() -> None:
    """Look whether host memory changed that a device may still read."""
    _library.sim_verify()


def page_locked_bytes() -> int:
    """Pinned memory of the host, in bytes, with what its allocator keeps for later."""
    found: int = _library.sim_page_locked()
    return found


@contextmanager
def operations_take(seconds: float) -> Iterator[None]:
    """In this block each operation keeps its stream busy for a while, by the clock of the host."""
    _library.sim_set_operation_s(seconds)
    try:
        yield
    finally:
        _library.sim_set_operation_s(0.0)


def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Give a storage of a device memory of another size; as much of the content is kept as fits."""
    _library.sim_resize_storage(storage._cdata, num_bytes)


class Stream(torch.Stream):
    """Like ``torch.cuda.Stream``, which needs the CUDA build."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
        if ids:
            return super().__new__(cls, **ids)
        index = _get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """Like ``torch.cuda.Event``, which needs the CUDA build."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> "Event":
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.cuda.current_stream())

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or torch.cuda.current_stream())


@dataclasses.dataclass
class _Properties:
    name: str = "Simulated GPU"
    major: int = 9
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 1
    uuid: str = "0"
    gcnArchName: str = ""  # noqa: N815


def _index(device: Any) -> int:
    index: int = _get_device_index(device, optional=True)
    return index


def _exchange_device(index: int) -> int:
    before: int = _library.sim_current_device()
    if index >= 0:
        _library.sim_set_device(index)
    return before


def _stream_ids(index: int) -> tuple[int, int, int]:
    return _library.sim_current_stream(index), index, _DEVICE_TYPE


def _stream(stream_id: int, index: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=index, device_type=_DEVICE_TYPE)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        _library.sim_set_stream(stream.device_index, stream.stream_id)


def _memory(which: int) -> Callable[..., int]:
    return lambda device=None: _library.sim_memory(which, _index(device))


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    total = _memory(_TOTAL)(device)
    return total - _memory(_RESERVED)(device), total


def _lstm_cell(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM cell, for which CUDA has a kernel of its own."""
    summed = of_input + of_hidden
    for bias in biases:
        summed = summed if bias is None else summed + bias
    i, f, g, o = summed.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    next_cell = f * cell + i * g
    return o * next_cell.tanh(), next_cell, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    of_hidden: Tensor | None,
    of_cell: Tensor | None,
    cell: Tensor,
    next_cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    squashed = next_cell.tanh()
    hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    carried = hidden * o * (1 - squashed * squashed) + (0 if of_cell is None else of_cell)
    of_gates = torch.cat(
        [
            carried * g * i * (1 - i),
            carried * cell * f * (1 - f),
            carried * i * (1 - g * g),
            hidden * squashed * o * (1 - o),
        ],
        1,
    )
    of_bias = of_gates.sum(0) if has_bias else torch.empty(0, device=cell.device)
    return of_gates, carried * f, of_bias


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Like ``UntypedStorage.clone``, which makes storages of devices in the CUDA build alone."""
    if storage.device.type != "cuda":
        return _clone_on_cpu(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.clone().untyped_storage()


_clone_on_cpu = torch.UntypedStorage.clone
_kernels = torch.library.Library("aten", "IMPL")


def _replace(owner: Any, **replacements: Any) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _install() -> None:
    count = _library.sim_device_count()
    _replace(
        torch._C,
        _cuda_init=lambda: None,
        _cuda_getDeviceCount=lambda: count,
        _cuda_getDevice=_library.sim_current_device,
        _cuda_setDevice=_library.sim_set_device,
        _cuda_exchangeDevice=_exchange_device,
        _cuda_maybeExchangeDevice=_exchange_device,
        _cuda_getCurrentStream=_stream_ids,
        _cuda_getDefaultStream=lambda index: (0, index, _DEVICE_TYPE),
        _cuda_setStream=lambda stream_id, device_index, device_type: _library.sim_set_stream(
            device_index, stream_id
        ),
        _cuda_synchronize=lambda: _library.sim_synchronize(_library.sim_current_device()),
        _cuda_isCurrentStreamCapturing=lambda: False,
        _accelerator_emptyHostCache=_library.sim_empty_host_cache,
    )
    memory = {
        "empty_cache": _library.sim_empty_cache,
        "mem_get_info": _mem_get_info,
        "memory_reserved": _memory(_RESERVED),
        "memory_allocated": _memory(_ALLOCATED),
        "max_memory_allocated": _memory(_MAX_ALLOCATED),
        "max_memory_reserved": _memory(_MAX_RESERVED),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": _memory(_ALLOCATED)(device)
        },
        "reset_peak_memory_stats": lambda device=None: _library.sim_reset_peak(_index(device)),
    }
    _replace(torch.cuda.memory, **memory)
    _replace(
        torch.cuda.memory,
        _record_memory_history=lambda *args, **options: None,
        _dump_snapshot=lambda path, **options: Path(path).write_bytes(b""),
    )
    _replace(torch.cuda.streams, Stream=Stream, Event=Event)
    _replace(
        torch.cuda,
        **memory,
        Stream=Stream,
        Event=Event,
        _exchange_device=_exchange_device,
        _maybe_exchange_device=_exchange_device,
        is_available=lambda: True,
        device_count=lambda: count,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _lazy_call=lambda function, **options: function(),
        _is_in_bad_fork=lambda: False,
        current_stream=lambda device=None: _stream(*_stream_ids(_index(device))[:2]),
        default_stream=lambda device=None: _stream(0, _index(device)),
        set_stream=_set_stream,
        synchronize=lambda device=None: _library.sim_synchronize(_index(device)),
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: _Properties.name,
        get_device_properties=lambda device=None: _Properties(total_memory=_memory(_TOTAL)(device)),
        is_bf16_supported=lambda including_emulation=True: True,
        is_current_stream_capturing=lambda: False,
        default_generators=tuple(_default_generator(index) for index in range(count)),
    )
    torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
    _kernels.impl("_thnn_fused_lstm_cell", _lstm_cell, "CUDA")
    _kernels.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "CUDA")
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # type: ignore[attr-defined]


def _default_generator(index: int) -> torch.Generator:
    _library.sim_next_generator_is_default()
    return torch.Generator(torch.device("cuda", index))


_install()
