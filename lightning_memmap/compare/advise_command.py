"""``lightning-memmap advise``."""

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from lightning_memmap.arguments import (
    BriefParser,
    imports_for_pages,
    print_error,
    refuse_several_configs,
)
from lightning_memmap.callbacks.memory_trace import KINDS
from lightning_memmap.compare.advise.predict import (
    USABLE_SHARE,
    Prediction,
    predict,
    recommend,
    workload_of,
)
from lightning_memmap.compare.render.image_tables import image_tables
from lightning_memmap.compare.render.terminal import TerminalProgress
from lightning_memmap.compare.report.figures import MILLISECONDS
from lightning_memmap.compare.report.report import Report, VariantResult, read_report
from lightning_memmap.compare.run.comparison import Comparison
from lightning_memmap.compare.run.plan import ComparisonOptions
from lightning_memmap.costs import Cluster, Workload
from lightning_memmap.errors import MemmapError
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.recovery import is_store, stores_within
from lightning_memmap.tables import Cell, Column, Table, print_table

_DESCRIPTION = """Predict which strategy is right for a model, its data and some devices: what fits,
what moves in a step, about how long a step takes. The model is measured: by the variant "auto" of a
finished comparison (--report), or by running that variant of a config now (--config). Without
--devices the answer is for this machine, and is compared with what was measured."""
#: Bandwidth within a node, bandwidth between nodes and latency in seconds, unless options say
#: otherwise: NVLink of one GPU in one direction and a 100 Gbit/s network for GPUs; for a CPU, what
#: gloo showed between two processes of one small machine.
_DEFAULTS = {"cuda": ("400GB", "12.5GB", 2e-5), "cpu": ("1GB", "1GB", 3e-4)}


@dataclass(frozen=True)
class Question:
    """The options of the command.

    Args:
        report: The ``report.json`` of a comparison with the variant ``auto``.
        config: Instead of it, a config whose model and data are measured now.
        out: Folder for that measurement.
        devices: Devices of a node; by default those of the comparison.
        nodes: Nodes.
        memory: Memory of a device, such as 80GB.
        bandwidth: Bytes per second from a device to others of its node, such as 400GB.
        node_bandwidth: Bytes per second from a device to other nodes.
        latency_s: Seconds that an empty collective takes.
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


def advise_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(prog="lightning-memmap advise", description=_DESCRIPTION)
    parser.add_class_arguments(Question, as_group=False)
    return parser


def advise(args: list[str]) -> int:
    """Run the command with these arguments.

    Args:
        args: Arguments of the command line, after ``lightning-memmap advise``.

    Returns:
        The exit code: 0 where a strategy fits, 1 where none does, 2 for a wrong argument.

    Raises:
        SystemExit: An argument is unknown or has the wrong type (code 2), or help was asked for
            (0).
    """
    given = advise_parser().parse_args(args).as_dict()
    console = Console()
    try:
        refuse_several_configs(args)
        question = Question(**given)
        for option, path in (("json", question.json), ("html", question.html)):
            if path is not None:
                _check_writable(option, Path(path))
        report = _report(question, console)
        work, cluster = _workload(question, report), _cluster(question, report)
        rows = question.rows_per_device or report.data.batch_size
        try:
            predictions = predict(work, cluster, rows)
        except ArithmeticError as error:
            raise ValueError(f"the numbers are too large to predict anything: {error}") from error
    except (MemmapError, OSError, ValueError) as error:
        print_error(error)
        return 2
    chosen, reason = recommend(predictions)
    name = chosen.strategy if chosen is not None else None
    described = _described(work, cluster)
    tables = [_table(predictions, name, cluster)]
    measured = []
    if _is_as_measured(question):
        tables.append(_errors(predictions, report))
        measured.append(_fastest_measured(report))
    tables += _images(report, cluster)
    for line in described:
        console.print(line, highlight=False)
    for table in tables:
        print_table(table, console)
    console.print(f"\n[bold]{name or 'none'}[/]: {reason}", highlight=False)
    for line in measured:
        console.print(line, highlight=False)
    if question.html is not None:
        from lightning_memmap.pages import write_tables

        verdict = Cell(f"{name or 'none'}: {reason}", "good" if name else "bad")
        lines = [verdict, *map(Cell, measured), *(Cell(line, "soft") for line in described)]
        write_tables(Path(question.html), "Which strategy is right?", lines, tables)
    if question.json is not None:
        answer = _answer(work, cluster, predictions) | {"recommended": name, "reason": reason}
        Path(question.json).write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1))
    return 0 if chosen is not None else 1


def _answer(work: Workload, cluster: Cluster, predictions: list[Prediction]) -> dict[str, Any]:
    """What was predicted, as JSON values.

    JSON has no infinity: null says that any number of devices compute at full speed.
    """
    found = [asdict(each) | {"samples_per_s": each.samples_per_s} for each in predictions]
    return {"workload": asdict(work), "cluster": asdict(cluster), "predictions": found}


def _check_writable(option: str, path: Path) -> None:
    """Check that an answer can be written there, before minutes of measuring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={str(path)!r} cannot be written: name a file of your own")
    if option == "html":
        with imports_for_pages():
            import jinja2  # noqa: F401


def _report(question: Question, console: Console) -> Report:
    if (question.report is None) == (question.config is None):
        raise ValueError("give --report, the report.json of a comparison, or --config to measure")
    if question.report is not None:
        return read_report(question.report)
    options = ComparisonOptions(
        config=question.config or "", variants="auto", repeats=1, out=question.out,
        devices=question.devices or 2, steps=30, accelerator="auto",
    )  # fmt: skip
    report = Comparison(options, TerminalProgress(console)).run()
    report.write(Path(question.out) / "report.json")
    return report


def _workload(question: Question, report: Report) -> Workload:
    for each in report.variants:
        if each.status == "ok" and not each.rate > 0:
            raise ValueError(
                f"the report has {each.rate} samples/s for {each.variant!r}, which were never"
                " measured: run the comparison again"
            )
    work = workload_of(report)
    if question.parameters is not None:
        factor = question.parameters / max(1, report.model.num_parameters)
        work = replace(
            work,
            parameter_bytes=int(work.parameter_bytes * factor),
            gradient_bytes=int(work.gradient_bytes * factor),
            optimizer_bytes=int(work.optimizer_bytes * factor),
            compute_s_per_row=work.compute_s_per_row * factor,
            flops_per_row=work.flops_per_row * factor,
        )
    if question.activation_bytes_per_row is not None:
        size = parse_bytes(question.activation_bytes_per_row)
        work = replace(work, activation_bytes_per_row=float(size))
    if question.dataset is not None:
        work = replace(work, dataset_bytes=parse_bytes(question.dataset))
    if question.flops is not None:
        if not work.flops_per_row:
            raise ValueError(
                f"flops={question.flops}: torch counted no operations of this model; leave it out"
            )
        work = replace(work, compute_s_per_row=work.flops_per_row / question.flops)
    return work


def _cluster(question: Question, report: Report) -> Cluster:
    settings, environment = report.settings, report.environment
    devices = question.devices or settings.devices
    is_here = question.devices is None and question.memory is None
    on_cpu = settings.accelerator == "cpu"
    links = _DEFAULTS["cpu" if on_cpu and is_here else "cuda"]
    if question.memory is not None:
        memory = parse_bytes(question.memory)
    elif on_cpu:
        # Logical devices share the memory of the host.
        memory = environment.memory_bytes // devices
    elif environment.devices:
        memory = min(device.memory_bytes for device in environment.devices)
    else:
        raise ValueError("the report names no devices: run the comparison again, or give --memory")
    cores = float("inf")
    if on_cpu and is_here:
        auto = next(each for each in report.variants if each.variant == "auto")
        cores = max(1.0, environment.cores / max(1.0, auto.figures["threads"][0]))
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
    """Whether the question is about the machine and the model that were measured."""
    asked = replace(question, report=None, config=None, json=None, html=None, out=Question.out)
    return asked == Question()


def _described(work: Workload, cluster: Cluster) -> list[str]:
    return [
        f"parameters {format_bytes(work.parameter_bytes)}, gradients"
        f" {format_bytes(work.gradient_bytes)}, optimizer {format_bytes(work.optimizer_bytes)},"
        f" activations {format_bytes(int(work.activation_bytes_per_row))} a row, dataset"
        f" {format_bytes(work.dataset_bytes)}, {work.compute_s_per_row * 1e3:.3g} ms a row",
        f"{cluster.nodes} x {cluster.devices} devices of {format_bytes(cluster.memory_bytes)},"
        f" {format_bytes(int(cluster.bandwidth))}/s within a node,"
        f" {format_bytes(int(cluster.node_bandwidth))}/s between nodes",
    ]


def _table(predictions: list[Prediction], chosen: str | None, cluster: Cluster) -> Table:
    rows = []
    slowest_s = max(found.costs.step_s for found in predictions)
    for found in predictions:
        costs = found.costs
        fits = Cell("yes", "good") if found.fits else Cell("no", "bad")
        rows.append(
            [
                Cell(found.strategy, "good" if found.strategy == chosen else ""),
                Cell(costs.obstacle, "unsure") if costs.obstacle else fits,
                Cell(
                    format_bytes(costs.needed_bytes),
                    bar=min(1.0, costs.needed_bytes / max(1, cluster.memory_bytes)),
                ),
                Cell(f"{found.resident_share:.0%}", bar=found.resident_share),
                Cell(format_bytes(costs.moved_bytes)),
                Cell(MILLISECONDS.write(costs.step_s), bar=costs.step_s / slowest_s),
                Cell(f"{found.samples_per_s:,.0f}"),
            ]
        )
    labels = ("strategy", "fits", "needs", "data", "moves", "step ms", "samples/s")
    title = "By strategy: what the fullest device needs and moves in a step"
    return Table(title, [Column(label) for label in labels], rows)


def _errors(predictions: list[Prediction], report: Report) -> Table:
    """What was predicted, relative to what the comparison measured."""
    rows = []
    costs_of = {found.strategy: found.costs for found in predictions}
    for each in report.variants:
        costs, footprint = costs_of.get(each.strategy), each.footprint
        if costs is None or footprint is None or each.loader != "memmap" or each.status != "ok":
            continue
        moved = sum(edge.num_bytes for edge in footprint.edges) / footprint.num_processes
        peak = costs.needed_bytes - costs.buffer_bytes
        ratios = (
            _ratio(costs.state_bytes, footprint.state_bytes),
            _ratio(peak, _peak(each)),
            _ratio(costs.moved_bytes, moved),
            _ratio(costs.step_s, report.settings.global_batch / each.rate),
        )
        rows.append([Cell(each.variant), *map(Cell, ratios)])
    labels = ("strategy", "model state", "peak memory", "moves", "step")
    return Table("Predicted / measured here", [Column(label) for label in labels], rows)


def _images(report: Report, cluster: Cluster) -> list[Table]:
    """Encoded images against decoded ones, where the comparison's stores are on this machine."""
    path, stores = Path(report.data.store_path), dict[str, Store]()
    # A comparison may be looked at long after its stores are gone, or were damaged.
    with suppress(MemmapError):
        names = [""] if is_store(path) else stores_within(path)
        stores = {name or path.name: open_store(path / name) for name in names}
    return image_tables(stores, int(cluster.memory_bytes * USABLE_SHARE))


def _fastest_measured(report: Report) -> str:
    """What was measured here, which counts for more than any prediction."""
    agreeing = [v for v in report.measured if v.status == "ok" and v.parity and v.parity.holds]
    if not agreeing:
        return "No variant of the comparison was found to agree with its reference."
    fastest = agreeing[0]
    return (
        f"Measured here, of {len(agreeing)} variants that agree, {fastest.variant} was the fastest:"
        f" {fastest.rate:,.0f} samples/s"
    )


def _peak(variant: VariantResult) -> float:
    """The most that the memory trace has seen, of all kinds together."""
    kinds = (variant.trace.get(kind, ()) for kind in KINDS)
    return max((sum(moment) for moment in zip(*kinds, strict=False)), default=0.0)


def _ratio(predicted: float, measured: float) -> str:
    if not measured:
        return "both none" if not predicted else "none seen"
    return f"{predicted / measured:.2f}"
