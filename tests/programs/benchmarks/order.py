"""The data order alone: set-up, memory and time of a row, from 10^4 to 10^9 rows.

    python tests/programs/benchmarks/order.py --shards 24
    python tests/programs/benchmarks/order.py --ranks 1024 --rows 10000000000

No data is read. Set-up is the first position of an epoch; the rest are blocks of consecutive
positions from the middle of the epoch, as a loader asks for them. With --ranks, each rank in turn
works out its first steps and its rows are counted.
"""

import argparse
import statistics
import tracemalloc
from collections.abc import Callable

from timing import CLOCKS, machine, spread

from lightning_memmap.sampling import Pool, ShuffledSampler
from lightning_memmap.sampling.rows import Shards, StoreRows

#: Ranks whose rows are counted in one epoch, of which the first one is timed.
_RANKS_OF_EPOCH = 64


def _pool(num_rows: int, num_shards: int) -> Pool:
    return Pool.of(StoreRows(Shards(num_rows, num_shards)), num_shards)


def measure(num_rows: int, num_shards: int, block: int, rounds: int, clock: str) -> str:
    """One line: set-up in microseconds, peak memory in KiB, nanoseconds for a row."""
    now = CLOCKS[clock]
    first_s, row_ns = [], []
    sampler = ShuffledSampler(_pool(num_rows, num_shards), seed=1)
    start = num_rows // 2 if num_rows >= 2 * block else 0
    positions = range(start, min(num_rows, start + block))
    for epoch in range(rounds + 1):
        first_s.append(timed(now, lambda epoch=epoch: sampler.locate(epoch, range(1))))
        times = [timed(now, lambda epoch=epoch: sampler.locate(epoch, positions)) for _ in range(9)]
        row_ns.append(1e9 * statistics.median(times) / len(positions))
    tracemalloc.start()
    sampler.locate(rounds + 1, range(1))
    sampler.locate(rounds + 1, positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (
        f"{num_rows:>13,} {spread([1e6 * s for s in first_s[1:]], '{:,.0f}'):>30}"
        f" {peak_bytes / 1024:>14,.0f} {spread(row_ns[1:]):>24}"
    )


def measure_ranks(num_rows: int, num_ranks: int, block: int, clock: str) -> None:
    """Set up each rank of a large run, and count the rows that it will be given."""
    now, num_served = CLOCKS[clock], 0
    setup_s, peaks = list[float](), list[float]()
    for rank in range(num_ranks):
        tracemalloc.start()
        start = now()
        sampler = ShuffledSampler(_pool(num_rows, num_ranks), seed=1)
        mine = range(rank, num_rows, num_ranks)
        # What the ranks of an epoch have in common stays in this process: another epoch is worked
        # out again, as by a rank that has a process of its own.
        epoch = rank // _RANKS_OF_EPOCH
        index = sampler.locate(epoch, mine[:block])
        if not rank % _RANKS_OF_EPOCH:
            setup_s.append(now() - start)
            peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
        rows = sampler.dataset_rows(epoch, mine[:block])
        # Its rows are those of the shard of its number, whose permutation has each row once.
        assert len(set(index.tolist())) == len(index) == len(mine[:block])
        assert set((rows % num_ranks).tolist()) == {rank}
        assert int(sampler.pool.sizes[rank]) == len(mine)
        num_served += len(mine)
    assert num_served == num_rows
    print(f"{num_rows:,} rows over {num_ranks:,} ranks: each row in exactly one")
    print(f"  set-up of a rank and its first {block} rows: {spread(setup_s, '{:.4f}')} s")
    print(f"  peak memory of a rank: {spread(peaks, '{:.1f}')} MiB")


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
    parser.add_argument("--ranks", type=int, help="set up so many ranks instead")
    parser.add_argument("--rows", type=int, default=10**10, help="rows of all these ranks")
    args = parser.parse_args()
    if args.ranks:
        print(f"{machine()}; {args.clock} time, with memory being traced")
        measure_ranks(args.rows, args.ranks, min(args.block, 1024), args.clock)
        return
    print(f"{machine()}; {args.shards} shards, blocks of {args.block}, {args.clock} time")
    print(f"{'rows':>13} {'set-up of an epoch, us':>30} {'peak, KiB':>14} {'ns for a row':>24}")
    for power in range(4, 10):
        print(measure(10**power, args.shards, args.block, args.rounds, args.clock), flush=True)


if __name__ == "__main__":
    main()
