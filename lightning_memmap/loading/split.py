"""The rows of a split: set up the sources that this process fetches them from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightning_memmap.integers import Integers
from lightning_memmap.loading.decoding import ImageDecoder, Images, image_decoders
from lightning_memmap.loading.memory import (
    SlotMap,
    copy_rows,
    copy_windows,
    map_in_place,
    map_series,
)
from lightning_memmap.loading.packed_batch import PackedSource
from lightning_memmap.loading.row_file import open_row_files
from lightning_memmap.loading.row_source import RowSource
from lightning_memmap.loading.stream import (
    LOOKUP_BYTES,
    Stream,
    max_block_items,
    max_block_time_steps,
)
from lightning_memmap.placement.plan import Residency, SplitShards
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Decode
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import IndexedItems
from lightning_memmap.store.series import make_fields
from lightning_memmap.store.store import PendingRows


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows of one split that this process holds.

    Args:
        pool: The rows of the split.
        sources: The sources that they are fetched from.
        source_of_shard: By shard, the index of its source, or -1 if another process holds it.
        fields: The fields of a batch.
        row_bytes: Bytes of a row, on average if rows differ in length.
        images: The fields that are decoded.
        with_row_numbers: Whether batches contain the dataset rows.
        pending: Rows that are still being built or downloaded, which a loader waits for.
        contents: The identity of the content of the dataset; see `Fields`.
    """

    pool: Pool
    sources: tuple[RowSource, ...]
    source_of_shard: Integers
    fields: Sequence[Field]
    row_bytes: int = 0
    images: Images | None = None
    with_row_numbers: bool = False
    pending: PendingRows | None = None
    contents: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(source.is_released for source in self.sources)

    def release(self) -> None:
        """Free the rows. Loaders over this split return no more batches."""
        for source in self.sources:
            source.release()
        if self.images is not None:
            self.images.release()
        if self.pending is not None:
            self.pending.close()


def load_split(
    store: Store,
    topology: DataTopology,
    shards: SplitShards,
    decode: Mapping[str, Decode] | None = None,
) -> SplitRows:
    """Copy or map the shards of a split as planned.

    Args:
        store: The store of the split.
        topology: The devices of this process.
        shards: The shards, with their residency.
        decode: The fields that are decoded, by name.
    """
    pool = shards.pool
    if isinstance(pool.rows, WindowedRows):
        store = store.completed()
        schema = store.schema.windowed(pool.rows.fields, pool.rows.length)
    else:
        schema = store.schema
    decoders = _make_decoders(store, shards, decode or {})
    held = [shard for shard, residency in enumerate(shards.residencies) if residency is not None]
    stored_shards = _stored_shards(store, pool, held)
    if store.pending is None:
        store.download(stored_shards)
    else:
        store.pending.expect(stored_shards)
    sources, source_of_shard = _make_sources(store, topology, shards)
    row_bytes = sum(
        column.mean_bytes(1) if field.num_variable else field.row_bytes
        for column, field in zip(store.manifest.columns, schema.fields, strict=True)
    )
    return SplitRows(
        pool,
        sources,
        source_of_shard,
        schema.fields,
        row_bytes,
        Images.of(decoders, topology.num_local_processes) if decoders and sources else None,
        pending=store.pending,
        contents=make_fields(store, pool.rows).contents,
    )


def _make_decoders(
    store: Store, shards: SplitShards, decode: Mapping[str, Decode]
) -> dict[int, ImageDecoder]:
    """Make the decoders of encoded images, unless rows are packed or cut into windows."""
    if decode and isinstance(shards.order, PackedSampler):
        raise ValueError(
            f"decode={[*decode]} with sampler=Packed(...): images of packs aren't decoded: leave"
            " decode out, and store the images decoded, or decode the bytes in the transform"
        )
    decoders = image_decoders(store, decode)
    rows = shards.pool.rows
    if decoders and isinstance(rows, WindowedRows):
        raise ValueError(
            f"decode={[*decode]}: windows= cuts field {rows.fields[0]!r}, and images are decoded"
            " for each row of a batch, not for each step of a window. Use one of the two."
        )
    return decoders


def _make_sources(
    store: Store, topology: DataTopology, shards: SplitShards
) -> tuple[tuple[RowSource, ...], Integers]:
    """Make a source for each residency and device, and return the source of each shard with it."""
    groups: dict[tuple[Residency, torch.device], list[int]] = {}
    for held in shards.group_by_device(topology):
        # Rows that are still being written are read from their files.
        residency = held.residency if store.pending is None else Residency.MMAP
        device = held.device if residency is Residency.DEVICE else torch.device("cpu")
        groups.setdefault((residency, device), []).extend(held.shards)
    sources: list[RowSource] = []
    source_of_shard = np.full(shards.pool.num_shards, -1, np.int64)
    for (residency, device), group in groups.items():
        source_of_shard[group] = len(sources)
        source = _make_source(store, shards, residency, device, sorted(group))
        is_packed = isinstance(shards.order, PackedSampler)
        sources.append(PackedSource(source) if is_packed else source)
    return tuple(sources), source_of_shard


def _make_source(
    store: Store, shards: SplitShards, residency: Residency, device: torch.device, held: list[int]
) -> RowSource:
    """Make the source of the held shards that have one residency on one device."""
    pool = shards.pool
    series = map_series(store, pool) if isinstance(pool.rows, WindowedRows) else None
    slot_map = SlotMap.in_store(store, pool) if series is None else series.slot_map(pool)
    columns = [*zip(store.schema.fields, store.mapped_columns, strict=True)]
    if residency is Residency.MMAP or not columns:
        return map_in_place(columns, slot_map, series)
    if residency is not Residency.STREAM:
        if series is None:
            return copy_rows(columns, slot_map, held, device)
        return copy_windows(columns, series, pool, held, device)
    last_row = np.array([store.num_rows - 1])
    num_slots = int(store.memory_rows(last_row)[0]) + 1 if series is None else series.num_slots
    return Stream(
        columns,
        open_row_files(store, () if series is None else series.windows.fields),
        slot_map,
        num_slots,
        held=held,
        blocks=Blocks(shards.order),
        series=series,
    )


def max_block_bytes(store: Store, blocks: Blocks, held: Sequence[int]) -> int:
    """Compute the memory of a block of streamed rows, in bytes. Reads no row."""
    fields = store.schema.fields
    pool = blocks.sampler.pool
    num_rows = len(held) * blocks.max_rows_per_shard
    slot_map = SlotMap.in_store(store, pool)
    is_cut = isinstance(pool.rows, WindowedRows)
    is_looked_up = not blocks.has_runs or not (is_cut or slot_map.starts is not None)
    num_bytes = num_rows * LOOKUP_BYTES if is_looked_up else 0
    if isinstance(pool.rows, WindowedRows):
        step_bytes = sum(field.step_bytes for field in fields if field.name in pool.rows.fields)
        return num_bytes + step_bytes * max_block_time_steps(held, blocks)
    variable = [field.name for field in fields if field.num_variable]
    num_bytes += num_rows * sum(field.row_bytes for field in fields if not field.num_variable)
    # Rows are only streamed once all are written.
    if not variable or store.pending is not None:
        return num_bytes
    store.download(_stored_shards(store, pool, held), variable)
    for column in map(store.column, variable):
        if isinstance(column, IndexedItems):
            num_items = max_block_items(column, slot_map, held, blocks)
            num_bytes += column.field.item_bytes * num_items
    return num_bytes


def _stored_shards(store: Store, pool: Pool, held: Sequence[int]) -> list[int]:
    """List the shards of the store that contain rows of some shards of a split."""
    stored = store.manifest.shards
    is_same = pool.rows == StoreRows(stored) and pool.num_shards == stored.num_shards
    if is_same and pool.chosen is None:
        return [*held]
    if pool.rows.is_contiguous:
        return [*range(stored.num_shards)]
    is_needed = np.zeros(stored.num_shards, bool)
    for shard in held:
        is_needed[pool.shard_dataset_rows(shard) % stored.num_shards] = True
    return [int(shard) for shard in np.flatnonzero(is_needed)]
