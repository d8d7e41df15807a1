"""What packing leaves unused and how fast it trains, beside padding and the packers of others.

    python tests/programs/benchmarks/packing.py
    python tests/programs/benchmarks/packing.py --train 40
    python tests/programs/benchmarks/packing.py --plan 10000000

Lengths are log-normal, as those of chats (median 300) and of web texts (median 700). The packers of
others pack in their own units: TRL's best-fit decreasing ("bfd") of each 1,000 rows, which is what
its `map` passes to it; axolotl's first-fit decreasing ("multipack") of each rank's rows in groups
of 100,000, whose epoch is cut to what all ranks have; and first fit with 8 open packs, as in Grain
and torchtitan. TRL's is its own function if `trl` is installed, and must then make as many packs as
the algorithm written down here. The others are their published algorithms: axolotl needs CUDA.
"""

import argparse
import bisect
import importlib.util
import json
import os
import platform
import resource
from collections.abc import Iterator
from importlib.metadata import version
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lightning_memmap.loading import Packing
from lightning_memmap.sampling import Bucketed, Packed, Pool, ShuffledSampler
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.rows import Shards, StoreRows

Lengths = np.ndarray


class Fields:
    """A dataset of which only lengths are known."""

    def __init__(self, lengths: Lengths) -> None:
        self.num_rows = len(lengths)
        self._lengths = lengths

    def lengths(self, field: str) -> Lengths:
        """The lengths."""
        return self._lengths


def drawn(num_rows: int, median_length: float, sigma: float, limit: int) -> Lengths:
    """Log-normal lengths up to a limit."""
    lengths = np.random.default_rng(0).lognormal(np.log(median_length), sigma, num_rows)
    return np.clip(lengths, 1, limit).astype(np.int64)


def best_fit_decreasing(lengths: Lengths, limit: int) -> int:
    """Packs of TRL's packer for one batch of rows."""
    free = list[int]()
    num_packs = 0
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect.bisect_left(free, length)
        left = limit
        if at == len(free):
            num_packs += 1
        else:
            left = free.pop(at)
        if left > length:
            bisect.insort(free, left - length)
    return num_packs


def trl(lengths: Lengths, limit: int) -> float:
    """The padding of best-fit decreasing over each 1,000 rows."""
    parts = [lengths[first : first + 1000] for first in range(0, len(lengths), 1000)]
    num_packs = sum(best_fit_decreasing(part, limit) for part in parts)
    if importlib.util.find_spec("trl") is not None:
        assert num_packs == trl_packs(lengths, limit)
    return 1 - lengths.sum() / (limit * num_packs)


def trl_packs(lengths: Lengths, limit: int) -> int:
    """Packs of TRL's own function."""
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    rows = [np.zeros(length, np.int32) for length in lengths.tolist()]
    start = perf_counter()
    packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), limit, strategy="bfd")
    print(f"  trl {version('trl')} packs {len(rows):,} rows in {perf_counter() - start:.2f} s")
    return len(packed)


def axolotl(lengths: Lengths, limit: int, ranks: int = 8) -> tuple[float, float]:
    """The padding of first-fit decreasing per rank, and the rows that no step has.

    Every rank has as many steps as the rank with the fewest packs.
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    packs = list[list[int]]()
    for rank in range(ranks):
        own = list[int]()
        rows = lengths[order[rank::ranks]]
        for first in range(0, len(rows), 100_000):
            free = list[int]()
            for length in np.sort(rows[first : first + 100_000])[::-1].tolist():
                # The first that fits: of decreasing lengths, a scan over open packs.
                at = next((n for n, left in enumerate(free) if left >= length), -1)
                if at < 0:
                    free.append(limit)
                free[at] -= length
            own += [limit - left for left in free]
        packs.append(own)
    steps = min(map(len, packs))
    used = sum(sum(own[:steps]) for own in packs)
    return 1 - used / (limit * steps * ranks), 1 - used / lengths.sum()


def first_fit(lengths: Lengths, limit: int, num_open: int = 8) -> float:
    """The padding of first fit with a few open packs, in a random order."""
    free = list[int]()
    num_packs = 0
    for length in lengths[np.random.default_rng(0).permutation(len(lengths))].tolist():
        at = next((n for n, left in enumerate(free) if left >= length), -1)
        if at < 0:
            if len(free) == num_open:
                free.remove(min(free))
            free.append(limit)
            num_packs += 1
        free[at] -= length
    return 1 - lengths.sum() / (limit * num_packs)


def padded(lengths: Lengths, rows: np.ndarray, batch: int) -> float:
    """The padding of batches that are padded to their longest row."""
    ordered = lengths[rows]
    starts = np.arange(0, len(ordered), batch)
    sizes = np.diff(np.append(starts, len(ordered)))
    return float(1 - ordered.sum() / (np.maximum.reduceat(ordered, starts) * sizes).sum())


def pool_of(num_rows: int, num_shards: int) -> Pool:
    """All rows of a store."""
    return Pool.of(StoreRows(Shards(num_rows, num_shards)), num_shards)


def packed(lengths: Lengths, limit: int, num_shards: int, **options: Any) -> PackedSampler:
    """The order of packs."""
    pool = pool_of(len(lengths), num_shards)
    return Packed("tokens", limit, **options).make(pool, 0, Fields(lengths))


def paddings(
    lengths: Lengths, limit: int, num_shards: int, batch: int
) -> Iterator[tuple[str, str]]:
    """What each way leaves unused."""
    pool = pool_of(len(lengths), num_shards)
    everything = range(len(lengths))
    shuffled = ShuffledSampler(pool, 0).dataset_rows(0, everything)
    yield f"padding to {limit}", f"{1 - lengths.mean() / limit:.2%}"
    yield f"padding per batch of {batch}", f"{padded(lengths, shuffled, batch):.2%}"
    bucketed = Bucketed("tokens", batch).make(pool, 0, Fields(lengths))
    rows = bucketed.dataset_rows(0, everything)
    yield f"Bucketed, batch of {batch}", f"{padded(lengths, rows, batch):.2%}"
    yield "first fit, 8 open packs (Grain)", f"{first_fit(lengths, limit):.2%}"
    yield "bfd of each 1,000 rows (TRL)", f"{trl(lengths, limit):.2%}"
    unused, lost = axolotl(lengths, limit)
    yield "ffd per rank of 8 (axolotl)", f"{unused:.2%}, and {lost:.2%} of tokens in no step"
    yield "Packed, 1 to 96 devices", f"{packed(lengths, limit, num_shards).padding_fraction:.2%}"
    yield (
        "Packed, split=True",
        f"{packed(lengths, limit, num_shards, split=True).padding_fraction:.2%}",
    )


def plan(num_rows: int, block: int | None) -> None:
    """Time the planning of an epoch in CPU seconds, and measure its memory."""
    lengths = drawn(num_rows, 300, 0.8, 2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = process_time()
    if block is None:
        sampler = packed(lengths, 2048, 192)
    else:
        pool = pool_of(num_rows, 192)
        sampler = Packed("tokens", 2048).make_in_blocks(pool, 0, Fields(lengths), block)
    made = process_time()
    sampler.packs(1)
    done = process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{num_rows:,} documents: set-up {made - start:.2f} s, an epoch {done - made:.2f} s,"
        f" {peak / 1024:.0f} MiB more at the peak, {sampler.num_positions:,} packs,"
        f" {sampler.padding_fraction:.2%} unused"
    )


class Block(torch.nn.Module):
    """A transformer layer, to have something to train."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One layer with a mask of (B, 1, L, L)."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


def step_s(packs: list[list[int]], length: int) -> float:
    """Seconds of a training step on one batch of documents, (B, length)."""
    starts = torch.zeros(len(packs), max(map(len, packs)) + 1, dtype=torch.int32)
    for index, documents in enumerate(packs):
        starts[index, 1 : len(documents) + 1] = torch.tensor(documents, dtype=torch.int32)
    start = perf_counter()
    mask = Packing.of(starts.cumsum(1, dtype=torch.int32), length, length).attention_mask()
    x = INPUT[:, :length].expand(len(packs), length, -1)
    for layer in LAYERS:
        x = layer(x, mask)
    x.square().mean().backward()
    return perf_counter() - start


LAYERS = torch.nn.ModuleList(Block() for _ in range(2))
INPUT = torch.randn(1, 8192, 128)


def throughput(num_steps: int, limit: int = 1024, tokens_a_step: int = 4096) -> None:
    """Train on batches of each way in turn, of about the same number of padded tokens."""
    lengths = drawn(20_000, 150, 0.8, limit)
    pool = pool_of(len(lengths), 24)
    sampler = packed(lengths, limit, 24)
    batches: dict[str, list[tuple[list[list[int]], int]]] = {}
    documents = sampler.documents_at(1, np.arange(num_steps * tokens_a_step // limit))
    stops = np.cumsum(documents.documents_per_pack)
    packs = [part.tolist() for part in np.split(documents.lengths[:, 0], stops[:-1])]
    size = tokens_a_step // limit
    batches["Packed"] = [(packs[n : n + size], limit) for n in range(0, len(packs), size)]
    rows = ShuffledSampler(pool, 0).dataset_rows(0, range(num_steps * 8))
    sets = {"padding per batch of 8": rows}
    order = Bucketed("tokens", 8).make(pool, 0, Fields(lengths))
    sets["Bucketed, batch of 8"] = order.dataset_rows(0, range(num_steps * 8))
    for name, found in sets.items():
        parts = lengths[found].reshape(-1, 8).tolist()
        batches[name] = [([[n] for n in part], max(part)) for part in parts]
    rates: dict[str, list[float]] = {name: [] for name in batches}
    for step in range(num_steps):
        for name, steps in batches.items():
            documents, length = steps[step]
            seconds = step_s(documents, length)
            rates[name].append(sum(map(sum, documents)) / seconds)
    for name, found in rates.items():
        low, high = np.quantile(found[2:], [0.25, 0.75])
        print(f"{name:<28} {median(found[2:]):>10,.0f} tokens/s ({low:,.0f}..{high:,.0f})")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--plan", type=int, nargs="*", help="plan so many documents instead")
    parser.add_argument("--block", type=int, help="rows of a shard in a block")
    parser.add_argument("--train", type=int, help="train so many steps instead")
    args = parser.parse_args()
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps(machine))
    if args.plan is not None:
        for num_rows in args.plan:
            plan(num_rows, args.block)
        return
    if args.train is not None:
        throughput(args.train)
        return
    cases = (("chats", 300, 0.8, 2048, 24), ("web texts", 700, 1.1, 8192, 192))
    for name, median_length, sigma, limit, num_shards in cases:
        lengths = drawn(args.rows, median_length, sigma, limit)
        print(f"{args.rows:,} {name}, packs of {limit}, {num_shards} shards:")
        for way, words in paddings(lengths, limit, num_shards, 8):
            print(f"  {way:<34} {words}")


if __name__ == "__main__":
    main()
