"""The costs of Lightning's own strategies, by the name that they have in a comparison.

Each function is as `lightning_memmap.costs.Priced.costs`.
"""

from collections.abc import Callable
from dataclasses import replace

from lightning_memmap.costs import Cluster, Costs, Workload, sent_bytes, with_reduction_s
from lightning_memmap.strategies import FSDP2Strategy


def single_device(work: Workload, cluster: Cluster, num_rows: int) -> Costs:
    """Costs of one device that trains alone."""
    return Costs.of(
        work,
        num_rows=num_rows,
        step_s=work.fixed_s + cluster.compute_s(work, num_rows, busy=1),
        num_row_devices=1,
        note="the other devices are idle",
    )


def ddp(work: Workload, cluster: Cluster, num_rows: int) -> Costs:
    """Costs of DDP: a whole model in each process, gradients all-reduced in buckets.

    The buckets are as in Li et al., "PyTorch Distributed" (2020).
    """
    rows = num_rows / cluster.size
    moved = sent_bytes("allreduce", cluster.size, work.gradient_bytes)
    compute_s = cluster.compute_s(work, rows, busy=cluster.devices)
    reduce_s = moved / cluster.link + cluster.collective_s
    return Costs.of(
        work,
        num_rows=rows,
        step_s=work.fixed_s + with_reduction_s(compute_s, reduce_s) + cluster.collective_s,
        moved_bytes=moved,
        # Buckets are a second copy of the gradients.
        buffer_bytes=work.gradient_bytes,
        num_row_devices=cluster.size,
        effort=1,
    )


def fsdp(work: Workload, cluster: Cluster, num_rows: int) -> Costs:
    """Costs of Lightning's FSDP: those of ``memmap_fsdp2``, and only on GPUs."""
    found = FSDP2Strategy.costs(work, cluster, num_rows)
    return replace(found, obstacle="" if cluster.has_gpus else "GPUs only")


def model_parallel(work: Workload, cluster: Cluster, num_rows: int) -> Costs:
    """Costs of ModelParallelStrategy with all devices data parallel.

    They are those of FSDP2, which ``fully_shard`` in the model's ``configure_model`` amounts to: a
    model without one would not be sharded.
    """
    return replace(
        FSDP2Strategy.costs(work, cluster, num_rows),
        obstacle="" if work.configures_itself else "unsharded",
        note="needs a model that shards all of itself in configure_model",
        effort=3,
    )


LIGHTNING_COSTS: dict[str, Callable[[Workload, Cluster, int], Costs]] = {
    "auto": single_device,
    "ddp": ddp,
    "fsdp": fsdp,
    "model_parallel": model_parallel,
}
