"""Private names of torch's pipelines, imported once a pipeline runs: they take a while."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lightning_memmap.process_group import must_send_bytes, view_as_bytes


def train_step(schedule: Any, *args: Any, **options: Any) -> None:
    """Run a step of a schedule with its backward pass, and drop the outputs."""
    if "return_outputs" in signature(schedule.step).parameters:
        schedule.step(*args, return_outputs=False, **options)
        return
    # torch 2.9 prepares a schedule in its first step, without a backward pass if that is of `eval`.
    stages = [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
    if any(stage.chunks is None for stage in stages):
        schedule._stage_initialized = schedule._stages_initialized = False
    schedule.step(*args, **options)


class ScheduledStage(PipelineStage):
    """A stage that sends tensors of any dtype, and whose first call leaves no trace."""

    # NCCL supports all dtypes of tensors with gradients.
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the messages that are received before a forward pass."""
        return _of_bytes(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the messages that are sent after a forward pass."""
        return _of_bytes(super().get_fwd_send_ops(fwd_chunk_id))

    # To find the shapes of outputs, torch calls each stage once, all but the first with zeros or
    # uninitialised memory: until 2.11 in `_shape_inference`, since 2.12 in `_compute_outputs`, and
    # there it cleans up after a backward pass.

    _before: Sequence[Tensor] = ()

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        self._save_buffers(self.submod)
        try:
            with _same_random_numbers(self.device):
                return parent._shape_inference(*args, **kwargs)
        finally:
            self._restore_buffers()

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # torch 2.9 connects neighbours by a message that is int64 where it is sent and float32
        # where it is received. gloo rejects it.
        parent: Any = super()
        messages = parent._get_init_p2p_neighbors_ops()
        for message in messages:
            message.tensor = message.tensor.float()
        return messages

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        parent: Any = super()
        self._save_buffers(module)
        with torch.no_grad():
            for arg in () if self.is_first else args:
                arg.zero_()
        with _same_random_numbers(self.device):
            return parent._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        parent: Any = super()
        parent._post_metadata_inference_cleanup()
        self._restore_buffers()

    def _save_buffers(self, module: nn.Module) -> None:
        self._before = [buffer.clone() for buffer in module.buffers()]

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.submod.buffers(), self._before, strict=True):
                buffer.copy_(value)
        self._before = ()


def _of_bytes(messages: list[dist.P2POp]) -> list[dist.P2POp]:
    for message in messages:
        if must_send_bytes(message.tensor):
            message.tensor = view_as_bytes(message.tensor)
    return messages


def _same_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch draws the numbers that it would have drawn without it."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
