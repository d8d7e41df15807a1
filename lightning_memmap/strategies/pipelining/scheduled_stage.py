"""Stages and schedules of ``torch.distributed.pipelining``, which takes a while to import.

Only a pipeline that is about to run imports this module.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import pipelining
from typing_extensions import override

from lightning_memmap._compat.pipelining import TracelessStage
from lightning_memmap.process_group import view_as_bytes


def schedule_class(name: str) -> Any:
    """Return a class of ``torch.distributed.pipelining`` by its name."""
    return getattr(pipelining, name)


class ScheduledStage(TracelessStage):
    """A stage that sends tensors of any dtype."""

    # NCCL does not support all dtypes, but it supports those of tensors with gradients.

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _of_bytes(super().get_fwd_recv_ops(fwd_chunk_id))

    @override
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _of_bytes(super().get_fwd_send_ops(fwd_chunk_id))


def _of_bytes(messages: list[dist.P2POp]) -> list[dist.P2POp]:
    for message in messages:
        if not message.tensor.is_floating_point():
            message.tensor = view_as_bytes(message.tensor)
    return messages
