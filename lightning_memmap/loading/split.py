"""The rows of a split: set up the sources that this process fetches them from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightning_memmap.integers import Integers
from lightning_memmap.loading.decoding import Images, default_threads, image_decoders
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
    largest_block,
    largest_block_steps,
)
from lightning_memmap.placement.plan import Residency, SplitShards
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.packed import PackedSampler
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Decode
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import ItemRows
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
        are_numbered: Whether batches contain the dataset rows.
        pending: Rows that are still being built or downloaded, which a loader waits for.
        contents: The identity of the content of the dataset; see `Fields`.
    """

    pool: Pool
    sources: tuple[RowSource, ...]
    source_of_shard: Integers
    fields: Sequence[Field]
    row_bytes: int = 0
    images: Images | None = None
    are_numbered: bool = False
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
    placement: SplitShards,
    decode: Mapping[str, Decode] | None = None,
) -> SplitRows:
    """Copy or map the shards of a split as planned.

    Args:
        store: The store of the split.
        topology: The devices of this process.
        placement: The residency of each shard.
        decode: The fields that are decoded, by name.
    """
    pool = placement.pool
    cut = pool.rows.fields if isinstance(pool.rows, WindowedRows) else ()
    if cut:
        store = store.completed()
    if decode and isinstance(placement.order, PackedSampler):
        raise ValueError(
            f"decode={[*decode]} with sampler=Packed(...): images of packs aren't decoded: leave"
            " decode out, and store the images decoded, or decode the bytes in the transform"
        )
    decoders = image_decoders(store, decode or {})
    if decoders and cut:
        raise ValueError(
            f"decode={[*(decode or ())]}: windows= cuts field {cut[0]!r}, and images are decoded"
            " for each row of a batch, not for each step of a window. Use one of the two."
        )
    held = [shard for shard, residency in enumerate(placement.residencies) if residency is not None]
    shards = _stored_shards(store, pool, held)
    if store.pending is None:
        store.download(shards)
    else:
        store.pending.expect(shards)
    sources: list[RowSource] = []
    source_of_shard = np.full(pool.num_shards, -1, np.int64)
    groups: dict[tuple[Residency, torch.device], list[int]] = {}
    for shards_held in placement.held(topology):
        # Rows that are still being written are read from their files.
        residency = shards_held.residency if store.pending is None else Residency.MMAP
        is_on_device = residency is Residency.DEVICE
        device = shards_held.device if is_on_device else torch.device("cpu")
        groups.setdefault((residency, device), []).extend(shards_held.shards)
    for (residency, device), unsorted in groups.items():
        group = sorted(unsorted)
        source_of_shard[group] = len(sources)
        source = _make_source(store, placement, residency, device, group)
        is_packed = isinstance(placement.order, PackedSampler)
        sources.append(PackedSource(source) if is_packed else source)
    images = None
    if decoders and sources:
        default = default_threads(topology.num_local_processes)
        options = [decoder.form.num_threads for decoder in decoders.values()]
        images = Images(decoders, max(default if count is None else count for count in options))
    schema = store.schema
    if isinstance(pool.rows, WindowedRows):
        schema = schema.windowed(pool.rows.fields, pool.rows.length)
    row_bytes = sum(
        column.mean_bytes(1) if field.num_variable else field.row_bytes
        for column, field in zip(store.manifest.columns, schema.fields, strict=True)
    )
    return SplitRows(
        pool,
        tuple(sources),
        source_of_shard,
        schema.fields,
        row_bytes,
        images,
        pending=store.pending,
        contents=make_fields(store, pool.rows).contents,
    )


def _make_source(
    store: Store,
    placement: SplitShards,
    residency: Residency,
    device: torch.device,
    shards: list[int],
) -> RowSource:
    """Make the source of shards that have one residency on one device."""
    pool = placement.pool
    series = map_series(store, pool) if isinstance(pool.rows, WindowedRows) else None
    slot_map = SlotMap.in_store(store, pool) if series is None else series.slot_map(pool)
    columns = [*zip(store.schema.fields, store.mapped_columns, strict=True)]
    if residency is Residency.MMAP or not columns:
        return map_in_place(columns, slot_map, series)
    if residency is not Residency.STREAM:
        if series is None:
            return copy_rows(columns, slot_map, shards, device)
        return copy_windows(columns, series, pool, shards, device)
    last_row = np.array([store.num_rows - 1])
    num_slots = int(store.in_memory(last_row)[0]) + 1 if series is None else series.num_slots
    return Stream(
        columns,
        open_row_files(store, () if series is None else series.windows.fields),
        slot_map,
        num_slots,
        held=shards,
        blocks=Blocks(placement.order),
        series=series,
    )


def largest_block_bytes(store: Store, blocks: Blocks, held: Sequence[int]) -> int:
    """Compute the memory of a block of streamed rows, in bytes. Reads no row."""
    fields = store.schema.fields
    pool = blocks.sampler.pool
    num_rows = len(held) * blocks.longest
    slot_map = SlotMap.in_store(store, pool)
    is_cut = isinstance(pool.rows, WindowedRows)
    is_looked_up = not blocks.has_runs or not (is_cut or slot_map.starts is not None)
    num_bytes = num_rows * LOOKUP_BYTES if is_looked_up else 0
    if isinstance(pool.rows, WindowedRows):
        step_bytes = sum(field.step_bytes for field in fields if field.name in pool.rows.fields)
        return num_bytes + step_bytes * largest_block_steps(held, blocks)
    variable = [field.name for field in fields if field.num_variable]
    num_bytes += num_rows * sum(field.row_bytes for field in fields if not field.num_variable)
    # Rows are only streamed once all are written.
    if not variable or store.pending is not None:
        return num_bytes
    store.download(_stored_shards(store, pool, held), variable)
    for column in map(store.column, variable):
        if isinstance(column, ItemRows):
            num_items = largest_block(column, slot_map, held, blocks)
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
