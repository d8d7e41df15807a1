"""The folder of results: committed epochs, and the parts of the epoch under way."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.results.parts import (
    HEADER,
    PartHeader,
    PartWriter,
    RowSlots,
    Written,
    item_type,
    limit_part,
    read_part,
    remove_part,
)
from lightning_memmap.sampling.columns import DatasetIdentity
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.files import read_plain
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.table import write_table
from lightning_memmap.tables import write_atomically

_RUN = "results.json"
_PARTS = "parts"
_EPOCH = re.compile(r"epoch-([0-9]{6,9})")
_MAX_RUN_BYTES = 2**16
#: Positions that are merged at once.
_CHUNK = 2**20


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run that a folder belongs to."""

    format: Literal["lightning_memmap results"] = "lightning_memmap results"
    version: Literal[1] = 1
    run: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    num_rows: Annotated[int, Meta(ge=1, le=2**48)]
    #: The contents of the dataset; see `Fields.contents`.
    dataset: dict[str, str]


class ResultFolder:
    """The results of one run for the rows of one dataset.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self) -> Run | None:
        """Return the run that the folder belongs to; None if it has no results."""
        path = self.path / _RUN
        try:
            data = read_plain(path, _MAX_RUN_BYTES)
            return msgspec.json.decode(data, type=Run)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path} cannot be read: {error}. Choose another path, or remove the folder"
            ) from error

    def check_dataset(self, dataset: DatasetIdentity) -> None:
        """Check that the results, if there are any, belong to a dataset.

        Raises:
            StoreError: They belong to another dataset of the same size.
        """
        run = self.run()
        if run is None or run.num_rows != dataset.num_rows:
            return
        if (difference := dataset.difference(run.dataset)) is not None:
            raise StoreError(
                f"the results in {self.path} belong to another dataset of {run.num_rows} rows:"
                f" {difference!r} was {run.dataset[difference]}, and is"
                f" {dataset.contents[difference]}. Use results for this dataset. If its rows are"
                " still those of the results, pass the values instead:"
                f" read_row_results({str(self.path)!r})[key]"
            )

    def epochs(self) -> list[int]:
        """List the committed epochs, in order."""
        paths = self.path.iterdir() if self.path.is_dir() else iter(())
        names = [_EPOCH.fullmatch(path.name) for path in paths if is_store(path)]
        return sorted(int(name[1]) for name in names if name)

    def epoch_path(self, epoch: int) -> Path:
        """Return the path of the store of an epoch."""
        return self.path / _epoch_name(epoch)

    def open_epoch(self, epoch: int) -> Store:
        """Open the store of a committed epoch, and check that it has results.

        Raises:
            StoreError: The store is damaged, or has other rows or another structure.
        """
        run = self.run()
        store = open_directory(self.epoch_path(epoch))
        fields = store.schema.fields
        values = value_fields(store.schema)
        is_ours = run is not None and len(store) == run.num_rows and store.num_shards == 1
        if not is_ours or not values or store.schema.structure != schema_of(values).structure:
            raise StoreError(
                f"{store.path} has {len(store)} rows of {', '.join(f.name for f in fields)}, which"
                f" are not the results of a run in {self.path}"
            )
        return store

    def claim(self, run: Run, *, overwrite: bool) -> None:
        """Make this the folder of a run.

        Raises:
            StoreError: It belongs to another run, and ``overwrite`` is not set.
        """
        for partial in self.path.glob(f".{_RUN}.*"):  # A killed process left it.
            partial.unlink(missing_ok=True)
        old = self.run()
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file: choose another path")
        if old is None and self.path.is_dir() and any(self.path.iterdir()):
            raise StoreError(f"{self.path} exists and has no results: choose another path")
        if old is not None and old.run == run.run:
            if old.num_rows != run.num_rows:
                raise StoreError(
                    f"{self.path} has results for a dataset of {old.num_rows} rows, and the run now"
                    f" has {run.num_rows}: choose another path"
                )
            self.check_dataset(DatasetIdentity(run.num_rows, run.dataset))
        elif old is not None:
            if self.epochs() and not overwrite:
                raise StoreError(
                    f"{self.path} has the results of another run: choose another path, or replace"
                    " them with overwrite=True"
                )
            for epoch in self.epochs():
                self._remove_epoch(epoch)
            shutil.rmtree(self.path / _PARTS, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / _RUN, msgspec.json.encode(run))

    def rewind(self, run: str, order: Sampler, epoch: int, position: int, part_prefix: str) -> None:
        """Return to the results that the run had at a position of an epoch, where it continues.

        Args:
            run: The run.
            order: The order.
            epoch: The epoch.
            position: The first position from which values are computed again.
            part_prefix: The prefix of the names of the parts that the run is writing now.

        Raises:
            StoreError: Another run has replaced the results.
        """
        self._check_owner(run)
        for later in self.epochs():
            if later == epoch and position:
                self._turn_into_part(run, order, epoch, position, part_prefix)
            if later >= epoch:
                self._remove_epoch(later)
        self.finish(run, order, epoch)
        for parts_epoch, directory in self._epochs_with_parts():
            if parts_epoch > epoch:
                shutil.rmtree(directory)
            else:
                for part in _list_parts(directory):
                    if not part.name.startswith(part_prefix):
                        limit_part(part, position)

    def finish(self, run: str, order: Sampler, epoch: int) -> None:
        """Commit the epochs before this one whose last step was the last that the run has done."""
        for parts_epoch, directory in self._epochs_with_parts():
            if parts_epoch < epoch:
                if not is_store(self.epoch_path(parts_epoch)):
                    self.commit(run, order, parts_epoch)
                shutil.rmtree(directory, ignore_errors=True)

    def new_part(self, epoch: int, name: str, header: PartHeader) -> PartWriter:
        """Create the part of one process."""
        return PartWriter(self._parts(epoch) / name, header)

    def commit(
        self, run: str, order: Sampler, epoch: int, part_prefix: str = "", **source: str
    ) -> bool:
        """Merge the parts of an epoch into its store, and remove them.

        A row that was drawn more than once has the value of its last position.

        Args:
            run: The run.
            order: The order.
            epoch: The epoch.
            part_prefix: Merge only parts whose names have this prefix.
            **source: Further values of the store's source.

        Returns:
            Whether there was any part.

        Raises:
            StoreError: Parts have different fields, or cannot be read; or another run has replaced
                the results.
        """
        self._check_owner(run)
        digest = digest_of(order)
        parts = []
        for directory in _list_parts(self._parts(epoch)):
            if directory.name.startswith(part_prefix):
                header = PartHeader.read(directory)
                # Another order would assign the values to other rows.
                if (header.run, header.order) == (run, digest):
                    parts.append((directory, header))
        if not parts:
            return False
        fields = parts[0][1].fields
        for directory, header in parts:
            if header.fields != fields:
                theirs = [
                    ", ".join(f"{f.name} {f}" for f in names) for names in (fields, header.fields)
                ]
                raise StoreError(
                    f"the processes have results of different fields: {theirs[0]}, and"
                    f" {theirs[1]} in {directory}"
                )
        num_rows = order.pool.rows.num_dataset_rows
        columns = [_empty_column(field, num_rows) for field in fields]
        is_seen = np.zeros(num_rows, np.bool_)
        for rows, values in _by_chunks(parts, order):
            is_seen[rows] = True
            for column, items in zip(columns, values, strict=True):
                # numpy assigns the last of several values of a row.
                column[rows] = items
        mask = torch.from_numpy(is_seen)
        table = []
        for field, column in zip(fields, columns, strict=True):
            table += [_as_tensor(column, field), mask]
        source |= {"run": run, "epoch": str(epoch), "seen": str(np.count_nonzero(is_seen))}
        write_table(self.epoch_path(epoch), schema_of(fields), table, **source)
        shutil.rmtree(self._parts(epoch))
        return True

    def _check_owner(self, run: str) -> None:
        """Check that no other run has claimed the folder since this one began."""
        owner = self.run()
        if owner is None or owner.run != run:
            raise StoreError(
                f"{self.path}: another run has replaced or removed the results of this one: use"
                " another path for each run"
            )

    def _turn_into_part(
        self, run: str, order: Sampler, epoch: int, position: int, part_prefix: str
    ) -> None:
        """Turn the values of a committed epoch, up to a position, into a part."""
        # Parts that have been merged, or are copied again after a kill.
        for directory in _subdirectories(self._parts(epoch)):
            if not directory.name.startswith(part_prefix):
                remove_part(directory)
        store = self.open_epoch(epoch)
        fields = value_fields(store.schema)
        _, rows = RowSlots(order, epoch, 0, 1).positions_and_rows(0, position)
        header = PartHeader(
            run=run,
            order=digest_of(order),
            order_epoch=epoch,
            rank=0,
            size=1,
            start=0,
            stop=position,
            fields=fields,
        )
        with closing(self.new_part(epoch, "committed", header)) as part:
            data = store.read(rows)
            is_seen = data[1].data.numpy()
            stops = np.flatnonzero(np.diff(is_seen, append=not is_seen[-1])) + 1
            first = 0
            for stop in stops.tolist():
                if is_seen[first]:
                    part.write(first, stop - first, [v.data[first:stop] for v in data[::2]])
                first = stop

    def _parts(self, epoch: int) -> Path:
        return self.path / _PARTS / _epoch_name(epoch)

    def _epochs_with_parts(self) -> list[tuple[int, Path]]:
        paths = _subdirectories(self.path / _PARTS)
        names = [(_EPOCH.fullmatch(path.name), path) for path in paths]
        return [(int(name[1]), path) for name, path in names if name]

    def _remove_epoch(self, epoch: int) -> None:
        # The manifest first: without it there is no store.
        (self.epoch_path(epoch) / "manifest.json").unlink()
        shutil.rmtree(self.epoch_path(epoch))


def digest_of(order: Sampler) -> str:
    """Return a digest of what identifies an order."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(order.identity, order="sorted"))


@lru_cache(maxsize=16)
def schema_of(fields: tuple[Field, ...]) -> Schema:
    """Return the schema of the store of an epoch: a dict with a value or None for each field."""
    present = {f.name: torch.zeros(f.item_shape, dtype=f.dtype, device="cpu") for f in fields}
    return Schema.infer([present, dict.fromkeys(present)])


def value_fields(schema: Schema) -> tuple[Field, ...]:
    """Return the fields of results, without their masks."""
    return tuple(schema.fields[::2])


def _epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}"


def _subdirectories(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.is_symlink())


def _list_parts(path: Path) -> list[Path]:
    """List the parts of an epoch. A process that is killed may leave one without a header."""
    return [child for child in _subdirectories(path) if (child / HEADER).exists()]


def _empty_column(field: Field, num_rows: int) -> NDArray[np.void]:
    """Return a column of NaN, or of 0 if its dtype has no NaN, as raw bytes of shape (rows,)."""
    is_float = field.dtype.is_floating_point or field.dtype.is_complex
    fill = torch.full(field.item_shape, float("nan") if is_float else 0, dtype=field.dtype)
    item = fill.reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.full(num_rows, np.frombuffer(item, item_type(field))[0], item_type(field))


def _as_tensor(items: NDArray[np.void], field: Field) -> Tensor:
    data = torch.from_numpy(items.view(np.uint8))
    return data.view(field.dtype).view(len(items), *field.item_shape)


def _by_chunks(
    parts: Sequence[tuple[Path, PartHeader]], order: Sampler
) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.void]]]]:
    """Yield dataset rows and their values, in the order of positions."""
    slots = [RowSlots(order, h.order_epoch, h.rank, h.size) for _, h in parts]
    for start in range(0, order.num_positions, _CHUNK):
        stop = min(start + _CHUNK, order.num_positions)
        written = [
            read_part(directory, header, part_slots, start, stop)
            for (directory, header), part_slots in zip(parts, slots, strict=True)
        ]
        if len(written) == 1:
            yield written[0].rows, written[0].values
            continue
        positions = np.concatenate([part.positions for part in written])
        rows = np.concatenate([part.rows for part in written])
        by_position = np.argsort(positions, kind="stable")
        values = _concatenated(written)
        yield rows[by_position], [items[by_position] for items in values]


def _concatenated(written: Sequence[Written]) -> list[NDArray[np.void]]:
    columns: Any = zip(*(part.values for part in written), strict=True)
    return [np.concatenate(items) for items in columns]
