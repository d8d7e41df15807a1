"""What each strategy would need and cost, and which one to use."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

from lightning_memmap.compare.advise.lightning import LIGHTNING_COSTS
from lightning_memmap.compare.report.footprint import Footprint
from lightning_memmap.compare.report.records import PARTS
from lightning_memmap.compare.report.report import Report, VariantResult
from lightning_memmap.costs import Cluster, Costs, Priced, Workload
from lightning_memmap.sizes import format_bytes
from lightning_memmap.strategies import STRATEGIES

#: Share of a device's memory that may be planned for. The rest is the CUDA context, libraries,
#: fragmentation.
USABLE_SHARE = 0.9
#: How much faster a strategy must be than a simpler one to be recommended.
_WORTH = 1.1
#: The variants that train on all rows of a step on one device, which are served from stores.
_ONE_DEVICE = ("auto", "memmap_superbatch")


@dataclass(frozen=True)
class Prediction:
    """What a strategy would need and do.

    Args:
        strategy: Its name.
        rows_per_step: Rows of a step over all devices.
        costs: What its fullest device needs, and what it does in a step.
        shard_bytes: Rows of the dataset that fit on that device beside it.
        resident_share: Share of the dataset that fits on all devices that may hold rows.
        fits: Whether model, activations and batch fit.
    """

    strategy: str
    rows_per_step: int
    costs: Costs
    shard_bytes: int
    resident_share: float
    fits: bool

    @property
    def samples_per_s(self) -> float:
        """Rows per second over all devices."""
        return self.rows_per_step / self.costs.step_s if self.costs.step_s else 0.0


def one_device_variant(report: Report) -> tuple[VariantResult, Footprint]:
    """Find the variant that tells what one device needs, which trains on all rows of a step there.

    Args:
        report: The report of a comparison.

    Returns:
        ``auto``, or else ``memmap_superbatch``, and what it keeps where.

    Raises:
        ValueError: Neither has finished.
    """
    finished = {each.variant: each for each in report.variants if each.status == "ok"}
    for name in _ONE_DEVICE:
        if name in finished and (footprint := finished[name].footprint) is not None:
            return finished[name], footprint
    config = report.settings.config
    raise ValueError(
        f"in the report, neither {' nor '.join(_ONE_DEVICE)} has finished, one of which tells what"
        f" one device needs: run lightning-memmap compare --config {config} --variants auto,... or"
        f" lightning-memmap advise --config {config}"
    )


def workload_of(report: Report) -> Workload:
    """Read the workload off a comparison, from `one_device_variant`.

    Args:
        report: The report of the comparison.

    Returns:
        Model and data as one device had them: medians of the timed runs, and bytes and operations
        of the check run.

    Raises:
        ValueError: The report has no such variant, or not all of its figures.
    """
    found, footprint = one_device_variant(report)
    rows = report.settings.global_batch
    needed = ("threads", *(f"{part}_s" for part in PARTS))
    if missing := ", ".join(key for key in needed if key not in found.figures):
        raise ValueError(
            f"the report lacks {missing} of {found.variant!r}: run the comparison again"
        )
    parts_s = {part: median(found.figures[f"{part}_s"]) for part in PARTS}
    models = footprint.model.values()
    return Workload(
        parameter_bytes=sum(model.parameters for model in models),
        gradient_bytes=sum(model.gradients for model in models),
        optimizer_bytes=sum(model.optimizer for model in models),
        activation_bytes_per_row=max(found.trace.get("activations", ()), default=0.0) / rows,
        batch_bytes_per_row=footprint.batch_bytes / rows,
        dataset_bytes=report.data.num_bytes,
        compute_s_per_row=(parts_s.pop("forward") + parts_s.pop("backward")) / rows,
        fixed_s=sum(parts_s.values()),
        flops_per_row=footprint.flops_per_step / rows,
        configures_itself=report.model.configures_itself,
    )


def predict(work: Workload, cluster: Cluster, rows_per_device: int) -> list[Prediction]:
    """Predict what every strategy would need and cost, the simpler ones first.

    Args:
        work: Model and data.
        cluster: The devices.
        rows_per_device: Rows of a step per device, at least 1. Under every strategy a step has this
            many times the number of devices.

    Returns:
        One prediction for each strategy of this pack and of Lightning, by increasing effort (see
        `lightning_memmap.costs.Costs`). Strategies with an obstacle are included.

    Raises:
        ValueError: ``rows_per_device`` is below 1.
    """
    if rows_per_device < 1:
        raise ValueError(f"rows_per_device={rows_per_device}: at least 1 is needed")
    rows = rows_per_device * cluster.size
    formulas = LIGHTNING_COSTS | {
        name: cast(type[Priced], strategy).costs for name, strategy, _ in STRATEGIES
    }
    found = {name: costs(work, cluster, rows) for name, costs in formulas.items()}
    by_effort = sorted(found.items(), key=lambda item: item[1].effort)
    return [_prediction(name, costs, work, cluster, rows) for name, costs in by_effort]


def _prediction(name: str, costs: Costs, work: Workload, cluster: Cluster, rows: int) -> Prediction:
    left = int(cluster.memory_bytes * USABLE_SHARE) - costs.needed_bytes
    share = work.dataset_bytes / costs.num_row_devices
    return Prediction(
        strategy=name,
        rows_per_step=rows,
        costs=costs,
        shard_bytes=int(min(max(left, 0), share)),
        resident_share=min(1.0, max(left, 0) / share) if share else 1.0,
        fits=left >= 0,
    )


def recommend(predictions: Sequence[Prediction]) -> tuple[Prediction | None, str]:
    """Choose the strategy to use, and say why.

    Of those that fit and train one model, it is the simplest strategy that is slower than the
    fastest by a factor of at most 1.1.

    Args:
        predictions: Of `predict`, the simpler strategies first. At least one has no obstacle.

    Returns:
        The prediction, or None where nothing fits, and the reason in a sentence.
    """
    possible = [each for each in predictions if not each.costs.obstacle]
    usable = [each for each in possible if each.fits and each.costs.trains_one_model]
    if not usable:
        least = min(possible, key=lambda each: each.costs.needed_bytes)
        needed = format_bytes(least.costs.needed_bytes)
        return None, (
            f"nothing fits: even {least.strategy} needs {needed} on a device. Ways out: fewer rows"
            " per device, a lower precision, activation checkpointing, more devices"
        )
    fastest = max(usable, key=lambda each: each.samples_per_s)
    chosen = next(p for p in usable if fastest.samples_per_s <= _WORTH * p.samples_per_s)
    speed = f"{chosen.samples_per_s:,.0f} samples/s"
    if chosen is not fastest:
        return chosen, f"{speed}, less than {_WORTH - 1:.0%} below {fastest.strategy}, and simpler"
    larger = [each.strategy for each in possible if not each.fits]
    why = f"the fastest that fits: {speed}"
    return chosen, why + (f"; {', '.join(larger)} would not fit" if larger else "")
