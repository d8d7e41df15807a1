"""Running batches through the stages of a pipeline, in micro-batches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_memmap.results.row_log import log_again, take_logged_rows
from lightning_memmap.strategies.common.split_rows import (
    even_ranges,
    fractions_of,
    items_of_ranges,
    scale_loss,
    split_rows,
)
from lightning_memmap.strategies.pipelining.exchange import broadcast_nested

#: By name, the classes of schedules of ``torch.distributed.pipelining``.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}
#: Schedules that are kept, each with buffers for all of its micro-batches. Training and evaluation
#: need one each, unless shapes differ by more than rows, as with padded text, or parameters are
#: frozen in turn.
_MAX_KEPT = 4


def check_schedule(schedule: str, num_microbatches: int, num_processes: int) -> None:
    """Raise for a number of micro-batches that a schedule cannot run."""
    num = num_microbatches
    rounds = max(1, num // num_processes)
    if schedule == "1f1b" and num < num_processes:
        needed = f"at least {num_processes}"
    elif schedule == "interleaved" and num % rounds:
        needed = f"a multiple of {num_processes}"
    else:
        return
    raise ValueError(
        f"num_microbatches={num}: schedule={schedule!r} with {num_processes} processes in a"
        f" pipeline needs {needed}"
    )


@dataclass(eq=False)
class StagePipeline:
    """Runs batches through the stages of all processes of a pipeline; all call each method.

    Only the process with the first stage uses the values of a batch; the others use its shape.
    Micro-batches have the same shape as in the largest training batch, or in the largest batch that
    was evaluated: a smaller batch, such as the last of an epoch, is padded with duplicate rows that
    are excluded from loss and output.

    Args:
        module: The whole module.
        stages: The stages of this process, by index.
        num_stages: The number of all stages.
        schedule: A name in `SCHEDULES`.
        num_microbatches: Micro-batches of a batch.
        group: The processes of the pipeline.
        device: The device of this process.
        largest_rows: Rows of the largest training batch, so far as they are known. A resumed fit
            must know them from the beginning, because sums of other shapes differ in the last bits.
    """

    module: nn.Module
    stages: Mapping[int, nn.Module]
    num_stages: int
    schedule: str
    num_microbatches: int
    group: dist.ProcessGroup
    device: torch.device
    largest_rows: int = 0

    def __post_init__(self) -> None:
        # By shapes and frozen parameters.
        self._schedules: dict[Hashable, Any] = {}
        self._largest_evaluated = 0
        # Known after the first training step of each schedule.
        self._loss_dtype: torch.dtype | None = None
        # The loss of one micro-batch, by its number; None outside of training steps.
        self._loss: Callable[[int, Any], Tensor] | None = None
        self._has_last = self.num_stages - 1 in self.stages
        # The schedule passes a number to the loss of each micro-batch.
        self._numbers = torch.arange(self.num_microbatches) if self._has_last else None
        # The global rank of the process with the last stage.
        self._last = dist.get_global_rank(self.group, dist.get_world_size(self.group) - 1)

    def train(
        self,
        args: Sequence[Tensor],
        num_rows: int,
        batch: Any,
        loss: Callable[[Any, Any], Tensor],
        items_by_row: Any = None,
    ) -> Tensor:
        """Run the forward and backward pass of a batch, and return its loss.

        Args:
            args: The inputs of the first stage, with ``num_rows`` rows each.
            num_rows: The rows of the batch.
            batch: The batch, as the loss takes it.
            loss: The mean loss of an output of the last stage and a batch.
            items_by_row: The items of each row of the batch, of shape (num_rows,), that the loss is
                a mean over; None if it is a mean over rows.

        Raises:
            ValueError: The batch was changed, so that it has other rows than there are items.

        Returns:
            The mean loss over all items, on every process. Gradients have been accumulated.
        """
        self.largest_rows = max(self.largest_rows, num_rows)
        schedule, length = self._schedule_for(args, self.largest_rows)
        row_ranges = even_ranges(num_rows, self.num_microbatches)
        losses: list[Tensor] = []
        logged = take_logged_rows(self.module)
        #: Values that the loss of each micro-batch has logged for its rows, by its number.
        logged_parts: dict[int, dict[str, Tensor]] = {}
        if self._has_last:
            parts = split_rows(batch, row_ranges, [self.device] * len(row_ranges))
            fractions = fractions_of(_items_of_parts(items_by_row, row_ranges, num_rows))

            def weighted(index: int, output: Any) -> Tensor:
                rows = len(row_ranges[index])
                unpadded = apply_to_collection(output, Tensor, lambda leaf: leaf[: max(1, rows)])
                mean = loss(unpadded, parts[index])
                new = take_logged_rows(self.module)
                logged_parts[index] = {name: values[:rows] for name, values in new.items()}
                return scale_loss(mean, fractions[index])

            self._loss = weighted
        # It imports torch's pipelines.
        from lightning_memmap._compat.pipelining import train_step

        try:
            # The backward pass must not run under autocast; the stages enter it themselves.
            with torch.autocast(self.device.type, enabled=False):
                train_step(
                    schedule,
                    *self._padded(args, row_ranges, length),
                    target=self._numbers,
                    losses=losses if self._has_last else None,
                )
        finally:
            self._loss = None
        log_again(self.module, logged, [logged_parts[index] for index in sorted(logged_parts)])
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = sum((part.detach() for part in losses), zero)
        dist.broadcast(total, self._last, group=self.group)
        if self._loss_dtype is None:
            dtypes = [losses[0].dtype if losses else None]
            dist.broadcast_object_list(dtypes, self._last, self.group, self.device)
            self._loss_dtype = dtypes[0]
        return total.to(self._loss_dtype)

    def evaluate(self, args: Sequence[Tensor], num_rows: int) -> Any:
        """Return the output of the last stage on every process, without gradients."""
        self._largest_evaluated = max(self._largest_evaluated, num_rows)
        schedule, length = self._schedule_for(args, self._largest_evaluated)
        row_ranges = even_ranges(num_rows, self.num_microbatches)
        output = schedule.eval(*self._padded(args, row_ranges, length), target=self._numbers)
        if self._has_last and num_rows < length * len(row_ranges):
            rows = [
                n * length + row for n, part in enumerate(row_ranges) for row in range(len(part))
            ]
            output = apply_to_collection(output, Tensor, lambda leaf: leaf[rows])
        return broadcast_nested(output, self._last, self.group, self.device)

    def _padded(self, args: Sequence[Tensor], row_ranges: list[range], length: int) -> list[Tensor]:
        """Return the rows of all micro-batches, each padded to ``length``, on the first process."""
        if 0 not in self.stages:
            return []
        filled = [part or range(1) for part in row_ranges]
        rows = [part[min(row, len(part) - 1)] for part in filled for row in range(length)]
        return [arg[rows] if len(rows) > len(arg) else arg for arg in args]

    def _schedule_for(self, args: Sequence[Tensor], largest: int) -> tuple[Any, int]:
        """Return the schedule for batches of at most ``largest`` rows, and of its micro-batches."""
        length = -(-largest // self.num_microbatches)
        key = (
            length,
            tuple((arg.shape[1:], arg.dtype) for arg in args),
            torch.is_autocast_enabled(self.device.type),
            torch.get_default_dtype(),
            # All stages count, because the processes create their schedules together.
            tuple(parameter.requires_grad for parameter in self.module.parameters()),
        )
        if key not in self._schedules:
            if len(self._schedules) == _MAX_KEPT:
                self._schedules.clear()
            self._schedules[key] = self._new_schedule()
        return self._schedules[key], length

    def _new_schedule(self) -> Any:
        from torch.distributed import pipelining

        from lightning_memmap._compat.pipelining import ScheduledStage

        self._loss_dtype = None
        stages = [
            ScheduledStage(stage, index, self.num_stages, self.device, group=self.group)
            for index, stage in sorted(self.stages.items())
        ]
        return getattr(pipelining, SCHEDULES[self.schedule])(
            stages if self.schedule == "interleaved" else stages[0],
            self.num_microbatches,
            loss_fn=self._loss_by_number,
            # The losses are weighted by their rows instead.
            scale_grads=False,
        )

    def _loss_by_number(self, output: Any, index: Tensor) -> Tensor:
        if self._loss is None:
            # The schedule computes a loss in evaluation as well.
            return torch.zeros(())
        return self._loss(int(index), output)


def _items_of_parts(by_row: Any, row_ranges: Sequence[range], num_rows: int) -> list[Any]:
    """Return the items of each micro-batch, which are rows if there are no other."""
    if by_row is None:
        return [*map(len, row_ranges)]
    if len(by_row) != num_rows:
        raise ValueError(
            f"weight: the module is called with {num_rows} rows, and the batch had {len(by_row)}"
            " when its items were counted: change batches in transform= instead"
        )
    return items_of_ranges(by_row, row_ranges)
