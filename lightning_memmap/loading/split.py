"""The rows of a split: every source that this process fetches from, and how they are set up."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning_memmap.loading.decoding import Images, default_threads
from lightning_memmap.loading.image_decoder import image_decoders
from lightning_memmap.loading.memory import (
    copied_rows,
    copied_windows,
    mapped,
    series_in,
)
from lightning_memmap.loading.places import Places
from lightning_memmap.loading.row_file import open_row_files
from lightning_memmap.loading.row_source import RowSource
from lightning_memmap.loading.stream import Stream
from lightning_memmap.loading.stream_layout import StreamLayout
from lightning_memmap.loading.window_sizes import (
    LOOKUP_BYTES,
    largest_of_any,
    largest_window,
    largest_window_steps,
)
from lightning_memmap.placement import DataTopology, Residency, SplitPlacement
from lightning_memmap.sampling import (
    Integers,
    Pool,
    ReadWindows,
    Sampler,
    StoreRows,
    WindowedRows,
)
from lightning_memmap.schema import Form
from lightning_memmap.store import Store
from lightning_memmap.store.columns import Column
from lightning_memmap.store.open_columns import ItemRows, OpenColumn
from lightning_memmap.store.store import Supply

#: A warning is given where less than this share of the bytes read is used.
_LEAST_SHARE = 0.4


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows of one split that this process holds."""

    topology: DataTopology
    pool: Pool
    sources: tuple[RowSource, ...]
    source_of_shard: Integers
    images: Images | None = None
    are_numbered: bool = False
    #: Brings rows that are not there yet.
    supply: Supply | None = None

    def check_order(self, sampler: Sampler) -> None:
        """Check that the rows can be fetched in an order."""
        for source in self.sources:
            source.check_sampler(sampler)

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
        if self.supply is not None:
            self.supply.close()


def load_split(
    store: Store,
    topology: DataTopology,
    placement: SplitPlacement,
    forms: Mapping[str, Form] | None = None,
) -> SplitRows:
    """Bring the shards of a split to where the plan wants them."""
    if isinstance(placement.pool.rows, WindowedRows):
        store = store.whole
    pool, columns = placement.pool, store.manifest.columns
    held = [shard for shard, residency in enumerate(placement.residency) if residency is not None]
    opened = store.provide(None, _stored_shards(store, pool, held))
    maker = _SourceMaker(store, placement, [*columns], opened)
    sources: list[RowSource] = []
    source_of_shard = np.full(pool.num_shards, -1, np.int64)
    for (residency, device), group in _held_together(topology, placement).items():
        source_of_shard[group] = len(sources)
        sources.append(maker.source(residency, device, group))
    # Not from those that have only the rows of this process.
    decoders = image_decoders(columns, store.columns, forms or {})
    if decoders and maker.cut:
        raise ValueError(
            f"variable: field {maker.cut[0]!r} is cut into windows, and images are decoded for"
            " each row of a batch, not for each step of a window: leave one of them out"
        )
    images = None
    if decoders and sources:
        names = [field.name for field in store.schema.fields]
        given = [decoder.form.num_threads for decoder in decoders.values()]
        usual = default_threads(topology.num_local_processes)
        num_threads = max(usual if threads is None else threads for threads in given)
        by_place = {names.index(decoder.field): decoder for decoder in decoders.values()}
        images = Images(by_place, num_threads)
    return SplitRows(topology, pool, tuple(sources), source_of_shard, images, supply=store.supply)


@dataclass(frozen=True)
class _SourceMaker:
    """Makes the sources of a split."""

    store: Store
    placement: SplitPlacement
    columns: list[Column]
    opened: list[OpenColumn]

    @property
    def cut(self) -> tuple[str, ...]:
        """The fields that are cut into windows."""
        rows = self.placement.pool.rows
        return rows.fields if isinstance(rows, WindowedRows) else ()

    def source(self, residency: Residency, device: torch.device, shards: list[int]) -> RowSource:
        """The source of some shards."""
        store, pool = self.store, self.placement.pool
        series = series_in(store, pool) if self.cut else None
        places = Places.in_store(store, pool) if series is None else series.places(pool)
        pairs = [(c.field, rows) for c, rows in zip(self.columns, self.opened, strict=True)]
        if residency is Residency.MMAP or not self.columns:
            return mapped(pairs, places, series)
        if residency is not Residency.STREAM:
            if series is None:
                return copied_rows(pairs, places, shards, device)
            return copied_windows(pairs, series, pool, shards, device)
        windows, last = self.placement.size.windows, np.array([store.num_rows - 1])
        layout = StreamLayout(
            pairs,
            open_row_files(store, self.columns, self.cut),
            places,
            int(places.moved(last)[0]) + 1 if series is None else series.num_slots,
            held=shards,
            windows=windows,
            series=series,
        )
        self._warn_of_waste(layout.share_used(windows), windows)
        return Stream(layout, windows.rows)

    def _warn_of_waste(self, share: float, windows: ReadWindows) -> None:
        """Warn where most of the bytes that are read are not used."""
        if share < _LEAST_SHARE:
            why, remedy = (
                (
                    "of this process",
                    "build a store of these rows alone, or one whose num_shards the data devices"
                    " divide",
                )
                if windows.has_runs
                else (
                    "that the sampler draws",
                    "let it draw more of them in an epoch (num_samples), or use residency='mmap'",
                )
            )
            warnings.warn(
                f"residency='stream': {1 / share:.0f} bytes of the store at {self.store.location}"
                f" are read for each one that is used, since the rows {why} lie apart in its"
                f" files: {remedy}",
                stacklevel=3,
            )


def _held_together(
    topology: DataTopology, placement: SplitPlacement
) -> dict[tuple[Residency, torch.device], list[int]]:
    """The shards that this process holds, by what they have in common: each group has a source."""
    groups: dict[tuple[Residency, torch.device], list[int]] = {}
    for shard, residency in enumerate(placement.residency):
        owner = topology.owner(shard)
        if residency is None or owner is None:
            continue
        is_on_device = residency is Residency.DEVICE
        device = topology.data_devices[owner] if is_on_device else torch.device("cpu")
        groups.setdefault((residency, device), []).append(shard)
    return groups


def largest_window_bytes(store: Store, windows: ReadWindows, held: Sequence[int]) -> int:
    """The memory that rows take which are read window by window. No row is read."""
    fields = store.schema.fields
    pool, rows = windows.sampler.pool, windows.longest
    places, is_cut = Places.in_store(store, pool), isinstance(pool.rows, WindowedRows)
    is_looked_up = not windows.has_runs or not (is_cut or places.starts is not None)
    total = len(held) * rows * LOOKUP_BYTES if is_looked_up else 0
    if isinstance(pool.rows, WindowedRows):
        num_bytes = sum(field.step_bytes for field in fields if field.name in pool.rows.fields)
        return total + num_bytes * largest_window_steps(held, windows)
    variable = [field.name for field in fields if field.num_variable]
    total += len(held) * rows * sum(f.row_bytes for f in fields if not f.num_variable)
    if not variable:
        return total
    largest = largest_window if windows.has_runs else largest_of_any
    for column in store.provide(variable, _stored_shards(store, pool, held)):
        if isinstance(column, ItemRows):
            # An index entry for each row beside its items.
            index_bytes = 8 * (1 + column.field.num_variable) * len(held) * rows
            total += index_bytes + column.field.item_bytes * largest(column, places, held, rows)
    return total


def _stored_shards(store: Store, pool: Pool, held: Sequence[int]) -> list[int]:
    """The shards of the store that have rows of some shards of a split."""
    stored = store.manifest.shards
    is_same = pool.rows == StoreRows(stored) and pool.num_shards == stored.num_shards
    if is_same and pool.chosen is None:
        return [*held]
    if pool.rows.is_lined:
        return [*range(stored.num_shards)]
    found = np.zeros(stored.num_shards, bool)
    for shard in held:
        found[np.asarray(pool.rows_of(shard), np.int64) % stored.num_shards] = True
    return [int(shard) for shard in np.flatnonzero(found)]
