"""The pictures of a report, as SVG. Needs matplotlib.

All are narrow, so that a phone shows them at nearly their size; a wide screen shows several side
by side.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lightning_memmap.callbacks.memory_trace import KINDS
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.measure import NUM_TRACED_STEPS
from lightning_memmap.compare.report import Report
from lightning_memmap.compare.results import ArmResult, Edge
from lightning_memmap.placement import format_bytes

_WIDTH_IN = 4.4
_BAR_IN = 0.42
#: Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F6A00", "#555555",
)  # fmt: skip
_PART_COLORS = dict(
    zip(PARTS, ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#BBBBBB"), strict=True)
)
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
    # Letters stay letters: small files, and text that can be searched and read aloud.
    "svg.fonttype": "none",
}


def draw_check_losses(report: Report) -> str | None:
    """The losses of the check runs over each other."""
    curves = {arm.arm: arm.check_losses for arm in report.arms if arm.check_losses}
    return _draw_losses(report, "Loss of the check runs", curves)


def draw_timed_losses(report: Report) -> str | None:
    """The losses of the first timed run of each arm over each other."""
    curves = {a.arm: a.timed_losses for a in report.arms if a.timed_losses and a.feed != "ideal"}
    return _draw_losses(report, "Loss of the first timed runs", curves)


def _draw_losses(report: Report, title: str, curves: Mapping[str, Sequence[float]]) -> str | None:
    if not curves:
        return None
    with mpl.rc_context(_STYLE):
        figure = _figure(2.6)
        (axes,) = _rows(figure, 1)
        for index, (name, losses) in enumerate(curves.items()):
            # Curves that lie on each other: each is thinner than the one below.
            width = 1 + 5 * (len(curves) - 1 - index) / len(curves)
            axes.plot(
                range(1, len(losses) + 1),
                losses,
                color=_color(report, name),
                linewidth=width,
                label=name,
            )
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend()
        return _svg(figure)


def draw_throughput(report: Report) -> str | None:
    """Samples a second: the median of each arm, every run as a dot, and the range."""
    arms = _costed(report.arms)
    if not arms:
        return None
    with mpl.rc_context(_STYLE):
        figure = _figure(0.9 + _BAR_IN * len(arms))
        (axes,) = _rows(figure, 1)
        for place, arm in enumerate(arms):
            assert arm.cost is not None
            rate = arm.cost.samples_per_s
            color = _color(report, arm.arm)
            axes.barh(place, rate.median, color=color, alpha=0.55, height=0.66)
            axes.plot([rate.low, rate.high], [place, place], color="black", linewidth=1)
            axes.plot(rate.values, [place] * len(rate.values), "o", color="black", markersize=3)
            axes.text(0, place, f" {rate.median:,.0f}", va="center", fontsize=8)
        _name_bars(axes, arms)
        axes.set_title("Samples per second")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        return _svg(figure)


def draw_parts(report: Report) -> str | None:
    """Where the time of a step goes."""
    arms = _costed(report.arms)
    if not arms:
        return None
    with mpl.rc_context(_STYLE):
        figure = _figure(1.3 + _BAR_IN * len(arms))
        (axes,) = _rows(figure, 1)
        for place, arm in enumerate(arms):
            assert arm.cost is not None
            left = 0.0
            for part in PARTS:
                value = arm.cost.parts_s[part] * 1e3
                axes.barh(
                    place,
                    value,
                    left=left,
                    color=_PART_COLORS[part],
                    height=0.66,
                    label=part if place == 0 else None,
                )
                left += value
        _name_bars(axes, arms)
        axes.set_title("Where a step goes, ms")
        _legend_below(figure, axes, 3)
        return _svg(figure)


def draw_state(report: Report) -> str | None:
    """Parameters, gradients and optimizer state where they are the most, and the rows there."""
    arms = [arm for arm in report.arms if arm.holding is not None and arm.holding.model]
    if not arms:
        return None
    names = ("parameters", "gradients", "optimizer", "batch")
    colors = dict(zip(names, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True))
    with mpl.rc_context(_STYLE):
        figure = _figure(1.3 + _BAR_IN * len(arms))
        (axes,) = _rows(figure, 1)
        longest = 0.0
        for place, arm in enumerate(arms):
            assert arm.holding is not None
            fullest = max(arm.holding.model.values(), key=lambda sizes: sum(sizes.values()))
            shared = arm.holding.batch_bytes // max(1, arm.holding.num_processes)
            left = 0.0
            for name in names:
                size = (shared if name == "batch" else fullest[name]) / 2**20
                label = name if place == 0 else None
                axes.barh(place, size, left=left, color=colors[name], height=0.66, label=label)
                left += size
            longest = max(longest, left)
        # A thin last part counts as an edge for matplotlib, which would leave no margin there.
        axes.set_xlim(0, longest * 1.05)
        _name_bars(axes, arms)
        axes.set_title("Held by the fullest device, MiB")
        _legend_below(figure, axes, 4)
        return _svg(figure)


def draw_memory(report: Report) -> str | None:
    """Peak memory of each device, where there are any, and the pages of each process."""
    arms = _costed(report.arms)
    if not arms:
        return None
    on_gpu = [arm for arm in arms if arm.cost is not None and arm.cost.device_peaks]
    panels = 1 + bool(on_gpu)
    with mpl.rc_context(_STYLE):
        figure = _figure(panels * (0.9 + _BAR_IN * len(arms)))
        panes = _rows(figure, panels)
        _draw_pages(panes[0], arms)
        if on_gpu:
            _draw_peaks(panes[1], on_gpu)
        return _svg(figure)


def _draw_pages(axes: Axes, arms: Sequence[ArmResult]) -> None:
    for place, arm in enumerate(arms):
        assert arm.cost is not None
        left = 0.0
        for index, process in enumerate(arm.cost.processes):
            size = max(process["own"], 0) / 2**20
            shade = "#0072B2" if process["process"].startswith("rank") else "#E69F00"
            axes.barh(
                place, size, left=left, color=shade, alpha=0.9 - 0.15 * (index % 4), height=0.66,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left += size
        shared = max(process["shared"] for process in arm.cost.processes) / 2**20
        axes.barh(place, shared, left=left, color="none", edgecolor="#888888", hatch="////",
                  height=0.66, linewidth=0.5)  # fmt: skip
    _name_bars(axes, arms)
    axes.set_title("Host memory by process, MiB")


def _draw_peaks(axes: Axes, arms: Sequence[ArmResult]) -> None:
    for place, arm in enumerate(arms):
        assert arm.cost is not None
        count = len(arm.cost.device_peaks)
        for index, peak in enumerate(arm.cost.device_peaks.values()):
            at, height = place + 0.66 * ((index + 0.5) / count - 0.5), 0.66 / count
            axes.barh(at, peak["reserved"] / 2**20, color="#BBBBBB", height=height)
            axes.barh(at, peak["allocated"] / 2**20, color="#0072B2", height=height)
    _name_bars(axes, arms)
    axes.set_title("Peak memory of each device, MiB")


def draw_traces(report: Report) -> str | None:
    """The memory of two steps over time, one picture for each arm on common axes."""
    arms = [arm for arm in report.arms if arm.trace and arm.trace["time_s"]]
    if not arms:
        return None
    with mpl.rc_context(_STYLE):
        figure = _figure(0.7 + 1.15 * len(arms))
        panes = figure.subplots(len(arms), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, arm in zip(panes, arms, strict=True):
            assert arm.trace is not None
            count = len(arm.trace["time_s"])
            axes.stackplot(
                # Not by the clock, which the recording holds up, most of all at its start.
                [NUM_TRACED_STEPS * i / max(1, count - 1) for i in range(count)],
                [[size / 2**20 for size in arm.trace[kind]] for kind in KINDS],
                labels=KINDS,
                colors=_KIND_COLORS,
                step="post",
            )
            axes.set_title(arm.arm)
            axes.grid(alpha=0.25)
        panes[-1].set_xlabel("step")
        figure.supylabel("MiB", fontsize=9)
        _legend_below(figure, panes[0], 3)
        return _svg(figure)


def draw_scaling(report: Report) -> str | None:
    """Samples a second per device as devices grow."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in report.scaling:
        if point.samples_per_s:
            values = sorted(point.samples_per_s)
            rate = values[len(values) // 2] / point.devices
            curves.setdefault(point.arm, []).append((point.devices, rate))
    if not curves:
        return None
    with mpl.rc_context(_STYLE):
        figure = _figure(2.7)
        (axes,) = _rows(figure, 1)
        for name, points in curves.items():
            devices, rates = zip(*sorted(points), strict=True)
            axes.plot(devices, rates, "o-", color=_color(report, name), label=name)
        axes.set_title("Samples per second and device")
        axes.set_xlabel("devices")
        axes.set_xticks(sorted({point.devices for point in report.scaling}))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.25)
        axes.legend()
        return _svg(figure)


def draw_movement(report: Report) -> str | None:
    """What moves from where to where in a step, one row of arrows for each arm."""
    arms = [arm for arm in report.arms if arm.holding is not None]
    if not arms:
        return None
    heights = [1 + max(1, len(_merged(arm))) for arm in arms]
    with mpl.rc_context(_STYLE):
        figure = _figure(0.34 * sum(heights) + 0.3)
        (axes,) = _rows(figure, 1)
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(sum(heights), -0.6)
        axes.set_title("What moves in a step")
        top = 0.0
        for arm, height in zip(arms, heights, strict=True):
            axes.text(0, top, arm.arm, weight="bold", va="center", color=_color(report, arm.arm))
            edges = _merged(arm)
            if not edges:
                axes.text(0.04, top + 1, "nothing between devices or processes", va="center")
            for index, (edge, count) in enumerate(edges, 1):
                _draw_edge(axes, edge, count, top + index)
            top += height
        return _svg(figure)


def _merged(arm: ArmResult) -> list[tuple[Edge, int]]:
    """The edges of an arm; those that every process has alike are one, with their number."""
    assert arm.holding is not None
    merged: dict[tuple[str, str, int, str, bool], list[Edge]] = {}
    for edge in arm.holding.edges:
        is_rank = edge.source.startswith("rank")
        source = "each process" if is_rank else edge.source
        merged.setdefault(
            (source, edge.target, edge.num_bytes, edge.what, edge.logical), []
        ).append(edge)
    return [(Edge(*key), len(edges)) for key, edges in merged.items()]


def _draw_edge(axes: Axes, edge: Edge, count: int, y: float) -> None:
    color = "#999999" if edge.logical else "#D55E00"
    axes.text(0.04, y, edge.source, va="center", fontsize=7.5)
    axes.add_patch(
        FancyArrowPatch(
            (0.36, y),
            (0.70, y),
            arrowstyle="-|>",
            mutation_scale=9,
            color=color,
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


def _figure(height_in: float) -> Figure:
    return Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")


def _rows(figure: Figure, count: int) -> list[Axes]:
    return [figure.add_subplot(count, 1, index + 1) for index in range(count)]


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _name_bars(axes: Axes, arms: Sequence[ArmResult]) -> None:
    axes.set_yticks(range(len(arms)), [arm.arm for arm in arms])
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _costed(arms: Iterable[ArmResult]) -> list[ArmResult]:
    found = [arm for arm in arms if arm.cost is not None]
    return sorted(found, key=lambda arm: -(arm.cost.samples_per_s.median if arm.cost else 0.0))


def _color(report: Report, name: str) -> str:
    names = [arm.arm for arm in report.arms]
    return _COLORS[names.index(name) % len(_COLORS)]


def _svg(figure: Figure) -> str:
    """The picture as an element to be put into a page: as wide as its place, with no script."""
    buffer = io.StringIO()
    # Without a date the same report gives the same page.
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
