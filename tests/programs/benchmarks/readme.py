"""Writes the figures of the README, from the report of its main command.

    lightning-memmap compare --config examples/configs/photos.yaml ...    # as in the README
    python tests/programs/benchmarks/readme.py runs/compare/report.json

The machine must be idle. Whatever stands between the two comments ``<!-- figures -->`` and
``<!-- end of figures -->`` is replaced, so that nobody types a figure.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
from jsonargparse import auto_cli

from lightning_memmap.compare.report import Report, VariantResult

README = Path(__file__).resolve().parents[3] / "README.md"
START, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
#: Whose speed the first sentence tells.
FLAGSHIP = "memmap_superbatch"
#: Strategies whose only process trains, which are compared with each other.
ALONE = "auto", FLAGSHIP


def write_figures(report: str, readme: str = str(README)) -> None:
    """Replace the figures of the README.

    Args:
        report: The report.json of its main command.
        readme: The README.
    """
    path = Path(readme)
    before, start, rest = path.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{path} has no lines {START.strip()} and {END.strip()}")
    found = msgspec.json.decode(Path(report).read_bytes(), type=Report)
    lines = "".join(f"{line}\n" for line in figures(found))
    path.write_text(before + start + lines + end + after, encoding="utf-8")


def figures(report: Report) -> Iterator[str]:
    """The lines of the README, in Markdown.

    Args:
        report: A comparison of `FLAGSHIP` with a ``DataLoader`` and the ideal loader.

    Raises:
        ValueError: A variant is missing, parity does not hold, or the machine was busy.
    """
    if report.exit_code:
        raise ValueError(f"the comparison ended with exit code {report.exit_code}: not shown")
    machine = report.environment
    if machine["load_before"] > machine["cores"] + 1:
        raise ValueError(
            f"the machine was busy, with a load of {machine['load_before']:.1f} on"
            f" {machine['cores']} cores: run the command again when it is idle"
        )
    rates = {each.variant: median(each.rates) for each in report.timed_variants}
    best = _best_loader(rates, FLAGSHIP)
    ideal = rates.get(f"{FLAGSHIP}+ideal")
    if FLAGSHIP not in rates or best is None or ideal is None:
        raise ValueError(f"the report has {', '.join(rates)}: run the command of the README")
    yield (
        f"**{rates[FLAGSHIP] / best:.1f} times as fast as the best DataLoader, and"
        f" {_reached(rates[FLAGSHIP] / ideal)}** (`{FLAGSHIP}`), with {_equal(report)}. Measured on"
        f" {machine['cores']} cores of {machine['processor']}"
        f"{'' if machine['devices'] else ', without a GPU'}, with torch"
        f" {machine['packages'].get('torch')}, in {report.settings['steps']} steps of"
        f" {report.settings['global_batch']} rows{_runs(report.settings['repeats'])}:"
    )
    yield ""
    yield "| variant | samples/s | of the best DataLoader | of the no-load upper bound |"
    yield "|---|---|---|---|"
    for each in report.timed_variants:
        rate = rates[each.variant]
        strategy = each.variant.partition("+")[0]
        bases = _best_loader(rates, strategy), rates.get(f"{strategy}+ideal")
        ratios = ["" if base is None else f"{rate / base:.2f}" for base in bases]
        yield f"| `{each.variant}` | {_range(each)} | {' | '.join(ratios)} |"
    if rates[FLAGSHIP] > ideal:
        yield ""
        yield "Values above 1.00 are run-to-run noise."


def _best_loader(rates: dict[str, float], strategy: str) -> float | None:
    """Return the rate of the fastest DataLoader of comparable strategies; None without one."""
    comparable = ALONE if strategy in ALONE else (strategy,)
    names = [name for name in rates if "+workers" in name and name.partition("+")[0] in comparable]
    return max((rates[name] for name in names), default=None)


def _reached(of_ideal: float) -> str:
    # Nothing is faster than a loader that takes no time: above 1, it is the noise of the runs.
    return f"at {of_ideal:.0%} of the no-load upper bound" if of_ideal < 1 else "at its upper bound"


def _equal(report: Report) -> str:
    compared = [each.parity for each in report.variants if each.parity is not None]
    largest = max(parity.weight_difference or 0.0 for parity in compared)
    rows = "the same rows in every step"
    if largest == 0:
        return f"{rows} and the same weights, bit for bit"
    return f"{rows} and weights within {largest:.0e} of each other"


def _runs(repeats: int) -> str:
    return f", medians of {repeats} runs (lowest..highest)" if repeats > 1 else ""


def _range(variant: VariantResult) -> str:
    runs = variant.rates
    spread = f" ({min(runs):,.0f}..{max(runs):,.0f})" if len(runs) > 1 else ""
    return f"{median(runs):,.0f}{spread}"


if __name__ == "__main__":
    auto_cli(write_figures)
