"""What each strategy would need and cost on machines that one has, or has not.

The bytes follow from what each strategy keeps and sends; the sources are the papers of ZeRO
(Rajbhandari et al., 2020) for sharded state and GPipe (Huang et al., 2019) for the bubble of a
pipeline, and the ring algorithms of `sent_bytes`. The time is an estimate: computing at one speed
for all batch sizes, links at their bandwidth, and what a strategy can hide behind computing hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_memmap.compare.arms import STOCK
from lightning_memmap.compare.movement import sent_bytes
from lightning_memmap.placement import format_bytes
from lightning_memmap.strategies import STRATEGIES

#: Micro-batches of a pipeline by default.
MICRO_BATCHES = 4
#: Few models have layers for more stages of equal cost.
_MOST_STAGES = 16
#: Share of a device's memory that may be planned for. The rest is the CUDA context, libraries,
#: fragmentation.
USABLE_SHARE = 0.9
#: A faster strategy must win at least so much over a simpler one to be recommended.
_WORTH = 1.1


@dataclass(frozen=True)
class Workload:
    """Model and data, measured or estimated.

    Args:
        parameter_bytes: Bytes of all parameters.
        gradient_bytes: Bytes of all gradients.
        optimizer_bytes: Bytes of the optimizer's state.
        activation_bytes_per_row: Bytes of activations at their peak, per row of a batch.
        batch_bytes_per_row: Bytes of a row after the transform.
        dataset_bytes: Bytes of the stored rows.
        compute_s_per_row: Seconds that one device takes for forward and backward of a row.
        fixed_s: Seconds of a step that do not depend on its rows: optimizer, Trainer.
        flops_per_row: Floating point operations of forward and backward; 0 if not known.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes_per_row: float
    batch_bytes_per_row: float
    dataset_bytes: int
    compute_s_per_row: float
    fixed_s: float
    flops_per_row: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value}: 0 or more is needed")

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> "Workload":
        """Read the workload off a comparison, from its arm ``auto``.

        Args:
            report: The values of a ``report.json``.

        Raises:
            ValueError: The report has no finished arm ``auto``.
        """
        found = [arm for arm in report["arms"] if arm["arm"] == "auto" and arm["status"] == "ok"]
        if not found or found[0]["holding"] is None:
            raise ValueError(
                "the report has no finished arm 'auto', which tells what one device needs: run"
                " lightning-memmap compare --arms auto,..."
            )
        (arm,) = found
        holding, parts = arm["holding"], arm["cost"]["parts_s"]
        rows = report["settings"]["global_batch"]
        sizes = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for model in holding["model"].values():
            sizes = {name: sizes[name] + model[name] for name in sizes}
        trace = arm["trace"] or {"activations": [0.0]}
        return cls(
            parameter_bytes=sizes["parameters"],
            gradient_bytes=sizes["gradients"],
            optimizer_bytes=sizes["optimizer"],
            activation_bytes_per_row=max(trace["activations"]) / rows,
            batch_bytes_per_row=holding["batch_bytes"] / rows,
            dataset_bytes=report["data"]["num_bytes"],
            compute_s_per_row=(parts["forward"] + parts["backward"]) / rows,
            fixed_s=parts["data"] + parts["transfer"] + parts["optimizer"] + parts["other"],
            flops_per_row=holding["flops_per_step"] / rows,
        )


@dataclass(frozen=True)
class Cluster:
    """The devices.

    Args:
        devices: Devices of a node.
        nodes: Nodes.
        memory_bytes: Memory of a device.
        bandwidth: Bytes a second that a device sends to others of its node.
        node_bandwidth: Bytes a second that a device sends to other nodes.
        latency_s: Seconds that a collective takes for nothing.
        parallel_devices: How many devices of a node compute at full speed at once; fewer than
            ``devices`` where logical ones share the cores of a CPU.
        has_gpus: Whether the devices are GPUs.
    """

    devices: int
    nodes: int
    memory_bytes: int
    bandwidth: float
    node_bandwidth: float
    latency_s: float
    parallel_devices: float = float("inf")
    has_gpus: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("latency_s", "has_gpus") else 1
            if not value >= least:
                raise ValueError(f"{name}={value}: at least {least}")

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        return self.devices * self.nodes

    @property
    def link(self) -> float:
        """Bytes a second of the slowest link that a ring over all devices uses."""
        return self.node_bandwidth if self.nodes > 1 else self.bandwidth

    def slowdown(self, busy: int) -> float:
        """How much longer computing takes with so many devices of a node at it."""
        return max(1.0, busy / self.parallel_devices)


@dataclass(frozen=True)
class Prediction:
    """What a strategy would need and do.

    Args:
        strategy: Its name.
        rows_per_step: Rows of a step over all devices.
        model_bytes: Parameters, gradients and optimizer state on the fullest device.
        buffer_bytes: What the strategy needs there to work on them, such as DDP's buckets.
        activation_bytes: Activations and batch on that device.
        shard_bytes: Rows of the dataset that fit there beside them.
        resident_share: Share of the dataset that fits on all devices that may hold rows.
        moved_bytes: Bytes that the busiest device sends or receives in a step.
        step_s: Seconds of a step.
        fits: Whether model, activations and batch fit.
        obstacle: Why it cannot be used; empty where it can.
        note: What to know.
    """

    strategy: str
    rows_per_step: int
    model_bytes: int
    buffer_bytes: int
    activation_bytes: int
    shard_bytes: int
    resident_share: float
    moved_bytes: int
    step_s: float
    fits: bool
    obstacle: str = ""
    note: str = ""

    @property
    def needed_bytes(self) -> int:
        """What must fit on the fullest device: all but the rows of the dataset."""
        return self.model_bytes + self.buffer_bytes + self.activation_bytes

    @property
    def samples_per_s(self) -> float:
        """Rows a second over all devices."""
        return self.rows_per_step / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class _Plan:
    """What a strategy keeps on its fullest device, and does in a step."""

    model_bytes: float
    rows: float
    holders: int
    moved_bytes: float
    step_s: float
    obstacle: str = ""
    note: str = ""
    activation_share: float = 1.0
    buffer_bytes: float = 0.0


def _compute_s(work: Workload, cluster: Cluster, rows: float, busy: int) -> float:
    return work.compute_s_per_row * rows * cluster.slowdown(busy)


def _single(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    step_s = work.fixed_s + _compute_s(work, cluster, rows, 1)
    return _Plan(work.state_bytes, rows, 1, 0, step_s, note="the other devices are idle")


def _superbatch(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    moved = work.batch_bytes_per_row * rows * (cluster.size - 1) / cluster.size
    step_s = work.fixed_s + _compute_s(work, cluster, rows, 1) + moved / cluster.bandwidth
    return _Plan(
        work.state_bytes, rows, cluster.size, moved, step_s,
        obstacle="one node" if cluster.nodes > 1 else "",
        note="computes on one device; the memory of all holds the data",
    )  # fmt: skip


def _data_parallel(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    share = rows / cluster.size
    moved = sent_bytes("allreduce", cluster.size, work.gradient_bytes)
    compute_s = _compute_s(work, cluster, share, cluster.devices)
    # The gradients of one layer are reduced while those of the layers before it are computed:
    # the backward pass, two thirds of the computing, can hide as much.
    reduce_s = moved / cluster.link + _latency_s(cluster)
    step_s = work.fixed_s + compute_s / 3 + max(compute_s * 2 / 3, reduce_s) + _latency_s(cluster)
    # Buckets are a second copy of the gradients.
    return _Plan(
        work.state_bytes, share, cluster.size, moved, step_s, buffer_bytes=work.gradient_bytes
    )


def _superbatch_ddp(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    share = rows / cluster.nodes
    gathered = work.batch_bytes_per_row * share * (cluster.devices - 1) / cluster.devices
    reduced = sent_bytes("allreduce", cluster.nodes, work.gradient_bytes)
    compute_s = _compute_s(work, cluster, share, 1)
    reduce_s = reduced / cluster.node_bandwidth + _latency_s(cluster)
    step_s = work.fixed_s + compute_s / 3 + gathered / cluster.bandwidth
    step_s += max(compute_s * 2 / 3, reduce_s if cluster.nodes > 1 else 0.0)
    return _Plan(
        work.state_bytes, share, cluster.size, gathered + reduced, step_s,
        note="one device of each node computes", buffer_bytes=work.gradient_bytes,
    )  # fmt: skip


def _one_process_replicas(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    share = rows / cluster.size
    # To the root device come the gradients of all others, and from it go the parameters.
    moved = (cluster.size - 1) * (work.gradient_bytes + work.parameter_bytes)
    step_s = work.fixed_s + _compute_s(work, cluster, share, cluster.devices)
    step_s += moved / cluster.bandwidth
    return _Plan(
        work.state_bytes, share, cluster.size, moved, step_s,
        obstacle="one node" if cluster.nodes > 1 else "",
    )  # fmt: skip


def _layers(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    step_s = work.fixed_s + _compute_s(work, cluster, rows, 1)
    return _Plan(
        work.state_bytes / cluster.size, rows, cluster.size, 0, step_s,
        obstacle="one node" if cluster.nodes > 1 else "",
        note="one device computes at a time; activations between layers are not counted",
        activation_share=1 / cluster.size,
    )  # fmt: skip


def _sharded(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    share, size = rows / cluster.size, cluster.size
    # Parameters are gathered for the forward and for the backward pass, gradients scattered.
    moved = 2 * sent_bytes("allgather", size, work.parameter_bytes)
    moved += sent_bytes("reduce_scatter", size, work.gradient_bytes)
    compute_s = _compute_s(work, cluster, share, cluster.devices)
    step_s = work.fixed_s + max(compute_s, moved / cluster.link) + 3 * _latency_s(cluster)
    return _Plan(
        work.state_bytes / size, share, size, moved, step_s,
        note="and one wrapped block, whole, at a time",
    )  # fmt: skip


def _stock_sharded(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    return replace(_sharded(work, cluster, rows), obstacle="" if cluster.has_gpus else "GPUs only")


def _pipeline(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    stages = cluster.size
    compute_s = _compute_s(work, cluster, rows, cluster.devices) / stages
    # Of GPipe: every stage is idle for (stages - 1) micro-batches.
    step_s = work.fixed_s + compute_s * (1 + (stages - 1) / MICRO_BATCHES)
    return _Plan(
        work.state_bytes / stages, rows, 1, 0, step_s,
        obstacle=f"{stages} stages" if stages > _MOST_STAGES else "",
        note=f"equal stages, {MICRO_BATCHES} micro-batches; activations between stages not counted",
        activation_share=1 / stages,
    )  # fmt: skip


def _own_models(work: Workload, cluster: Cluster, rows: int) -> _Plan:
    share = rows / cluster.size
    step_s = work.fixed_s + _compute_s(work, cluster, share, cluster.devices)
    return _Plan(
        work.state_bytes, share, cluster.size, 0, step_s, note="a model of its own on each device"
    )


def _latency_s(cluster: Cluster) -> float:
    return cluster.latency_s if cluster.size > 1 else 0.0


#: The plan of each strategy, the simpler ones first.
_PLANS: dict[str, Callable[[Workload, Cluster, int], _Plan]] = {
    "auto": _single,
    "memmap_superbatch": _superbatch,
    "memmap_dp": _one_process_replicas,
    "ddp": _data_parallel,
    "memmap_superbatch_ddp": _superbatch_ddp,
    "memmap_fsdp2": _sharded,
    "fsdp": _stock_sharded,
    "memmap_pipeline": _pipeline,
    "memmap_model_parallel": _layers,
    "memmap_independent": _own_models,
}
#: These do not train one model on all rows.
_OTHER_RESULT = {"memmap_independent"}


def predict(work: Workload, cluster: Cluster, rows_per_device: int) -> list[Prediction]:
    """What every strategy would need and cost.

    Args:
        work: Model and data.
        cluster: The devices.
        rows_per_device: Rows of a step per device; a step has this many times the devices, under
            every strategy.

    Raises:
        ValueError: ``rows_per_device`` is below 1.
    """
    if rows_per_device < 1:
        raise ValueError(f"rows_per_device={rows_per_device}: at least 1 is needed")
    rows = rows_per_device * cluster.size
    known = {*STOCK, *(name for name, *_ in STRATEGIES)}
    return [
        _prediction(name, plan(work, cluster, rows), work, cluster, rows)
        for name, plan in _PLANS.items()
        if name in known
    ]


def _prediction(name: str, plan: _Plan, work: Workload, cluster: Cluster, rows: int) -> Prediction:
    per_row = work.activation_bytes_per_row * plan.activation_share + work.batch_bytes_per_row
    activations = int(per_row * plan.rows)
    budget = int(cluster.memory_bytes * USABLE_SHARE)
    left = budget - int(plan.model_bytes) - int(plan.buffer_bytes) - activations
    share = work.dataset_bytes / plan.holders
    return Prediction(
        strategy=name,
        rows_per_step=rows,
        model_bytes=int(plan.model_bytes),
        buffer_bytes=int(plan.buffer_bytes),
        activation_bytes=activations,
        shard_bytes=int(min(max(left, 0), share)),
        resident_share=min(1.0, max(left, 0) / share) if share else 1.0,
        moved_bytes=int(plan.moved_bytes),
        step_s=plan.step_s,
        fits=left >= 0,
        obstacle=plan.obstacle,
        note=plan.note,
    )


def recommend(predictions: list[Prediction]) -> tuple[Prediction | None, str]:
    """The strategy to use, and why.

    Args:
        predictions: Of `predict`, the simpler strategies first.

    Returns:
        The prediction, or None where nothing fits, and the reason in a sentence.
    """
    usable = [
        p for p in predictions if p.fits and not p.obstacle and p.strategy not in _OTHER_RESULT
    ]
    if not usable:
        least = min(
            (p for p in predictions if not p.obstacle),
            key=lambda p: p.needed_bytes,
        )
        needed = format_bytes(least.needed_bytes)
        return None, (
            f"nothing fits: even {least.strategy} needs {needed} on a device. Ways out: fewer rows"
            " per device, a lower precision, activation checkpointing, more devices"
        )
    fastest = max(usable, key=lambda p: p.samples_per_s)
    chosen = next(p for p in usable if fastest.samples_per_s <= _WORTH * p.samples_per_s)
    speed = f"{chosen.samples_per_s:,.0f} samples/s"
    if chosen is not fastest:
        return chosen, (
            f"{speed}, less than {_WORTH - 1:.0%} below {fastest.strategy}, and simpler"
        )
    larger = [p.strategy for p in predictions if not p.fits and not p.obstacle]
    why = f"the fastest that fits: {speed}"
    return chosen, why + (f"; {', '.join(larger)} would not fit" if larger else "")
