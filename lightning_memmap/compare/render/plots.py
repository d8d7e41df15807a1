"""The pictures of a report, as SVG. Needs matplotlib.

All are narrow, so that a phone shows them at nearly their size; a wide screen shows several side
by side.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lightning_memmap.callbacks.memory_trace import KINDS
from lightning_memmap.compare.report.figures import SPEED
from lightning_memmap.compare.report.footprint import Edge, Footprint
from lightning_memmap.compare.report.records import NUM_TRACED_STEPS, PARTS
from lightning_memmap.compare.report.report import Losses, Report, VariantResult
from lightning_memmap.sizes import format_bytes

_WIDTH_IN = 4.4
_BAR_IN = 0.42
_BAR_HEIGHT = 0.66
_MIB = 2**20
#: Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F6A00", "#555555",
)  # fmt: skip
_PART_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#BBBBBB")
_KIND_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#BBBBBB")
_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Text stays text: small files that can be searched and read aloud.
    "svg.fonttype": "none",
}


def draw(
    report: Report, pictures: Mapping[Callable[[Report], Figure | None], str]
) -> list[tuple[str, str]]:
    """Draw pictures of a report.

    Args:
        report: The report of a comparison.
        pictures: Functions of this module, with the captions of what they draw.

    Returns:
        An SVG element and the caption of each picture for which the report has data, in order.
    """
    with mpl.rc_context(_STYLE):
        drawn = [(function(report), caption) for function, caption in pictures.items()]
        return [(_svg(figure), caption) for figure, caption in drawn if figure is not None]


def _svg(figure: Figure) -> str:
    """The picture as an element of a page, without a script."""
    buffer = io.StringIO()
    # Without a date the same report gives the same page.
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_check_losses(report: Report) -> Figure | None:
    """Draw the losses of the check runs in one picture.

    Returns:
        The picture; None without any such loss.
    """
    curves = {each.variant: each.check_losses for each in report.variants}
    return _draw_losses(report, "Loss of the check runs", curves)


def draw_timed_losses(report: Report) -> Figure | None:
    """Draw the losses of the first timed run of each variant in one picture.

    Returns:
        The picture, without variants that replay one batch; None without any such loss.
    """
    curves = {v.variant: v.timed_losses for v in report.variants if v.loader != "ideal"}
    return _draw_losses(report, "Loss of the first timed runs", curves)


def _draw_losses(report: Report, title: str, found: Mapping[str, Losses]) -> Figure | None:
    curves = {name: losses for name, losses in found.items() if losses}
    if not curves:
        return None
    figure, axes = _axes(2.6, title)
    for index, (name, losses) in enumerate(curves.items()):
        # Curves may coincide: each is thinner than the one below it.
        width = 1 + 5 * (len(curves) - 1 - index) / len(curves)
        known = [float("nan") if loss is None else loss for loss in losses]
        steps = range(1, len(known) + 1)
        axes.plot(steps, known, color=_color(report, name), linewidth=width, label=name)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def draw_throughput(report: Report) -> Figure | None:
    """Draw samples per second: the median of each variant, every run as a dot, and the range.

    Returns:
        The picture; None without timed runs.
    """
    if not report.measured:
        return None
    figure, axes = _bars("Samples per second", report.measured, 0.9)
    for at, variant in enumerate(report.measured):
        rates = variant.figures[SPEED]
        color = _color(report, variant.variant)
        axes.barh(at, variant.rate, color=color, alpha=0.55, height=_BAR_HEIGHT)
        axes.plot([min(rates), max(rates)], [at, at], color="black", linewidth=1)
        axes.plot(rates, [at] * len(rates), "o", color="black", markersize=3)
        axes.text(0, at, f" {variant.rate:,.0f}", va="center", fontsize=8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    return figure


def draw_parts(report: Report) -> Figure | None:
    """Draw where the time of a step goes.

    Returns:
        The picture, in ms; None without timed runs.
    """
    if not report.measured:
        return None
    figure, axes = _bars("Where a step goes, ms", report.measured, 1.3)
    rows = [[median(v.figures[f"{part}_s"]) * 1e3 for part in PARTS] for v in report.measured]
    _stack(axes, rows, PARTS, _PART_COLORS)
    _legend_below(figure, axes, 3)
    return figure


def draw_state(report: Report) -> Figure | None:
    """Draw model state and batch on the device where the model state is largest.

    Returns:
        The picture, in MiB; None without check runs that saw a model.
    """
    found = _with_footprint(report)
    variants = [(variant, footprint) for variant, footprint in found if footprint.model]
    if not variants:
        return None
    figure, axes = _bars("On the fullest device, MiB", [variant for variant, _ in variants], 1.3)
    rows = []
    for _, footprint in variants:
        fullest = max(footprint.model.values(), key=lambda sizes: sizes.total)
        batch = footprint.batch_bytes // footprint.num_processes
        sizes = (fullest.parameters, fullest.gradients, fullest.optimizer, batch)
        rows.append([size / _MIB for size in sizes])
    _stack(axes, rows, ("parameters", "gradients", "optimizer", "batch"), _KIND_COLORS[:4])
    # matplotlib takes a thin last part for an edge, and would leave no margin there.
    axes.set_xlim(0, max(map(sum, rows)) * 1.05)
    _legend_below(figure, axes, 4)
    return figure


def draw_memory(report: Report) -> Figure | None:
    """Draw the pages of each process, and the peak memory of each device if there are any.

    Returns:
        The picture, in MiB; None without timed runs.
    """
    variants = report.measured
    on_gpu = [variant for variant in variants if variant.device_peaks]
    if not variants:
        return None
    panels = 1 + bool(on_gpu)
    figure = _figure(panels * (0.9 + _BAR_IN * len(variants)))
    axes = figure.add_subplot(panels, 1, 1)
    axes.set_title("Host memory by process, MiB")
    _name_bars(axes, variants)
    for at, variant in enumerate(variants):
        left = 0.0
        for index, process in enumerate(variant.processes):
            size = (process.own or 0) / _MIB
            shade = "#0072B2" if process.process.startswith("rank") else "#E69F00"
            axes.barh(
                at, size, left=left, color=shade, alpha=0.9 - 0.15 * (index % 4),
                height=_BAR_HEIGHT, edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left += size
        shared = max((process.shared or 0 for process in variant.processes), default=0) / _MIB
        axes.barh(at, shared, left=left, color="none", edgecolor="#888888", hatch="////",
                  height=_BAR_HEIGHT, linewidth=0.5)  # fmt: skip
    if on_gpu:
        _draw_peaks(figure.add_subplot(panels, 1, 2), on_gpu)
    return figure


def _draw_peaks(axes: Axes, variants: Sequence[VariantResult]) -> None:
    axes.set_title("Peak memory of each device, MiB")
    _name_bars(axes, variants)
    for at, variant in enumerate(variants):
        height = _BAR_HEIGHT / len(variant.device_peaks)
        for index, peak in enumerate(variant.device_peaks.values()):
            y = at - _BAR_HEIGHT / 2 + height * (index + 0.5)
            axes.barh(y, peak.reserved / _MIB, color="#BBBBBB", height=height)
            axes.barh(y, peak.allocated / _MIB, color="#0072B2", height=height)


def draw_traces(report: Report) -> Figure | None:
    """Draw the memory of two steps over time, one plot for each variant on common axes.

    Returns:
        The picture, in MiB; None without a memory trace.
    """
    variants = [variant for variant in report.variants if variant.trace.get("time_s")]
    if not variants:
        return None
    figure = _figure(0.7 + 1.15 * len(variants))
    panes = figure.subplots(len(variants), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, variant in zip(panes, variants, strict=True):
        trace = variant.trace
        count = len(trace["time_s"])
        axes.stackplot(
            # Not by time: recording slows the steps down, most of all at its start.
            [NUM_TRACED_STEPS * i / max(1, count - 1) for i in range(count)],
            [[size / _MIB for size in trace[kind]] for kind in KINDS],
            labels=KINDS,
            colors=_KIND_COLORS,
            step="post",
        )
        axes.set_title(variant.variant)
        axes.grid(alpha=0.25)
    panes[-1].set_xlabel("step")
    figure.supylabel("MiB", fontsize=9)
    _legend_below(figure, panes[0], 3)
    return figure


def draw_scaling(report: Report) -> Figure | None:
    """Draw samples per second and device against the number of devices.

    Returns:
        The picture; None without figures for several numbers of devices.
    """
    curves: dict[str, dict[int, float]] = {}
    for point in report.scaling:
        if point.samples_per_s:
            rate = median(point.samples_per_s) / point.devices
            curves.setdefault(point.variant, {})[point.devices] = rate
    if not curves:
        return None
    figure, axes = _axes(2.7, "Samples per second and device")
    for name, rates in curves.items():
        axes.plot(*zip(*sorted(rates.items()), strict=True), "o-", color=_color(report, name),
                  label=name)  # fmt: skip
    axes.set_xlabel("devices")
    axes.set_xticks(sorted({point.devices for point in report.scaling}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def draw_movement(report: Report) -> Figure | None:
    """Draw what moves from where to where in a step, one row of arrows for each variant.

    Returns:
        The picture; None without check runs.
    """
    found = [(variant, _merged(footprint)) for variant, footprint in _with_footprint(report)]
    if not found:
        return None
    heights = [1 + max(1, len(edges)) for _, edges in found]
    figure, axes = _axes(0.34 * sum(heights) + 0.3, "What moves in a step")
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(sum(heights), -0.6)
    top = 0
    for (variant, edges), height in zip(found, heights, strict=True):
        name = variant.variant
        axes.text(0, top, name, weight="bold", va="center", color=_color(report, name))
        if not edges:
            axes.text(0.04, top + 1, "nothing between devices or processes", va="center")
        for index, (edge, count) in enumerate(edges, 1):
            _draw_edge(axes, edge, count, top + index)
        top += height
    return figure


def _merged(footprint: Footprint) -> list[tuple[Edge, int]]:
    """The edges and their number, with equal edges of all processes merged into one."""
    counts: dict[Edge, int] = {}
    for edge in footprint.edges:
        source = "each process" if edge.source.startswith("rank") else edge.source
        key = Edge(source, edge.target, edge.num_bytes, edge.what, edge.logical)
        counts[key] = counts.get(key, 0) + 1
    return list(counts.items())


def _draw_edge(axes: Axes, edge: Edge, count: int, y: float) -> None:
    axes.text(0.04, y, edge.source, va="center", fontsize=7.5)
    axes.add_patch(
        FancyArrowPatch(
            (0.36, y),
            (0.70, y),
            arrowstyle="-|>",
            mutation_scale=9,
            color="#999999" if edge.logical else "#D55E00",
            linestyle="--" if edge.logical else "-",
            shrinkA=0,
            shrinkB=0,
        )
    )
    times = f"{count} x " if count > 1 else ""
    size = f"{times}{format_bytes(edge.num_bytes)} {edge.what}"
    axes.text(0.53, y - 0.12, size, va="bottom", ha="center", fontsize=7)
    target = edge.target + (" (same memory)" if edge.logical else "")
    axes.text(0.72, y, target, va="center", fontsize=7.5)


def _with_footprint(report: Report) -> list[tuple[VariantResult, Footprint]]:
    return [(each, each.footprint) for each in report.variants if each.footprint is not None]


def _figure(height_in: float) -> Figure:
    return Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")


def _axes(height_in: float, title: str) -> tuple[Figure, Axes]:
    figure = _figure(height_in)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _bars(title: str, variants: Sequence[VariantResult], edge_in: float) -> tuple[Figure, Axes]:
    """A picture with a bar for each variant, and extra height for what is around the bars."""
    figure, axes = _axes(edge_in + _BAR_IN * len(variants), title)
    _name_bars(axes, variants)
    return figure, axes


def _name_bars(axes: Axes, variants: Sequence[VariantResult]) -> None:
    axes.set_yticks(range(len(variants)), [each.variant for each in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _stack(
    axes: Axes, rows: Iterable[Sequence[float]], labels: Sequence[str], colors: Sequence[str]
) -> None:
    """Bars of several parts, one row of parts for each bar."""
    for at, row in enumerate(rows):
        left = 0.0
        for value, label, color in zip(row, labels, colors, strict=True):
            name = label if at == 0 else None
            axes.barh(at, value, left=left, color=color, height=_BAR_HEIGHT, label=name)
            left += value


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _color(report: Report, name: str) -> str:
    names = [each.variant for each in report.variants]
    return _COLORS[names.index(name) % len(_COLORS)]
