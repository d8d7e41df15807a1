"""``lightning-memmap advise``."""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_memmap.arguments import BriefParser, refuse_several_configs
from lightning_memmap.callbacks.memory_trace import KINDS
from lightning_memmap.compare.advise import (
    Cluster,
    Prediction,
    Workload,
    predict,
    recommend,
)
from lightning_memmap.compare.comparison import Comparison, Settings
from lightning_memmap.compare.report import read_report
from lightning_memmap.compare.terminal import TerminalProgress, make_table
from lightning_memmap.errors import MemmapError
from lightning_memmap.placement import format_bytes, parse_bytes

_DESCRIPTION = """Tell which strategy is right for a model, its data and some devices: what fits,
what moves in a step, about how long a step takes. The model is measured: by the arm "auto" of a
finished comparison (--report), or by running that arm of a config now (--config). Without --devices
the answer is for this machine, and is held against what the comparison measured."""
#: Assumed where nobody says better: NVLink of one GPU in one direction and a 100 Gbit/s network for
#: GPUs, and what gloo showed between two processes of one small machine.
_DEFAULTS = {"cuda": ("400GB", "12.5GB", 2e-5), "cpu": ("1GB", "1GB", 3e-4)}


@dataclass(frozen=True)
class Question:
    """What the command is told.

    Args:
        report: The ``report.json`` of a comparison with the arm ``auto``.
        config: Instead of it, a config whose model and data are measured now.
        out: Folder for that measurement.
        devices: Devices of a node; by default those of the comparison.
        nodes: Nodes.
        memory: Memory of a device, such as 80GB.
        bandwidth: Bytes a second from a device to others of its node, such as 400GB.
        node_bandwidth: Bytes a second from a device to other nodes.
        latency_s: Seconds that an empty collective takes.
        flops: Floating point operations a second that a device reaches on this model; by default
            it computes as fast as the device that was measured.
        rows_per_device: Rows of a step per device; by default those of the comparison.
        parameters: Another number of parameters: the model is scaled, its bytes and its computing
            alike, its activations not.
        activation_bytes_per_row: Another size of activations, such as 40MB.
        dataset: Another size of the dataset, such as 2TB.
        json: Where to write the answer as JSON.

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


def advise(args: list[str]) -> int:
    """Run the command with these arguments.

    Returns:
        The exit code: 0 where a strategy fits, 1 where none does, 2 for a wrong argument.
    """
    parser = BriefParser(prog="lightning-memmap advise", description=_DESCRIPTION)
    parser.add_class_arguments(Question, as_group=False)
    given = parser.parse_args(args).as_dict()
    console = Console()
    try:
        refuse_several_configs(args)
        question = Question(**given)
        if question.json is not None:
            _check_writable(Path(question.json))
        report = _report(question, console)
        work, cluster, rows = _situation(question, report)
        predictions = predict(work, cluster, rows)
    except (MemmapError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen, reason = recommend(predictions)
    _print_workload(work, cluster, console)
    console.print(_table(predictions, chosen))
    if _is_as_measured(question):
        console.print(_errors(predictions, report))
    name = chosen.strategy if chosen is not None else "none"
    console.print(f"\n[bold]{name}[/]: {reason}", highlight=False)
    if _is_as_measured(question):
        console.print(_fastest_measured(report), highlight=False)
    if question.json is not None:
        answer = {
            "workload": asdict(work),
            "cluster": asdict(cluster) | {"parallel_devices": None},
            "predictions": [asdict(p) | {"samples_per_s": p.samples_per_s} for p in predictions],
            "recommended": chosen.strategy if chosen is not None else None,
            "reason": reason,
        }
        Path(question.json).write_text(json.dumps(answer, indent=1), encoding="utf-8")
    return 0 if chosen is not None else 1


def _check_writable(path: Path) -> None:
    """See that an answer can be written there, before minutes of measuring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"json={str(path)!r} cannot be written: name a file of your own")


def _report(question: Question, console: Console) -> dict[str, Any]:
    if (question.report is None) == (question.config is None):
        raise ValueError("give --report, the report.json of a comparison, or --config to measure")
    if question.report is not None:
        return read_report(question.report)
    settings = Settings(
        config=question.config or "", arms="auto", repeats=1, out=question.out,
        devices=question.devices or 2, steps=30, accelerator="auto",
    )  # fmt: skip
    report = Comparison(settings, TerminalProgress(console)).run()
    report.write(Path(question.out) / "report.json")
    return read_report(Path(question.out) / "report.json")


def _situation(question: Question, report: Mapping[str, Any]) -> tuple[Workload, Cluster, int]:
    """Model, devices and rows per device that a question is about."""
    try:
        for arm in report["arms"]:
            rate = arm["cost"]["samples_per_s"]["median"] if arm["status"] == "ok" else 1
            if not rate > 0:
                raise ValueError(
                    f"the report tells of {rate} samples/s of {arm['arm']!r}, which were never"
                    " measured: run the comparison again"
                )
        work, cluster = _workload(question, report), _cluster(question, report)
        return work, cluster, question.rows_per_device or int(report["data"]["batch_size"])
    except (LookupError, TypeError, ArithmeticError) as error:
        # What the sections of a report hold is not checked when it is read.
        raise ValueError(
            f"the report does not tell what one device needs ({error!r}): run the comparison again"
        ) from error


def _workload(question: Question, report: Mapping[str, Any]) -> Workload:
    work = Workload.from_report(report)
    if question.parameters is not None:
        factor = question.parameters / max(1, report["model"]["num_parameters"])
        scaled = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        work = replace(work, **{name: int(getattr(work, name) * factor) for name in scaled})
        work = replace(
            work,
            compute_s_per_row=work.compute_s_per_row * factor,
            flops_per_row=work.flops_per_row * factor,
        )
    if question.activation_bytes_per_row is not None:
        size = parse_bytes(question.activation_bytes_per_row)
        work = replace(work, activation_bytes_per_row=float(size))
    if question.dataset is not None:
        work = replace(work, dataset_bytes=parse_bytes(question.dataset))
    if question.flops is not None:
        if not question.flops > 0 or not work.flops_per_row:
            raise ValueError(
                f"flops={question.flops}: more than 0, for a model whose operations torch counts"
            )
        work = replace(work, compute_s_per_row=work.flops_per_row / question.flops)
    return work


def _cluster(question: Question, report: Mapping[str, Any]) -> Cluster:
    settings, environment = report["settings"], report["environment"]
    devices = question.devices or int(settings["devices"])
    is_here = question.devices is None and question.memory is None
    on_cpu = settings["accelerator"] == "cpu"
    links = _DEFAULTS["cpu" if on_cpu and is_here else "cuda"]
    if question.memory is not None:
        memory = parse_bytes(question.memory)
    elif on_cpu:
        # Logical devices share the memory of the host.
        memory = int(environment["memory_bytes"]) // devices
    else:
        memory = min(int(device["memory_bytes"]) for device in environment["devices"])
    auto = next(arm for arm in report["arms"] if arm["arm"] == "auto")
    cores = float("inf")
    if on_cpu and is_here:
        cores = max(1.0, environment["cores"] / max(1, auto["cost"]["threads"]))
    return Cluster(
        devices=devices,
        nodes=question.nodes,
        memory_bytes=memory,
        bandwidth=parse_bytes(links[0] if question.bandwidth is None else question.bandwidth),
        node_bandwidth=parse_bytes(
            links[1] if question.node_bandwidth is None else question.node_bandwidth
        ),
        latency_s=links[2] if question.latency_s is None else question.latency_s,
        parallel_devices=cores,
        has_gpus=not (on_cpu and is_here),
    )


def _is_as_measured(question: Question) -> bool:
    """Whether the question is about the machine and the model that the report has measured."""
    told = [
        field.name
        for field in fields(Question)
        if getattr(question, field.name) != field.default
        and field.name not in ("report", "config", "out", "json")
    ]
    return not told


def _print_workload(work: Workload, cluster: Cluster, console: Console) -> None:
    console.print(
        f"parameters {format_bytes(work.parameter_bytes)}, gradients"
        f" {format_bytes(work.gradient_bytes)}, optimizer {format_bytes(work.optimizer_bytes)},"
        f" activations {format_bytes(int(work.activation_bytes_per_row))} a row, dataset"
        f" {format_bytes(work.dataset_bytes)}, {work.compute_s_per_row * 1e3:.3g} ms a row\n"
        f"{cluster.nodes} x {cluster.devices} devices of {format_bytes(cluster.memory_bytes)},"
        f" {format_bytes(int(cluster.bandwidth))}/s within a node,"
        f" {format_bytes(int(cluster.node_bandwidth))}/s between nodes",
        highlight=False,
    )


def _table(predictions: list[Prediction], chosen: Prediction | None) -> Table:
    table = make_table(
        "By strategy: what the fullest device needs and moves in a step",
        ["strategy"],
        ["fits", "needs", "data", "moves", "step ms", "samples/s"],
    )
    for found in predictions:
        fits = "[green]yes[/]" if found.fits else "[red]no[/]"
        mark = "[bold green]" if found is chosen else ""
        table.add_row(
            f"{mark}{found.strategy}",
            f"[yellow]{found.obstacle}[/]" if found.obstacle else fits,
            format_bytes(found.needed_bytes),
            f"{found.resident_share:.0%}",
            format_bytes(found.moved_bytes),
            f"{found.step_s * 1e3:,.3g}" if found.step_s < 1 else f"{found.step_s * 1e3:,.0f}",
            f"{found.samples_per_s:,.0f}",
        )
    return table


def _errors(predictions: list[Prediction], report: Mapping[str, Any]) -> Table:
    """What was predicted against what the comparison measured."""
    table = make_table(
        "Predicted / measured here", ["strategy"], ["model state", "peak memory", "moves", "step"]
    )
    by_name = {found.strategy: found for found in predictions}
    for arm in report["arms"]:
        found = by_name.get(arm["strategy"])
        if found is None or arm["feed"] != "memmap" or arm["status"] != "ok":
            continue
        holding = arm["holding"]
        moved = sum(e["num_bytes"] for e in holding["edges"]) / holding["num_processes"]
        rate = arm["cost"]["samples_per_s"]["median"]
        table.add_row(
            arm["arm"],
            _ratio(found.model_bytes, holding["state_bytes_per_device"]),
            _ratio(found.model_bytes + found.activation_bytes, _peak(arm["trace"])),
            _ratio(found.moved_bytes, moved),
            _ratio(found.step_s, report["settings"]["global_batch"] / rate),
        )
    return table


def _fastest_measured(report: Mapping[str, Any]) -> str:
    """What was found here, which counts for more than any prediction."""
    rates = {
        arm["arm"]: arm["cost"]["samples_per_s"]["median"]
        for arm in report["arms"]
        if arm["status"] == "ok" and arm["parity"] is not None and arm["parity"]["held"]
    }
    if not rates:
        return "No arm of the comparison was found to agree with its reference."
    fastest = max(rates, key=lambda arm: float(rates[arm]))
    return (
        f"Measured here, of {len(rates)} arms that agree, {fastest} was the fastest:"
        f" {rates[fastest]:,.0f} samples/s"
    )


def _peak(trace: Mapping[str, list[float]] | None) -> float:
    """The most that a memory trace has seen, of all kinds together."""
    if not trace:
        return 0.0
    return max((sum(moment) for moment in zip(*(trace[k] for k in KINDS), strict=True)), default=0)


def _ratio(predicted: float, measured: float) -> str:
    if not measured:
        return "both none" if not predicted else "none seen"
    return f"{predicted / measured:.2f}"
