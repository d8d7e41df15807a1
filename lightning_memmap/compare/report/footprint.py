"""What a variant keeps where, and what it moves in a step."""

from collections.abc import Iterator, Sequence

from lightning_memmap.compare.report.records import (
    CheckRank,
    Count,
    ModelBytes,
    Size,
    Value,
    by_data_rank,
)
from lightning_memmap.sampling import shard_rows


class Edge(Value, frozen=True):
    """Bytes that move from one place to another in one step.

    Args:
        source: Where from.
        target: Where to.
        num_bytes: Bytes in a step.
        what: What moves: ``rows``, or the kind of a collective or copy.
        logical: Whether both places are one physical device, so that nothing but a copy within
            its memory happens.
    """

    source: str
    target: str
    num_bytes: Size
    what: str
    logical: bool


class Footprint(Value, frozen=True):
    """What a variant keeps where, from its check run, in bytes.

    Args:
        model: Parameters, gradients and optimizer state by process and device.
        rows: Shards by residency, by process and data device.
        edges: What moves in a step.
        num_processes: Training processes.
        num_data_devices: Data devices of all processes.
        flops_per_step: Floating point operations of a step in all processes, as far as torch
            counts them.
        batch_bytes: Bytes of a global batch after the transform.
    """

    model: dict[str, ModelBytes]
    rows: dict[str, dict[str, Size]]
    edges: tuple[Edge, ...]
    num_processes: Count
    num_data_devices: Count
    flops_per_step: Size
    batch_bytes: Size

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state where they are largest."""
        return max((sizes.total for sizes in self.model.values()), default=0)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move in a step, except between logical devices."""
        return sum(edge.num_bytes for edge in self.edges if not edge.logical)


def footprint_of(ranks: Sequence[CheckRank], loader: str, global_batch: int) -> Footprint:
    """Put together the footprint that the processes of a check run saw.

    Args:
        ranks: The records of all processes, at least one.
        loader: What supplied the rows: ``memmap``, ``dataloader`` or ``ideal``.
        global_batch: Rows of a step.

    Returns:
        The footprint over all processes and devices; bytes and operations are those of one step.
    """
    return Footprint(
        model={
            f"rank {rank.rank}, {device}": sizes
            for rank in ranks
            for device, sizes in rank.model_bytes.items()
        },
        rows={
            f"rank {rank.rank}, data device {device}": sizes
            for rank in ranks
            for device, sizes in rank.resident_bytes.items()
        },
        edges=tuple(edge for rank in ranks for edge in _edges(rank, loader, global_batch)),
        num_processes=len(ranks),
        num_data_devices=ranks[0].num_data_devices,
        flops_per_step=sum(rank.flops for rank in ranks),
        batch_bytes=sum(share[0].batch_bytes for share in by_data_rank(ranks)),
    )


def _edges(rank: CheckRank, loader: str, global_batch: int) -> Iterator[Edge]:
    process, root = f"rank {rank.rank}", rank.root_device
    target = f"{process}: {root}"
    if loader == "dataloader":
        yield Edge("DataLoader", target, rank.batch_bytes, "rows", logical=root == "cpu")
    elif loader == "memmap" and len(rank.data_devices) > 1 and rank.is_assembled:
        # From the data devices to the root device, where the super-batch is assembled.
        counts = shard_rows(global_batch // rank.data_size, len(rank.data_devices))
        for index, device in enumerate(rank.data_devices):
            if device != root or (index and root == "cpu"):
                num_bytes = rank.batch_bytes * int(counts[index]) // int(counts.sum())
                source = f"data device {index}: {device}"
                yield Edge(source, target, num_bytes, "rows", logical=device == root)
    for found in rank.movements:
        source = process if found.source == "process" else found.source
        yield Edge(source, found.target, found.num_bytes, found.kind, logical=False)
