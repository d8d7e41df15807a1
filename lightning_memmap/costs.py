"""What a strategy costs: what its formulas are given, and what they return.

Each strategy states its formulas in a classmethod ``costs``. Bytes follow from what a strategy
keeps and sends. Times are estimates: a device computes at one speed for all batch sizes, links
carry their full bandwidth, and whatever a strategy can hide behind computing is hidden.
"""

from dataclasses import dataclass
from typing import Any, Protocol


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
        configures_itself: Whether the model has a ``configure_model`` that shards it.

    Raises:
        ValueError: A number is negative.
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
    configures_itself: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value}: 0 or more is needed")

    def assembled_bytes(self, num_rows: float, num_devices: int) -> float:
        """Bytes that reach the root device when a super-batch is assembled there.

        Each data device serves an equal share of the rows, and the root device has its own share
        already.

        Args:
            num_rows: Rows of the super-batch.
            num_devices: Data devices that serve it, the root device being one of them.

        Returns:
            Bytes that all other data devices send in a step.
        """
        return self.batch_bytes_per_row * num_rows * (num_devices - 1) / num_devices


@dataclass(frozen=True)
class Cluster:
    """The devices that a strategy may use.

    Args:
        devices: Devices of a node.
        nodes: Nodes.
        memory_bytes: Memory of a device.
        bandwidth: Bytes per second that a device sends to others of its node.
        node_bandwidth: Bytes per second that a device sends to other nodes.
        latency_s: Seconds that an empty collective takes.
        parallel_devices: How many devices of a node compute at full speed at once; fewer than
            ``devices`` where logical ones share the cores of a CPU.
        has_gpus: Whether the devices are GPUs.

    Raises:
        ValueError: A number is negative, or below 1 where at least 1 is needed: that is all but
            ``latency_s`` and ``has_gpus``.
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
                raise ValueError(f"{name}={value}: at least {least} is needed")

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        return self.devices * self.nodes

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link in a ring over all devices."""
        return self.node_bandwidth if self.nodes > 1 else self.bandwidth

    @property
    def collective_s(self) -> float:
        """Seconds that an empty collective over all devices takes."""
        return self.latency_s if self.size > 1 else 0.0

    @property
    def one_node(self) -> str:
        """The obstacle of a strategy that is one process; empty where there is one node."""
        return "one node" if self.nodes > 1 else ""

    def compute_s(self, work: Workload, num_rows: float, busy: int) -> float:
        """Seconds of forward and backward.

        Devices beyond ``parallel_devices`` slow each other down in proportion.

        Args:
            work: Model and data.
            num_rows: Rows that each device computes.
            busy: Devices of a node that compute at the same time.

        Returns:
            Seconds of a step, in which all busy devices compute their rows.
        """
        return work.compute_s_per_row * num_rows * max(1.0, busy / self.parallel_devices)


@dataclass(frozen=True)
class Costs:
    """What a strategy needs on its fullest device, and what it does in a step.

    Args:
        parameter_bytes: Parameters on that device.
        gradient_bytes: Gradients there.
        optimizer_bytes: Optimizer state there.
        activation_bytes: Activations there at their peak.
        batch_bytes: Rows of a batch there, after the transform.
        num_row_devices: Devices over which the rows of the dataset are spread.
        moved_bytes: Bytes that the busiest device sends or receives in a step; None where a
            `Workload` does not tell them.
        step_s: Seconds of a step.
        buffer_bytes: What the strategy itself needs there, such as the buckets of DDP.
        effort: What the strategy asks for. 0: one process and any model; 1: several processes;
            2: sharded state; 3: a model that is written for it.
        trains_one_model: Whether all rows train one model.
        obstacle: Why it cannot be used; empty where it can.
        note: What the figures leave out.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    batch_bytes: int
    num_row_devices: int
    moved_bytes: int | None
    step_s: float
    buffer_bytes: int = 0
    effort: int = 0
    trains_one_model: bool = True
    obstacle: str = ""
    note: str = ""

    @classmethod
    def of(
        cls,
        work: Workload,
        *,
        num_rows: float,
        step_s: float,
        moved_bytes: float | None = 0,
        state_share: float = 1.0,
        activation_share: float = 1.0,
        **others: Any,
    ) -> "Costs":
        """Costs of a device that has a share of a workload.

        Args:
            work: Model and data.
            num_rows: Rows of a batch on the device.
            step_s: Seconds of a step.
            moved_bytes: Bytes that the busiest device sends or receives in a step; None where they
                are not known.
            state_share: Share of parameters, gradients and optimizer state on the device, 0 to 1.
            activation_share: Share of the activations of its rows on the device, 0 to 1.
            **others: Further fields of `Costs`, by name.

        Returns:
            The costs, with bytes rounded down.
        """
        return cls(
            parameter_bytes=int(work.parameter_bytes * state_share),
            gradient_bytes=int(work.gradient_bytes * state_share),
            optimizer_bytes=int(work.optimizer_bytes * state_share),
            activation_bytes=int(work.activation_bytes_per_row * activation_share * num_rows),
            batch_bytes=int(work.batch_bytes_per_row * num_rows),
            moved_bytes=None if moved_bytes is None else int(moved_bytes),
            step_s=step_s,
            **others,
        )

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def needed_bytes(self) -> int:
        """All that must fit on the device, except for the rows of the dataset."""
        return self.state_bytes + self.buffer_bytes + self.activation_bytes + self.batch_bytes


class Priced(Protocol):
    """A strategy that states its costs."""

    @classmethod
    def costs(cls, work: Workload, cluster: Cluster, num_rows: int) -> Costs:
        """What the strategy costs on a cluster.

        Args:
            work: Model and data.
            cluster: The devices, all of which are used.
            num_rows: Rows of a step over all devices.

        Returns:
            The costs on the fullest device; with an ``obstacle`` where the strategy cannot be used.
        """


def sent_bytes(kind: str, size: int, payload: int) -> int:
    """Bytes that each process sends in a collective, on average.

    That is ``(size - 1) / size`` of the payload, twice that for ``allreduce``, and all of it for
    ``send``: the least that ring algorithms need, as in the "bus bandwidth" factors of NVIDIA's
    nccl-tests (PERFORMANCE.md).

    Args:
        kind: ``allreduce``, ``broadcast``, ``allgather``, ``reduce_scatter``, ``send``, ...
        size: Number of processes that take part, at least 1.
        payload: Bytes of the tensor; where something is gathered or scattered, of the whole.

    Returns:
        Bytes, rounded down.
    """
    if kind == "send":
        return payload
    factor = 2 if kind == "allreduce" else 1
    return factor * payload * (size - 1) // size


def with_reduction_s(compute_s: float, reduce_s: float) -> float:
    """Seconds of computing and of a reduction of gradients that runs beside it.

    The gradients of one layer are reduced while those of the layers before it are computed: the
    backward pass, two thirds of the computing, hides that much, as in Li et al., "PyTorch
    Distributed" (2020).

    Args:
        compute_s: Seconds of forward and backward.
        reduce_s: Seconds of the reduction alone.

    Returns:
        Seconds until both have ended.
    """
    return compute_s / 3 + max(compute_s * 2 / 3, reduce_s)
