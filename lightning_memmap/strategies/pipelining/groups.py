"""Process groups: the processes of a pipeline, and those with the same stages of all pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memmap.process_group import as_bytes, broadcast
from lightning_memmap.strategies._buckets import buckets

#: Gradients are averaged over processes in tensors of about this size.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Layout:
    """A grid of processes: each row is a pipeline, each column holds the same stages.

    Rank ``r`` is rank ``r % pipeline_size`` of pipeline ``r // pipeline_size``: neighbours in a
    pipeline are neighbours on a node.

    Args:
        data_parallel_size: Number of pipelines.
        pipeline_size: Processes of each.
        rank: Global rank of this process.
    """

    data_parallel_size: int
    pipeline_size: int
    rank: int

    @classmethod
    def of(
        cls, world_size: int, rank: int, data_parallel_size: int | str, pipeline_size: int | str
    ) -> "Layout":
        """Make a layout from sizes.

        Args:
            world_size: Processes of the run.
            rank: Global rank of this process.
            data_parallel_size: Number of pipelines. ``auto``: what the other size leaves, or 1 if
                both are ``auto``.
            pipeline_size: Processes of each pipeline. ``auto``: what the other size leaves.

        Raises:
            ValueError: The sizes do not multiply to the number of processes.
        """
        data, pipeline = data_parallel_size, pipeline_size
        if isinstance(data, str):
            data = 1 if isinstance(pipeline, str) else world_size // pipeline
        if isinstance(pipeline, str):
            pipeline = world_size // data
        if data * pipeline != world_size or data < 1:
            raise ValueError(
                f"data_parallel_size={data_parallel_size} x pipeline_parallel_size={pipeline_size}"
                f" does not make {world_size} processes (devices x num_nodes): choose sizes that"
                " multiply to it, or leave one at 'auto'"
            )
        return cls(data, pipeline, rank)

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's pipeline."""
        return self.rank // self.pipeline_size

    @property
    def pipeline_rank(self) -> int:
        """Rank of this process within its pipeline."""
        return self.rank % self.pipeline_size

    @property
    def pipelines(self) -> list[list[int]]:
        """The global ranks of each pipeline."""
        size = self.pipeline_size
        return [list(range(i * size, (i + 1) * size)) for i in range(self.data_parallel_size)]


@dataclass(frozen=True)
class Groups:
    """The process groups of this process.

    Args:
        pipeline: The processes of its pipeline.
        data_parallel: The processes that hold the same stages.
    """

    pipeline: dist.ProcessGroup
    data_parallel: dist.ProcessGroup


_MADE: dict[tuple[object, Layout, float], Groups] = {}


def groups_of(layout: Layout, timeout_s: float) -> Groups:
    """The groups of a layout. All processes must call it.

    They are made once per default process group, since each group opens its own sockets and
    threads.

    Args:
        layout: The grid of processes.
        timeout_s: Seconds after which a collective fails if another process does not join it.

    Returns:
        The two groups of this process.
    """
    key = (dist.group.WORLD, layout, timeout_s)
    if key not in _MADE:
        # Every process must make all groups. Columns hold the same stages of all pipelines.
        rows, columns = layout.pipelines, list(map(list, zip(*layout.pipelines, strict=True)))
        timeout = timedelta(seconds=timeout_s)
        make: Any = dist.new_subgroups_by_enumeration
        _MADE[key] = Groups(make(rows, timeout)[0], make(columns, timeout)[0])
    return _MADE[key]


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast tensors in place from the first process of a group to the others.

    All processes of the group must call it.

    Args:
        tensors: Tensors on the device of the process, of the same shapes on all processes.
        group: The processes.
    """
    if dist.get_world_size(group) > 1:
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            broadcast(tensor, source, group)


def send_tensor(tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send a tensor to the first process of a group, which calls `receive_tensor`.

    Args:
        tensor: Any dense tensor.
        group: The processes, of which this is not the first.
        device: The device of this process, for which the group has a backend.
    """
    sent = as_bytes(tensor.detach().to(device).contiguous())
    if sent.numel():
        dist.send(sent, dist.get_global_rank(group, 0), group=group)


def receive_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    sender: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Receive a tensor in the first process of a group.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        sender: The rank in the group of the process that calls `send_tensor`.
        group: The processes.
        device: The device of this process, for which the group has a backend.

    Returns:
        The tensor, on the CPU.
    """
    received = torch.empty(shape, dtype=dtype, device=device)
    if received.numel():
        dist.recv(as_bytes(received), dist.get_global_rank(group, sender), group=group)
    return received.cpu()


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradient of each parameter over the processes of a group.

    A missing gradient counts as zero. A parameter without a gradient on any process gets none. All
    processes of the group must call it, with the same parameters.

    Args:
        parameters: Parameters with dense gradients or none; the gradients change in place.
        group: The processes.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    for bucket in buckets(parameters, _BUCKET_BYTES):
        _average_bucket(parameters[bucket], size, group)


def _average_bucket(
    parameters: Sequence[nn.Parameter], size: int, group: dist.ProcessGroup
) -> None:
    grads = [parameter.grad for parameter in parameters]
    # One number per parameter: on how many processes it has a gradient. The program waits for the
    # device only where that is in question.
    is_known = all(grad is not None for grad in grads)
    counts = (
        parameters[0].new_ones(len(grads))
        if is_known
        else parameters[0].new_tensor([float(grad is not None) for grad in grads])
    )
    flattened = [
        torch.zeros_like(parameter).flatten() if grad is None else grad.flatten()
        for parameter, grad in zip(parameters, grads, strict=True)
    ]
    flat = torch.cat([counts, *flattened]).detach()
    # Before the sum, which in float16 might be infinite.
    flat[len(grads) :].div_(size)
    dist.all_reduce(flat, group=group)
    found = [True] * len(grads) if is_known else flat[: len(grads)].bool().tolist()
    flat = flat[len(grads) :]
    for parameter, count, mean in zip(
        parameters, found, flat.split_with_sizes([p.numel() for p in parameters]), strict=True
    ):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = mean.view_as(parameter).clone()
        else:
            parameter.grad.copy_(mean.view_as(parameter))


def clip_by_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Scale gradients so that their norm over all processes of a group is at most ``max_norm``.

    All processes of the group must call it, including those without gradients. The norm is the
    2-norm of all gradients together; the squares of their single norms are summed in float64.

    Args:
        parameters: The parameters of this process; their gradients are scaled in place.
        max_norm: The largest norm that is left as it is.
        group: The processes, which hold different parameters.
        device: The device of this process.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        norms += torch.linalg.vector_norm(grad).double().square()
    dist.all_reduce(norms, group=group)
    # The formula of torch.nn.utils.clip_grad_norm_.
    scale = (max_norm / (norms.sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
