"""The rows of a split: every source that this process fetches from, and how they are set up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning_memmap.loading.decoding import Images, default_threads
from lightning_memmap.loading.image_decoder import image_decoders
from lightning_memmap.loading.memory import (
    Places,
    copied_rows,
    copied_windows,
    mapped,
    series_in,
)
from lightning_memmap.loading.row_file import open_row_files
from lightning_memmap.loading.row_source import RowSource
from lightning_memmap.loading.stream import (
    LOOKUP_BYTES,
    Stream,
    largest_block,
    largest_block_steps,
)
from lightning_memmap.placement.plan import Residency, SplitShards
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Form
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import ItemRows
from lightning_memmap.store.store import PendingRows


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows of one split that this process holds."""

    pool: Pool
    sources: tuple[RowSource, ...]
    source_of_shard: Integers
    #: The fields as batches have them, and the bytes of a row, on average where rows differ.
    fields: Sequence[Field]
    row_bytes: int = 0
    images: Images | None = None
    are_numbered: bool = False
    #: Rows that are still being built or downloaded, which the loader waits for.
    pending: PendingRows | None = None

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(source.is_released for source in self.sources)

    def release(self) -> None:
        """Free the rows. Loaders over this split give no more batches then."""
        for source in self.sources:
            source.release()
        if self.images is not None:
            self.images.release()
        if self.pending is not None:
            self.pending.close()


def load_split(
    store: Store,
    topology: DataTopology,
    placement: SplitShards,
    forms: Mapping[str, Form] | None = None,
) -> SplitRows:
    """Bring the shards of a split to where the plan wants them."""
    pool = placement.pool
    cut = pool.rows.fields if isinstance(pool.rows, WindowedRows) else ()
    if cut:
        store = store.completed()
    decoders = image_decoders(store, forms or {})
    if decoders and cut:
        raise ValueError(
            f"variable: field {cut[0]!r} is cut into windows, and images are decoded for"
            " each row of a batch, not for each step of a window: leave one of them out"
        )
    held = [shard for shard, residency in enumerate(placement.residencies) if residency is not None]
    shards = _stored_shards(store, pool, held)
    if store.pending is None:
        store.download(shards)
    else:
        store.pending.expect(shards)
    sources: list[RowSource] = []
    source_of_shard = np.full(pool.num_shards, -1, np.int64)
    groups = dict[tuple[Residency, torch.device], list[int]]()
    for each in placement.held(topology):
        # Rows that are still being written are read from their files.
        residency = each.residency if store.pending is None else Residency.MMAP
        device = each.device if residency is Residency.DEVICE else torch.device("cpu")
        groups.setdefault((residency, device), []).extend(each.shards)
    for (residency, device), unsorted in groups.items():
        group = sorted(unsorted)
        source_of_shard[group] = len(sources)
        sources.append(_source(store, placement, residency, device, group))
    images = None
    if decoders and sources:
        given = [decoder.form.num_threads for decoder in decoders.values()]
        usual = default_threads(topology.num_local_processes)
        num_threads = max(usual if threads is None else threads for threads in given)
        images = Images(decoders, num_threads)
    fields, row_bytes = list[Field](), 0
    for column in store.manifest.columns:
        field = column.field
        if isinstance(pool.rows, WindowedRows) and field.name in cut:
            field = field.windowed(pool.rows.length)
        fields.append(field)
        row_bytes += column.mean_bytes(1) if field.num_variable else field.row_bytes
    return SplitRows(
        pool,
        tuple(sources),
        source_of_shard,
        fields,
        row_bytes,
        images,
        pending=store.pending,
    )


def _source(
    store: Store,
    placement: SplitShards,
    residency: Residency,
    device: torch.device,
    shards: list[int],
) -> RowSource:
    """The source of some shards."""
    pool = placement.pool
    series = series_in(store, pool) if isinstance(pool.rows, WindowedRows) else None
    places = Places.in_store(store, pool) if series is None else series.places(pool)
    columns = [*zip(store.schema.fields, store.mapped_columns, strict=True)]
    if residency is Residency.MMAP or not columns:
        return mapped(columns, places, series)
    if residency is not Residency.STREAM:
        if series is None:
            return copied_rows(columns, places, shards, device)
        return copied_windows(columns, series, pool, shards, device)
    last = np.array([store.num_rows - 1])
    return Stream(
        columns,
        open_row_files(store, () if series is None else series.line.fields),
        places,
        int(places.moved(last)[0]) + 1 if series is None else series.num_slots,
        held=shards,
        blocks=Blocks(placement.order),
        series=series,
    )


def largest_block_bytes(store: Store, blocks: Blocks, held: Sequence[int]) -> int:
    """The memory that rows take which are read block by block. No row is read."""
    fields = store.schema.fields
    pool, rows = blocks.sampler.pool, blocks.longest
    places, is_cut = Places.in_store(store, pool), isinstance(pool.rows, WindowedRows)
    is_looked_up = not blocks.has_runs or not (is_cut or places.starts is not None)
    total = len(held) * rows * LOOKUP_BYTES if is_looked_up else 0
    if isinstance(pool.rows, WindowedRows):
        num_bytes = sum(field.step_bytes for field in fields if field.name in pool.rows.fields)
        return total + num_bytes * largest_block_steps(held, blocks)
    variable = [field.name for field in fields if field.num_variable]
    total += len(held) * rows * sum(f.row_bytes for f in fields if not f.num_variable)
    # Rows are only streamed once all are written.
    if not variable or store.pending is not None:
        return total
    store.download(_stored_shards(store, pool, held), variable)
    for column in map(store.column, variable):
        if isinstance(column, ItemRows):
            total += column.field.item_bytes * largest_block(column, places, held, blocks)
    return total


def _stored_shards(store: Store, pool: Pool, held: Sequence[int]) -> list[int]:
    """The shards of the store that have rows of some shards of a split."""
    stored = store.manifest.shards
    is_same = pool.rows == StoreRows(stored) and pool.num_shards == stored.num_shards
    if is_same and pool.chosen is None:
        return [*held]
    if pool.rows.is_contiguous:
        return [*range(stored.num_shards)]
    found = np.zeros(stored.num_shards, bool)
    for shard in held:
        found[pool.shard_dataset_rows(shard) % stored.num_shards] = True
    return [int(shard) for shard in np.flatnonzero(found)]
