"""Plans how many packs an epoch has, and which documents each shard and block packs."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lightning_memmap.integers import (
    Integers,
    ceil_div,
)
from lightning_memmap.sampling.documents import (
    Documents,
    PackOptions,
)
from lightning_memmap.sampling.packed_sampler import (
    PackedSampler,
    check_available,
    count_packs_per_block,
)
from lightning_memmap.sampling.pool import Pool

#: The number of documents for which a batch has room is a multiple of this.
_DOCUMENTS_MULTIPLE = 8
_NO_LIMIT = 2**40
#: The packs of a mixture are this many times those that its first epoch needs.
_MIXTURE_MARGIN = 1.02


def no_token_error(field: str) -> ValueError:
    """Return the error for rows that are all empty."""
    return ValueError(f"Packed: field {field!r} has no token in any of the rows")


def plan_dealt(pool: Pool, seed: int, options: PackOptions, documents: Documents) -> PackedSampler:
    """Make an order whose shards have as many packs as the first epoch needs."""
    draft = PackedSampler(
        pool,
        seed,
        options=options,
        documents=documents,
        num_packs=1,
        max_documents=options.max_documents or _NO_LIMIT,
    )
    needs = draft.needs()
    most = needs.packs_per_group.max()
    if not most:
        raise no_token_error(options.field)
    if options.overflow == "split" and (documents.documents_per_group < most).any():
        documents = documents.halve_longest(np.full_like(needs.packs_per_group, most))
        needs = replace(draft, documents=documents).needs()
    # Shards that need the most packs come first, since the first have one pack more than others.
    by_need = np.lexsort(
        (-documents.tokens_per_group, -documents.drawn_per_group, -needs.packs_per_group)
    )
    pool, documents = documents.reordered(pool, by_need)
    num_packs = _count_packs(needs.packs_per_group, documents.drawn_per_group, options)
    sampler = replace(draft, pool=pool, documents=documents, num_packs=num_packs)
    where = f"num_shards={pool.num_shards}: a shard of the {pool.num_rows} rows"
    check_available(documents.drawn_per_group, sampler.positions_per_shard, options, where)
    return _with_room(sampler, needs.max_documents)


def _count_packs(packs_per_shard: Integers, drawn_per_shard: Integers, options: PackOptions) -> int:
    """Count the packs of all shards, which differ by at most one pack."""
    most = int(packs_per_shard.max())
    num_longest = int(np.count_nonzero(packs_per_shard == most))
    if options.shares is not None:
        # Other epochs draw other documents, which may have more tokens.
        with_margin = math.ceil(_MIXTURE_MARGIN * most) + 1
        most = max(most, min(with_margin, int(drawn_per_shard.min())))
        num_longest = len(packs_per_shard)
    return (most - 1) * len(packs_per_shard) + num_longest


def _with_room(sampler: PackedSampler, max_documents: int) -> PackedSampler:
    """Decide for how many documents batches have room, from the largest pack of epoch 0."""
    options = sampler.options
    if options.split:
        max_documents = int(sampler.packs(0).documents_per_pack.max())
    if options.max_documents is None:
        with_margin = max_documents + max_documents // 4
        room = ceil_div(with_margin, _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE
        return replace(sampler, max_documents=room)
    return sampler


def plan_from_line(
    pool: Pool,
    seed: int,
    options: PackOptions,
    divide_by: Callable[[Integers], tuple[Pool, Documents]],
    num_tokens: int,
    num_rows: int,
    block: int | None,
) -> PackedSampler:
    """Find the fewest packs, equally many in each block, in which the documents of blocks fit.

    Args:
        pool: The pool of all rows.
        seed: Seed of the order.
        options: The options of the packing.
        divide_by: Returns a pool and its documents for the packs of each shard and block.
        num_tokens: Tokens of the packs that the documents of an epoch fill.
        num_rows: Rows of an epoch.
        block: Rows of a shard in a block; None for a single block.
    """
    num_shards = pool.num_shards
    num_packs = max(min(num_shards, num_rows), ceil_div(num_tokens, options.length))
    num_blocks = 1
    if block is not None:
        num_blocks = max(1, min(ceil_div(num_rows, num_shards * block), num_packs // num_shards))
    while True:
        # Packs of a shard in a block.
        size = ceil_div(num_packs, num_shards * num_blocks)
        shuffle_block = None if block is None else size
        packs_per_block = count_packs_per_block(num_packs, num_shards, shuffle_block)
        targets = packs_per_block.ravel()
        divided, documents = divide_by(packs_per_block)
        if options.overflow == "split":
            documents = documents.halve_longest(targets)
        sampler = PackedSampler(
            divided,
            seed,
            options=options,
            documents=documents,
            num_packs=num_packs,
            max_documents=options.max_documents or _NO_LIMIT,
            shuffle_block=shuffle_block,
        )
        needs = sampler.needs()
        if block is None:
            check_available(needs.available, targets, options, f"num_shards={num_shards}: a shard")
        else:
            where = f"shuffle_block={block}, set or computed for streaming: a block of one shard"
            remedy = "set a larger shuffle_block, a smaller num_shards, or split=True"
            check_available(needs.available, targets, options, where, remedy)
        # Other epochs draw other documents, which may need more packs.
        margin = 1 if options.shares is None else _MIXTURE_MARGIN
        excess = int((np.ceil(margin * needs.packs_per_group) - targets).max())
        if excess <= 0:
            return _with_room(sampler, needs.max_documents)
        more = num_shards * num_blocks * (size + excess // 2)
        num_packs = more if more > num_packs else num_shards * num_blocks * (size + 1)
