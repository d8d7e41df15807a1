"""Strategies of several processes: errors that name their cause, and means over all processes."""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.ddp import rendezvous_store
from lightning_memmap.errors import describe_error
from lightning_memmap.strategies.common.data_devices import DataDevices

#: How long a process that has failed waits for the store in which failures are noted.
_PATIENCE = timedelta(seconds=5)
#: Part of gloo's error for a collective with a process that has ended.
_IS_GONE = "by peer"


class SeveralProcesses(DataDevices, ParallelStrategy):
    """A strategy of several processes, each of which trains on different rows."""

    # Runs of all strategies of this program, which every process counts alike.
    _num_runs: ClassVar[int] = 0
    #: The data-parallel processes, which have the same buffers; None for all.
    data_parallel_group: dist.ProcessGroup | None = None

    # The Trainer calls it once everything else is set.
    @override
    def _configure_launcher(self) -> None:
        if dist.is_initialized() and dist.get_world_size() != self.world_size:
            raise ValueError(
                f"{self.world_size} processes (devices x num_nodes), but a process group of"
                f" {dist.get_world_size()} from an earlier Trainer is still active. Use the same"
                " number, or call torch.distributed.destroy_process_group() and continue on rank 0"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        SeveralProcesses._num_runs += 1

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add the cause to an error that another process has caused."""
        super().on_exception(exception)
        if not isinstance(exception, Exception) or not dist.is_initialized():
            return
        cause = report_failure(self._num_runs, exception)
        if cause is not None and exception.args and isinstance(exception.args[0], str):
            exception.args = (f"{exception.args[0]}\n{cause}", *exception.args[1:])

    @override
    def sum_over_processes(self, number: Tensor) -> Tensor:
        # Lightning's `reduce` waits at a barrier first.
        dist.all_reduce(number, group=self.data_parallel_group)
        return number

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over all processes unless a group is named. A mean of integers is a float."""
        # For an epoch mean, Lightning divides the mean over processes of a sum by the mean of a
        # number of rows, and rounds down its own mean of integers.
        is_mean = reduce_op in ("mean", "avg") and isinstance(tensor, Tensor)
        if not is_mean or tensor.is_complex() or not dist.is_initialized():
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        wide = tensor.to(torch.float64, copy=True)
        total = super().reduce(wide, group, "sum")  # type: ignore[safe-super]
        mean: Tensor = total / dist.get_world_size(group)
        if tensor.is_floating_point():
            return mean.to(tensor.dtype)
        # Logged values are float32, and so is their quotient unless a count has too many digits.
        short = mean.to(torch.get_default_dtype())
        return short if torch.equal(short, mean) else mean


def report_failure(run: int, error: Exception) -> str | None:
    """Note an error in the store of all processes, unless another one has failed before.

    Args:
        run: The number of the run in this program, the same on all processes.
        error: The error of this process.

    Returns:
        A sentence to add to the error: which rank failed before, and its error, or that a process
        has ended without an error. None if there is nothing to add.
    """
    described = describe_error(error)
    ours = f"rank {dist.get_rank()}: {described}"
    first = ""
    is_gone = _IS_GONE in ours
    store = rendezvous_store()
    if store is not None:
        try:
            store.set_timeout(_PATIENCE)
            key = f"lightning_memmap/failure/{run}"
            # A process that lost contact with another one isn't the first to fail.
            noted = store.check([key]) if is_gone else store.compare_set(key, "", ours)
            first = (store.get(key) if is_gone and noted else noted or b"").decode()
        except RuntimeError:
            # The process with the store has ended.
            first = ""
    # Several may have raised the same.
    if first and first.partition(": ")[2] != described:
        return f"another process failed before: {first}"
    if is_gone:
        return "another process of the run has ended; its own error is in what it printed"
    return None
