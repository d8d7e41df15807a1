"""The data order alone: set-up, memory and time of a row, from 10^4 to 10^9 rows.

    python tests/benchmarks/order.py --shards 24

No data is read. Set-up is the first position of an epoch; the rest are blocks of consecutive
positions from the middle of the epoch, as a loader asks for them.
"""

import argparse
import statistics
import tracemalloc
from collections.abc import Callable

from timing import CLOCKS, machine, spread

from lightning_memmap.sampling import Shards, ShuffledSampler


def measure(num_rows: int, num_shards: int, block: int, rounds: int, clock: str) -> str:
    """One line: set-up in microseconds, peak memory in KiB, nanoseconds for a row."""
    now = CLOCKS[clock]
    first_s, row_ns = [], []
    sampler = ShuffledSampler(Shards(num_rows, num_shards), seed=1)
    start = num_rows // 2 if num_rows >= 2 * block else 0
    positions = range(start, min(num_rows, start + block))
    for epoch in range(rounds + 1):
        first_s.append(timed(now, lambda epoch=epoch: sampler.at(epoch, range(1))))
        times = [timed(now, lambda epoch=epoch: sampler.at(epoch, positions)) for _ in range(9)]
        row_ns.append(1e9 * statistics.median(times) / len(positions))
    tracemalloc.start()
    sampler.at(rounds + 1, range(1))
    sampler.at(rounds + 1, positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (
        f"{num_rows:>13,} {spread([1e6 * s for s in first_s[1:]], '{:,.0f}'):>30}"
        f" {peak_bytes / 1024:>14,.0f} {spread(row_ns[1:]):>24}"
    )


def timed(now: Callable[[], float], function: Callable[[], object]) -> float:
    """Seconds."""
    start = now()
    function()
    return now() - start


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--block", type=int, default=65536, help="positions asked for at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    print(f"{machine()}; {args.shards} shards, blocks of {args.block}, {args.clock} time")
    print(f"{'rows':>13} {'set-up of an epoch, us':>30} {'peak, KiB':>14} {'ns for a row':>24}")
    for power in range(4, 10):
        print(measure(10**power, args.shards, args.block, args.rounds, args.clock), flush=True)


if __name__ == "__main__":
    main()
