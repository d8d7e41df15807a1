"""Strategies of several processes: errors that name their cause, and means over all processes."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.strategies.common.data_devices import SuperBatchMixin
from lightning_memmap.strategies.common.failures import first_failure
from lightning_memmap.strategies.common.same_rows import (
    batch_digest,
    may_repeat_rows,
    warn_if_equal,
)


class SeveralProcesses(SuperBatchMixin, ParallelStrategy):
    """A strategy of several processes, each of which trains on different rows."""

    # Runs of all strategies of this program, which every process counts alike.
    _num_runs: ClassVar[int] = 0
    _may_repeat_rows = False
    #: The data-parallel processes, which have the same buffers; None for all.
    copies: dist.ProcessGroup | None = None

    # The Trainer calls it once everything else is set.
    @override
    def _configure_launcher(self) -> None:
        if dist.is_initialized() and dist.get_world_size() != self.world_size:
            raise ValueError(
                f"{self.world_size} processes (devices x num_nodes), but a process group of"
                f" {dist.get_world_size()} from an earlier Trainer is still active. Use the same"
                " number of processes, or call torch.distributed.destroy_process_group() in"
                " between and continue on rank 0"
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
        cause = first_failure(self._num_runs, exception)
        if cause is not None and exception.args and isinstance(exception.args[0], str):
            exception.args = (f"{exception.args[0]}\n{cause}", *exception.args[1:])

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._may_repeat_rows |= may_repeat_rows(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # Before the module's transforms, which may be random.
        if self.module.trainer.training:
            self._compare_rows(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # With ``dataloader_iter``, it is the batch of the step before.
        if batch is not None:
            self._compare_rows(batch)

    def _compare_rows(self, batch: Any) -> None:
        """Warn, once, if training batches of several processes are equal. All ranks call it."""
        if not self._may_repeat_rows:
            return
        self._may_repeat_rows = False
        rank, size = find_data_parallel_rank(self)
        if size > 1:
            digest = torch.stack([batch_digest(batch), torch.tensor(rank)]).to(self.root_device)
            digests, ranks = self.all_gather(digest).cpu().view(-1, 2).unbind(1)
            warn_if_equal(digests, ranks)

    @override
    def sum_over_processes(self, number: Tensor) -> Tensor:
        # Lightning's `reduce` waits at a barrier first.
        dist.all_reduce(number, group=self.copies)
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
