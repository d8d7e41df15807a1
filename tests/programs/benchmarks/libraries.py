"""The loader against other data-loading libraries, each local, warm and shuffled.

    python tests/programs/benchmarks/libraries.py --case A,B,C,D

Every way to read is first checked: an epoch has each row once, in an order of its own, with the
dtypes and shapes of the data set. A short trial finds the fastest ways of each library, and these
take turns with the loader. Time is wall time, since workers are processes of their own; with
`--clock cpu`, which other work on the machine disturbs less, ways with workers are left out.
`other_loaders.py` says what is tried for each library and why.
"""

import argparse
import gc
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from loader import CASES, LEAST_S, Case, RandomRows, case_loader, epochs_of
from other_loaders import LIBRARIES, Rows, Way
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor

from lightning_memmap.store import build_store

#: What is so much slower in a trial than the fastest way of its kind, of the same library or of
#: any library before, is not timed.
SLOWER, FAR_SLOWER = 3, 20
#: Where the check takes so long, it serves as the trial: what it adds is little then.
SLOW_S = 10.0


class WrongEpochError(Exception):
    """An epoch does not have the rows that it should."""


@dataclass(frozen=True)
class Result:
    """How much faster the loader is than a way of a library, round by round."""

    library: str
    way: Way
    rates: list[float]
    ratios: list[float]


def make_fields(batch: Any) -> list[Tensor]:
    """The rows of a batch, and the labels where there are some, however they are held."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [batch[name] for name in ("rows", "label") if name in batch]
    return list(batch)


def fingerprints(fields: list[Tensor]) -> Tensor:
    """A number for each row, of its values, their places and its label; float64 of shape (B,).

    Exact, since the values are small integers and the sums stay far below 2**53.
    """
    rows = fields[0].flatten(1).double()
    numbers = 10 * (rows @ torch.arange(1, rows.shape[1] + 1, dtype=torch.float64))
    return numbers + fields[1] if len(fields) > 1 else numbers


def expected_fingerprints(rows: Rows) -> Tensor:
    """Those of all rows, in the order of the data set."""
    fields = [rows.tensor] + ([] if rows.labels is None else [torch.from_numpy(rows.labels)])
    parts = zip(*(field.split(rows.case.batch) for field in fields), strict=True)
    return torch.cat([fingerprints(list(part)) for part in parts])


def check_epoch(batches: Iterable[Any], case: Case, expected: Tensor, num_workers: int = 0) -> None:
    """Read an epoch and see that it is one.

    Args:
        batches: Batches of an epoch.
        case: What a batch should look like.
        expected: The fingerprints of all rows in the data set's order.
        num_workers: So many batches beside the last may be short, since each worker has an end.

    Raises:
        WrongEpochError: A batch has other tensors, dtypes or shapes, too many batches are short,
            rows are missing or come twice, or their order is that of the data set.
    """
    wanted = [(case.dtype, case.shape)] + [(torch.int64, ())] * case.label
    seen, num_short = [torch.empty(0, dtype=torch.float64)], 0
    for batch in batches:
        fields = make_fields(batch)
        if not all(isinstance(field, Tensor) for field in fields):
            raise WrongEpochError(f"a batch of {[type(field).__name__ for field in fields]}")
        found = [(field.dtype, tuple(field.shape[1:])) for field in fields]
        if found != wanted:
            raise WrongEpochError(f"a batch of {found} instead of {wanted}")
        sizes = {len(field) for field in fields}
        if len(sizes) > 1 or max(sizes) > case.batch:
            raise WrongEpochError(f"a batch of {sorted(sizes)} rows instead of {case.batch}")
        num_short += max(sizes) < case.batch
        seen.append(fingerprints(fields))
    delivered = torch.cat(seen)
    if not torch.equal(delivered.sort().values, expected.sort().values):
        raise WrongEpochError(f"{len(delivered)} rows, not each of {len(expected)} once")
    if torch.equal(delivered, expected):
        raise WrongEpochError("the rows are not shuffled")
    if num_short > 1 + num_workers:
        raise WrongEpochError(f"{num_short} batches are short of {case.batch} rows")


def read_epoch(batches: Iterable[Any], num_rows: int) -> None:
    """Read an epoch and do nothing with it, except to count.

    Raises:
        WrongEpochError: There are more or fewer rows.
    """
    count = 0
    for batch in batches:
        count += len(make_fields(batch)[0])
        del batch
    if count != num_rows:
        raise WrongEpochError(f"{count} rows instead of {num_rows}")


def trial(way: Way, case: Case, expected: Tensor, clock: str) -> float:
    """Check an epoch, and return the seconds of the best one of a few that follow.

    Raises:
        WrongEpochError: The epoch is not what it should be.
    """
    start = perf_counter()
    check_epoch(way.batches, case, expected, way.num_workers)
    seconds = perf_counter() - start
    if seconds < SLOW_S:
        rounds = 1 if seconds > SLOW_S / 4 else 3
        epochs = in_turn({"": lambda: read_epoch(way.batches, case.num_rows)}, rounds, clock)
        seconds = min(epochs[""])
    # Workers that start later would carry along, and end, what is left of these iterators.
    gc.collect()
    return seconds


def worth_timing(
    ways: Iterable[Way], case: Case, expected: Tensor, fastest: dict[bool, float], clock: str
) -> Generator[str, None, list[Way]]:
    """The fastest ways of each kind; yields a line for each of the others.

    ``fastest`` has the seconds of the fastest trial of each kind so far, and is kept up to date.
    """
    trials: list[tuple[float, Way]] = []
    for way in ways:
        try:
            trials.append((trial(way, case, expected, clock), way))
        except WrongEpochError as error:
            yield f"    {way.name}: not timed, {error}"
    limits = dict.fromkeys((False, True), float("inf"))
    for seconds, way in trials:
        fastest[way.tuned] = min(seconds, fastest.get(way.tuned, seconds))
        limits[way.tuned] = min(limits[way.tuned], SLOWER * seconds)
    kept = []
    for seconds, way in trials:
        if seconds <= min(limits[way.tuned], FAR_SLOWER * fastest[way.tuned]):
            kept.append(way)
        else:
            yield f"    {way.name}: {case.num_rows / seconds:,.0f} samples/s in a trial, not timed"
    return kept


def measure(
    library: str,
    ways: list[Way],
    ours: Callable[[], object],
    num_rows: int,
    args: argparse.Namespace,
) -> tuple[list[float], list[Result]]:
    """The loader and the ways of a library in turn: the loader's rates, and how they compare."""
    runs = {"": ours}
    for way in ways:
        runs[way.name] = lambda way=way: read_epoch(way.batches, num_rows)
    seconds = in_turn(runs, args.rounds, args.clock, LEAST_S)
    rates = {name: [num_rows / value for value in values] for name, values in seconds.items()}
    return rates[""], [
        Result(library, way, rates[way.name], pairwise_ratios(rates[""], rates[way.name]))
        for way in ways
    ]


def library_lines(
    library: str,
    rows: Rows,
    expected: Tensor,
    ours: Callable[[], object],
    fastest: dict[bool, float],
    args: argparse.Namespace,
) -> Generator[str, None, list[Result]]:
    """The report of a library, whose files are gone at the end."""
    try:
        yield f"  {library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        yield f"  {library}: not installed, see pip install -e '.[bench]'"
        return []
    with tempfile.TemporaryDirectory() as directory:
        try:
            ways: Iterable[Way] = LIBRARIES[library](rows, Path(directory))
            if args.clock == "cpu":
                ways = (way for way in ways if not way.num_workers)
            kept = yield from worth_timing(ways, rows.case, expected, fastest, args.clock)
        # Other packages may fail in any way, also on import; the rest is measured all the same.
        except Exception as error:
            yield f"    not measured, {type(error).__name__}: {error}"
            return []
        if not kept:
            return []
        rates, results = measure(library, kept, ours, len(rows), args)
        yield f"    {'the loader':<36} {spread(rates, '{:,.0f}'):>36} samples/s"
        for result in results:
            name = result.way.name + (", by hand" if result.way.tuned else "")
            yield (
                f"    {name:<36} {spread(result.rates, '{:,.0f}'):>36} samples/s;"
                f" the loader is faster {spread(result.ratios, '{:.1f}')} times"
            )
        return results


def summary(kind: str, results: list[Result]) -> str:
    """The best way of all libraries."""
    if not results:
        return f"  best {kind}: nothing was measured"
    best = min(results, key=lambda result: median(result.ratios))
    ratio = spread(best.ratios, "{:.1f}")
    return f"  best {kind}: {best.library}, {best.way.name}; the loader is faster {ratio} times"


def case_lines(name: str, args: argparse.Namespace) -> Iterator[str]:
    """The report of a case."""
    case = CASES[name]
    yield f"case {name}: {case}"
    source = RandomRows(case)
    rows = Rows(case, source)
    expected = expected_fingerprints(rows)
    results: list[Result] = []
    fastest: dict[bool, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = build_store(source, Path(directory) / "store", progress=False)
        loader = case_loader(store, case, 1, "mmap")
        check_epoch(loader.assembled(torch.device("cpu")), case, expected)
        ours = epochs_of(loader)
        for library in args.library.split(","):
            results += yield from library_lines(library, rows, expected, ours, fastest, args)
            gc.collect()
    yield summary("as documented", [result for result in results if not result.way.tuned])
    yield summary("by hand", [result for result in results if result.way.tuned])


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="A", help=f"of {','.join(CASES)}")
    parser.add_argument("--library", default=",".join(LIBRARIES), help=f"of {','.join(LIBRARIES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    # Libraries give views of what they mapped, of which torch warns; nothing writes to them here.
    warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
    print(f"{machine()}; {args.clock} time, {args.rounds} rounds", flush=True)
    for name in args.case.split(","):
        for line in case_lines(name, args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
