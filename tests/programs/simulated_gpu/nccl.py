"""A process group on simulated device memory, as NCCL's is on real. To be imported before torch.

Each process has its own simulated GPU. A collective copies its inputs, in a stream of the device;
the host sends the values through an inner gloo group, at once; the results are written in the same
stream. An asynchronous collective has the stream of the group, as with NCCL, and ``Work.wait`` lets
the caller's stream wait for it: where nobody waits, the checker of the devices reports a race.

What NCCL refuses is refused: host memory, tensors that are not contiguous, dtypes that it does not
know, two processes on one device. Messages between two processes have no tags. The first collective
of a group, or a batch of messages, must be called by all of its processes.

Not simulated: collectives that no test uses, time, deadlocks by the order of calls on several
groups, time-outs, aborts, several nodes.
"""

import ctypes
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.programs.simulated_gpu import devices

import torch  # isort: skip  # After the devices.
import torch.distributed as dist  # isort: skip
from torch import Tensor  # isort: skip
from torch.distributed import constants  # isort: skip
from torch.distributed import distributed_c10d as c10d  # isort: skip

#: Given flat copies of the inputs and flat memory for the results, both on the host. What it
#: returns, if anything, waits until the results are there.
Move = Callable[[list[Tensor], list[Tensor]], Callable[[], object] | None]

#: Those of ProcessGroupNCCL, by its table of ncclDataType_t.
_DTYPES = {
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
#: Messages that are under way at most.
_MAX_SENDS = 256


class NCCLWork(dist.Work):
    """A collective that was enqueued, or messages that are.

    Args:
        device: The device of its tensors.
        stream: The stream that writes the results; None for tensors on the host.
        result: What `result` returns.
        used: Its tensors, which are kept until it is waited for.
        finish: Waits until the results are there, where they are not yet.
    """

    def __init__(
        self,
        device: torch.device,
        stream: Any,
        result: Any,
        used: Sequence[Any] = (),
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self._stream = stream
        self._result = result
        self._used = used
        self._finish = finish
        self._event: Any = None
        self._future: Any = torch.futures.Future(devices=[device] if stream else [])
        if finish is None:
            self._complete()

    def _complete(self) -> None:
        if self._stream is None:
            self._future.set_result(self._result)
            return
        with torch.cuda.stream(self._stream):
            self._event = self._stream.record_event()
            self._future.set_result(self._result)

    def _ensure_finished(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._complete()

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait. The program does not."""
        self._ensure_finished()
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._device))
        self._used = ()
        return True

    synchronize = block_current_stream = wait

    def wait_on_host(self) -> None:
        """Let the program wait, as a barrier does."""
        self.wait()
        if self._stream is not None:
            self._stream.synchronize()

    def get_future(self) -> Any:
        self._ensure_finished()
        return self._future

    def is_completed(self) -> bool:
        return self._finish is None and (self._event is None or self._event.query())

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._result


class _Options:
    """Takes the place of ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = c10d.default_pg_timeout
        self.config = None


class _Backends:
    """What torch is making a process group for just now.

    torch asks for the backend of each kind of device; one group here serves all of them.
    """

    text = ""
    #: Whether messages are in a batch, which makes a communicator of all processes of the group.
    is_batching = False

    @classmethod
    def include_cpu(cls) -> bool:
        return cls.text in ("", "undefined") or "cpu:" in cls.text


class ProcessGroupNCCL(dist.ProcessGroup):
    """Takes the place of torch's class of this name, for each group that a process is in.

    Args:
        store: Where the processes meet.
        rank: Rank in the group.
        size: Processes of the group.
        options: Of the group.
    """

    Options = _Options
    supports_splitting = supports_coalescing = False
    supports_time_estimate = supports_tensor_alloc = False

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        self.options = options or _Options()
        self._has_cpu = _Backends.include_cpu()
        self._inner: Any = c10d.ProcessGroupGloo(
            dist.PrefixStore("simulated/", store), rank, size, timeout=self.options._timeout
        )
        self._device: torch.device | None = None
        self._own_stream: Any = None
        self._sends: list[tuple[Any, Tensor]] = []
        self._coalesced: list[NCCLWork] | None = None
        self._group_name = self._group_desc = "undefined"

    # What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    group_name = property(lambda self: self._group_name)
    group_desc = property(lambda self: self._group_desc)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: nobody asks for it."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _get_backend(self, device: Any) -> "ProcessGroupNCCL":
        return self

    def _has_hooks(self) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (("cpu", "cuda") if self._has_cpu else ("cuda",))]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._flush()
        self._inner = None

    abort = shutdown

    # How a collective works

    def _check(self, name: str, tensors: Sequence[Tensor]) -> torch.device:
        found = {tensor.device for tensor in tensors}
        if len(found) != 1:
            raise RuntimeError(f"{name}: tensors on {found} (simulated NCCL)")
        (device,) = found
        if device.type == "cpu" and self._has_cpu:
            return device
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                raise TypeError(
                    "Input tensor data type is not supported for NCCL process group:"
                    f" {tensor.dtype} (simulated, {name})"
                )
            if tensor.is_sparse or not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous (simulated NCCL, {name})")
        return device

    def _connect(self, device: torch.device) -> None:
        """Make the communicator, which all processes do at the first call of their group."""
        if self._device is not None:
            if device != self._device:
                raise RuntimeError(f"a group of {self._device} was used on {device} (simulated)")
            return
        self._device = device
        indices = [torch.empty(1, dtype=torch.int64) for _ in range(self.size())]
        self._inner.allgather([indices], [torch.tensor([device.index])]).wait()
        found = [int(index) for index in indices]
        if len(set(found)) < len(found):
            raise dist.DistBackendError(
                f"Duplicate GPU detected: the processes have the devices {found} (simulated NCCL)"
            )

    def _stream_for(self, device: torch.device, is_async: bool) -> Any:
        current = torch.cuda.current_stream(device)
        if not is_async:
            return current
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(device)
        self._own_stream.wait_stream(current)
        return self._own_stream

    def _run(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        move: Move,
        options: Any = None,
        *,
        result: Any = None,
        is_message: bool = False,
    ) -> NCCLWork:
        """Run a collective.

        Args:
            name: For errors.
            inputs: What this process gives.
            outputs: Where its results go.
            move: What happens between the processes.
            options: Say whether it is asynchronous. Without any it is.
            result: What the work returns; by default ``outputs``.
            is_message: Whether two processes alone take part.
        """
        device = self._check(name, [*inputs, *outputs])
        is_on_gpu = device.type == "cuda"
        if is_on_gpu and (not is_message or _Backends.is_batching):
            self._connect(device)
        stream = self._stream_for(device, getattr(options, "asyncOp", True)) if is_on_gpu else None
        with torch.inference_mode(), _in_stream(stream):
            given = [tensor.detach().clone() for tensor in inputs]
            made = [torch.empty_like(tensor) for tensor in outputs]
            late = move([_on_host(each) for each in given], [_on_host(each) for each in made])

        def write() -> None:
            with torch.inference_mode(), _in_stream(stream):
                for target, value in zip(outputs, made, strict=True):
                    target.detach().copy_(value)

        def finish() -> None:
            assert late is not None
            late()
            write()

        if late is None:
            write()
        found = list(outputs) if result is None else result
        work = NCCLWork(device, stream, found, (inputs, outputs), finish if late else None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> NCCLWork | None:
        works, self._coalesced = self._coalesced or [], None
        if not works:
            return None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        stream = None
        if device.type == "cuda":
            stream = self._own_stream or torch.cuda.current_stream(device)
        return NCCLWork(device, stream, [], (), wait_for_all)

    # Between the processes, on the host

    def _reduced(self, tensor: Tensor, op: Any) -> None:
        if tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
            op = dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op
        is_mean = op == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else op
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self._inner.allreduce([real], options).wait()
        if is_mean:
            # NCCL rounds means of integers towards zero.
            is_exact = tensor.is_floating_point() or tensor.is_complex()
            tensor.div_(self.size(), rounding_mode=None if is_exact else "trunc")

    def _gathered(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        if tensor.numel():
            self._inner.allgather([[_bytes(part) for part in parts]], [_bytes(tensor)]).wait()

    # Collectives. torch names their arguments.

    def allreduce(self, tensors: Any, opts: Any = None) -> NCCLWork:
        if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            op = opts
        else:
            op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        given = [tensors] if isinstance(tensors, Tensor) else tensors

        def move(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            for source, target in zip(inputs, outputs, strict=True):
                target.copy_(source)
                self._reduced(target, op)

        return self._run("allreduce", given, given, move, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> NCCLWork:
        if opts is None or isinstance(opts, int):
            root, opts = opts or 0, dist.BroadcastOptions()
            opts.rootRank = root

        def move(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            for source, target in zip(inputs, outputs, strict=True):
                target.copy_(source)
                if target.numel():
                    self._inner.broadcast([_bytes(target)], opts).wait()

        return self._run("broadcast", tensors, tensors, move, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> NCCLWork:
        def move(given: list[Tensor], made: list[Tensor]) -> None:
            self._gathered(made, given[0])

        return self._run("allgather", inputs, outputs[0], move, opts, result=outputs)

    def _gather_singles(self, outputs: Any, inputs: Any, opts: Any) -> NCCLWork:
        def move(given: list[Tensor], made: list[Tensor]) -> None:
            for source, target in zip(given, made, strict=True):
                if source.numel():
                    self._gathered(target.chunk(self.size()), source)

        return self._run("allgather_base", inputs, outputs, move, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> NCCLWork:
        return self._gather_singles(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> NCCLWork:  # noqa: A002
        return self._gather_singles([output], [input], opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> NCCLWork:  # noqa: A002
        def move(given: list[Tensor], made: list[Tensor]) -> None:
            self._reduced(given[0], opts.reduceOp)
            if made[0].numel():
                made[0].copy_(given[0].chunk(self.size())[self.rank()])

        return self._run("reduce_scatter_base", [input], [output], move, opts)

    _reduce_scatter_base = reduce_scatter_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> NCCLWork:
        is_root = opts.rootRank == self.rank()

        def move(given: list[Tensor], made: list[Tensor]) -> None:
            parts = [[_bytes(part) for part in given]] if is_root else []
            self._inner.scatter([_bytes(made[0])], parts, opts).wait()

        return self._run("scatter", inputs[0] if is_root else [], outputs, move, opts)

    def barrier(self, opts: Any = None) -> NCCLWork:
        device = getattr(opts, "device", None) or self._device
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())

        def move(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._reduced(inputs[0], dist.ReduceOp.SUM)

        work = self._run("barrier", [torch.zeros(1, device=device)], [], move)
        self._flush()
        work.wait_on_host()
        return work

    # Messages

    def send(self, tensors: Any, receiver: int, tag: int = 0) -> NCCLWork:
        def move(given: list[Tensor], _: list[Tensor]) -> None:
            sent = given[0].clone()
            self._sends.append((self._inner.send([_bytes(sent)], receiver, 0), sent))
            self._flush(_MAX_SENDS)

        return self._run("send", tensors, [], move, result=tensors, is_message=True)

    def recv(self, tensors: Any, sender: int, tag: int = 0) -> NCCLWork:
        def move(_: list[Tensor], made: list[Tensor]) -> Callable[[], object]:
            receiving = self._inner.recv([_bytes(made[0])], sender, 0)
            wait: Callable[[], object] = receiving.wait
            return wait

        return self._run("recv", [], tensors, move, is_message=True)

    def _flush(self, num_left: int = 0) -> None:
        while len(self._sends) > num_left:
            self._sends.pop(0)[0].wait()


def _in_stream(stream: Any) -> Any:
    # With None, torch.cuda.stream does nothing.
    return torch.cuda.stream(stream)


def _on_host(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat CPU tensor, which the checker does not see."""
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _resize_storage(storage: Any, size: int) -> Any:
    """Like ``UntypedStorage.resize_``, which knows CUDA in the CUDA build alone. FSDP frees with it
    what it has gathered."""
    if storage.device.type != "cuda":
        return _resize_on_cpu(storage, size)
    if storage.nbytes() != size:
        devices.resize_storage(storage, size)
    return storage


_resize_on_cpu = torch.UntypedStorage.resize_
_make_group = c10d._new_process_group_helper
_start_batch = c10d.batch_isend_irecv


def _new_process_group_helper(
    size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any
) -> Any:
    _Backends.text = str(backend)
    return _make_group(size, rank, ranks, backend, *args, **options)


@contextmanager
def _batching() -> Iterator[None]:
    _Backends.is_batching = True
    try:
        yield
    finally:
        _Backends.is_batching = False


def _batch_isend_irecv(operations: Any) -> Any:
    with _batching():
        return _start_batch(operations)


def _install() -> None:
    for module in (c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.batch_isend_irecv = _batch_isend_irecv
    c10d._new_process_group_helper = _new_process_group_helper
    c10d._NCCL_AVAILABLE = True
    timeout = datetime.timedelta(minutes=10)
    c10d.default_pg_nccl_timeout = constants.default_pg_nccl_timeout = timeout
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    torch.cuda.nccl.is_available = lambda tensors: True
    # DDP's statistics need a timer of the CUDA build.
    dist.Logger.set_runtime_stats_and_log = lambda self: None
    torch.storage._StorageBase.resize_ = torch.UntypedStorage.resize_ = _resize_storage


_install()
