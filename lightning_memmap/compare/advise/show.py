"""Predictions as lines and tables."""

from lightning_memmap.callbacks.memory_trace import KINDS
from lightning_memmap.compare.advise.predict import Prediction
from lightning_memmap.compare.report.figures import MILLISECONDS
from lightning_memmap.compare.report.report import Report, VariantResult
from lightning_memmap.costs import Cluster, Workload
from lightning_memmap.sizes import format_bytes
from lightning_memmap.tables import Cell, Column, Table


def described(work: Workload, cluster: Cluster) -> list[str]:
    """What was predicted for, in words.

    Args:
        work: What is trained.
        cluster: Where.

    Returns:
        Lines of text.
    """
    return [
        f"parameters {format_bytes(work.parameter_bytes)}, gradients"
        f" {format_bytes(work.gradient_bytes)}, optimizer {format_bytes(work.optimizer_bytes)},"
        f" activations {format_bytes(int(work.activation_bytes_per_row))} a row, dataset"
        f" {format_bytes(work.dataset_bytes)}, {work.compute_s_per_row * 1e3:.3g} ms a row",
        f"{cluster.nodes} x {cluster.devices} devices of {format_bytes(cluster.memory_bytes)},"
        f" {format_bytes(int(cluster.bandwidth))}/s within a node,"
        f" {format_bytes(int(cluster.node_bandwidth))}/s between nodes",
    ]


def prediction_table(predictions: list[Prediction], chosen: str | None, cluster: Cluster) -> Table:
    """What each strategy needs, moves and takes.

    Args:
        predictions: By strategy, in the order of the rows.
        chosen: The strategy that is recommended; None where none fits.
        cluster: Where is trained.
    """
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
                Cell("unknown" if costs.moved_bytes is None else format_bytes(costs.moved_bytes)),
                Cell(MILLISECONDS.write(costs.step_s), bar=costs.step_s / slowest_s),
                Cell(f"{found.samples_per_s:,.0f}"),
            ]
        )
    labels = ("strategy", "fits", "needs", "data", "moves", "step ms", "samples/s")
    title = "By strategy: what the fullest device needs and moves in a step"
    return Table(title, [Column(label) for label in labels], rows)


def error_table(predictions: list[Prediction], report: Report) -> Table:
    """What was predicted, relative to what the comparison measured.

    Args:
        predictions: By strategy.
        report: The comparison.
    """
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


def fastest_measured(report: Report) -> str:
    """What was measured here, which counts for more than any prediction.

    Args:
        report: The comparison.

    Returns:
        A sentence.
    """
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


def _ratio(predicted: float | None, measured: float) -> str:
    if predicted is None:
        return "unknown"
    if not measured:
        return "both none" if not predicted else "none seen"
    return f"{predicted / measured:.2f}"
