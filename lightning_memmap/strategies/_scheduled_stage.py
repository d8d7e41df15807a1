"""What a pipeline has of ``torch.distributed.pipelining``, whose import takes a while.

Only a pipeline that is about to run imports this.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import pipelining

from lightning_memmap._compat.pipelining import TracelessStage
from lightning_memmap.process_group import view_as_bytes


def schedule_class(name: str) -> Any:
    """Return a class of ``torch.distributed.pipelining`` by its name."""
    return getattr(pipelining, name)


class ScheduledStage(TracelessStage):
    """A stage that sends tensors of any dtype."""

    # NCCL does not know all dtypes. What has gradients is of one that it knows.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _of_bytes(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _of_bytes(super().get_fwd_send_ops(fwd_chunk_id))


def _of_bytes(messages: list[dist.P2POp]) -> list[dist.P2POp]:
    for message in messages:
        if not message.tensor.is_floating_point():
            message.tensor = view_as_bytes(message.tensor)
    return messages
