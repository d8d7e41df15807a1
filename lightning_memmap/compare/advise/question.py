"""What the command ``advise`` is asked."""

import math
from dataclasses import dataclass, replace

from lightning_memmap.compare.advise.predict import one_device_variant, workload_of
from lightning_memmap.compare.report.report import Report
from lightning_memmap.costs import Cluster, Workload
from lightning_memmap.sizes import parse_bytes

#: Bandwidth within a node, bandwidth between nodes and latency in seconds, unless options say
#: otherwise: NVLink of one GPU in one direction and a 100 Gbit/s network for GPUs; for a CPU, what
#: gloo showed between two processes of one small machine.
_DEFAULTS = {"cuda": ("400GB", "12.5GB", 2e-5), "cpu": ("1GB", "1GB", 3e-4)}


@dataclass(frozen=True)
class Question:
    """The options of the command.

    Args:
        report: The ``report.json`` of a comparison with a variant that trains on one device,
            ``auto`` or ``memmap_superbatch``.
        config: Instead of it, a config whose model and data are measured now.
        out: Folder for that measurement.
        devices: Devices of a node; by default those of the comparison.
        nodes: Nodes, which have the same number of devices each.
        memory: Memory of a device, such as 80GB; by default that of those of the comparison.
        bandwidth: Bytes per second from a device to others of its node, such as 400GB. For this and
            the next two, typical values are taken by default.
        node_bandwidth: Bytes per second from a device to other nodes, such as 12.5GB.
        latency_s: Seconds that an empty collective takes, such as 2e-5.
        flops: Floating point operations per second that a device reaches on this model; by default
            it computes as fast as the device that was measured.
        rows_per_device: Rows of a step per device; by default those of the comparison.
        parameters: Another number of parameters: its bytes and its computing are scaled, its
            activations are not.
        activation_bytes_per_row: Another size of activations, such as 40MB.
        dataset: Another size of the dataset, such as 2TB.
        json: Where to write the answer as JSON.
        html: Where to write it as a page, with bars for memory and time.

    Raises:
        ValueError: A number is out of range.
    """

    report: str | None = None
    config: str | None = None
    out: str = "runs/advise"
    devices: int | None = None
    nodes: int = 1
    memory: str | None = None
    bandwidth: str | None = None
    node_bandwidth: str | None = None
    latency_s: float | None = None
    flops: float | None = None
    rows_per_device: int | None = None
    parameters: float | None = None
    activation_bytes_per_row: str | None = None
    dataset: str | None = None
    json: str | None = None
    html: str | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "rows_per_device"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1 is needed")
        for name in ("flops", "parameters"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: more than 0, and finite")
        if self.latency_s is not None and not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s={self.latency_s}: 0 or more, and finite")
        sizes = {"memory": 1, "bandwidth": 1, "node_bandwidth": 1}
        for name, least in (sizes | {"activation_bytes_per_row": 0, "dataset": 0}).items():
            text = getattr(self, name)
            try:
                is_enough = text is None or least <= parse_bytes(text) < math.inf
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{name}={text!r:.50}: {error}") from error
            if not is_enough:
                raise ValueError(f"{name}={text!r}: at least {least} B is needed")

    def workload(self, report: Report) -> Workload:
        """What is asked about: what was measured, with what the options say otherwise.

        Args:
            report: The comparison.

        Raises:
            ValueError: The report lacks what is needed.
        """
        for each in report.variants:
            if each.status == "ok" and not each.rate > 0:
                raise ValueError(
                    f"the report has {each.rate} samples/s for {each.variant!r}, which were never"
                    " measured: run the comparison again"
                )
        work = workload_of(report)
        if self.parameters is not None:
            factor = self.parameters / max(1, report.model.num_parameters)
            work = replace(
                work,
                parameter_bytes=int(work.parameter_bytes * factor),
                gradient_bytes=int(work.gradient_bytes * factor),
                optimizer_bytes=int(work.optimizer_bytes * factor),
                compute_s_per_row=work.compute_s_per_row * factor,
                flops_per_row=work.flops_per_row * factor,
            )
        if self.activation_bytes_per_row is not None:
            size = parse_bytes(self.activation_bytes_per_row)
            work = replace(work, activation_bytes_per_row=float(size))
        if self.dataset is not None:
            work = replace(work, dataset_bytes=parse_bytes(self.dataset))
        if self.flops is not None:
            if not work.flops_per_row:
                raise ValueError(
                    f"flops={self.flops}: torch counted no operations of this model; leave it out"
                )
            work = replace(work, compute_s_per_row=work.flops_per_row / self.flops)
        return work

    def cluster(self, report: Report) -> Cluster:
        """The devices that are asked about: those of the comparison, unless options say otherwise.

        Args:
            report: The comparison.

        Raises:
            ValueError: The report names no devices.
        """
        settings, environment = report.settings, report.environment
        devices = self.devices or settings.devices
        is_here = self.devices is None and self.memory is None
        on_cpu = settings.accelerator == "cpu"
        links = _DEFAULTS["cpu" if on_cpu and is_here else "cuda"]
        if self.memory is not None:
            memory = parse_bytes(self.memory)
        elif on_cpu:
            # Logical devices share the memory of the host.
            memory = environment.memory_bytes // devices
        elif environment.devices:
            memory = min(device.memory_bytes for device in environment.devices)
        else:
            raise ValueError(
                "the report names no devices: run the comparison again, or give --memory"
            )
        cores = float("inf")
        if on_cpu and is_here:
            found, _ = one_device_variant(report)
            cores = max(1.0, environment.cores / max(1.0, found.figures["threads"][0]))
        return Cluster(
            devices=devices,
            nodes=self.nodes,
            memory_bytes=memory,
            bandwidth=parse_bytes(links[0] if self.bandwidth is None else self.bandwidth),
            node_bandwidth=parse_bytes(
                links[1] if self.node_bandwidth is None else self.node_bandwidth
            ),
            latency_s=links[2] if self.latency_s is None else self.latency_s,
            parallel_devices=cores,
            has_gpus=not (on_cpu and is_here),
        )

    @property
    def is_as_measured(self) -> bool:
        """Whether the question is about the machine and the model that were measured."""
        asked = replace(self, report=None, config=None, json=None, html=None, out=Question.out)
        return asked == Question()
