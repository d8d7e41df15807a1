"""The rows of a run: their hashes, and what a ``DataLoader`` and the store give of them.

Hashes add up from data devices to processes to the global batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, default_collate

from lightning_memmap.compare.memory import batches_of
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import has_several
from lightning_memmap.loading import FormedCollate, Padded, RowList
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.transform import DeviceTransform, takes_generator
from lightning_memmap.loading.variable_rows import VariableRows, rows_in_memory
from lightning_memmap.sampling import BatchSchedule, Rows, Sampler, WindowedRows
from lightning_memmap.schema import Field, Form
from lightning_memmap.store import Store
from lightning_memmap.store.sources.stream import is_stream

MODULUS = 2**64


def hash_rows(leaves: Sequence[Tensor | list[Tensor]]) -> int:
    """Sum, modulo 2**64, the XXH3 of each row over the bytes of all its leaves."""
    columns: list[Any] = [
        [_bytes(row[None])[0] for row in leaf] if isinstance(leaf, list) else _bytes(leaf)
        for leaf in leaves
        if isinstance(leaf, list) or leaf.numel()
    ]
    total = 0
    for row in range(len(columns[0]) if columns else 0):
        digest = xxhash.xxh3_64()
        for column in columns:
            digest.update(column[row].data)
        total += digest.intdigest()
    return total % MODULUS


def _bytes(leaf: Tensor) -> np.ndarray:
    plain = leaf.detach().cpu().as_subclass(Tensor).contiguous()
    # A row may be empty.
    flat: np.ndarray = plain.view(len(plain), plain[0].numel()).view(torch.uint8).numpy()
    return flat


def leaves_of(batch: Any) -> list[Tensor | list[Tensor]]:
    """The leaves of a batch that have rows, as `hash_rows` takes them, without padding."""
    found = list[Tensor | list[Tensor]]()
    for _, leaf in named_leaves(batch, whole=(Padded,)):
        if isinstance(leaf, Padded):
            found.append(leaf.rows())
        elif isinstance(leaf, RowList):
            found.append([_tensor(row) for row in leaf])
        elif isinstance(leaf, Tensor) and leaf.ndim:
            found.append(list(leaf.unbind()) if leaf.is_nested else leaf)
    return found


def _tensor(row: Tensor | str | bytes) -> Tensor:
    if isinstance(row, Tensor):
        return row
    data = row.encode("utf-8", "surrogatepass") if isinstance(row, str) else row
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def hash_batch(batch: Any) -> int:
    """Hash the rows of a batch, or of all batches of a super-batch together, by `hash_rows`."""
    return sum(hash_rows(leaves_of(part)) for part in batches_of(batch)) % MODULUS


class HashedTransform(nn.Module):
    """A batch transform that appends the hash of its rows to a list before it changes them."""

    def __init__(self, transform: Callable[..., Any], hashes: list[int]) -> None:
        super().__init__()
        # As an attribute, a module is copied to the data device with this one.
        self.transform = transform
        self._note = hashes.append
        self._takes_generator = takes_generator(transform)

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        """Record the hash of the rows, and transform them."""
        self._note(hash_batch(batch))
        if self._takes_generator:
            return self.transform(batch, generator=generator)
        return self.transform(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HashedTransform":
        # All copies, one for each data device, append to one list.
        other = HashedTransform(copy.deepcopy(self.transform, memo), [])
        other._note = self._note
        return other


class _Row(NamedTuple):
    """A row in the tensors and arrays of its fields, and its sample, whose classes a batch has."""

    leaves: Sequence[Tensor | np.ndarray]
    sample: Any


def plain_samples(data: MemmapDataModule, store: Store) -> Any:
    """The training samples of a data module; the store, where they cannot be looked up."""
    given = data.datasets["train"]
    several = [*given.values()] if has_several(given) else [given]
    if any(dataset is None or is_stream(dataset) for dataset in several):
        return store
    return ConcatDataset(several) if has_several(given) else given


class PlainRows:
    """The rows of an order one by one: samples, or where they are stored or windows, a `_Row`."""

    def __init__(self, samples: Any, store: Store, rows: Rows) -> None:
        self._samples, self._store = samples, store
        self._windows = rows if isinstance(rows, WindowedRows) else None

    def __getitem__(self, row: int) -> Any:
        store, windows = self._store, self._windows
        if windows is None:
            return (
                _Row(store_leaves(store, row), None)
                if self._samples is store
                else self._samples[row]
            )
        series, numbers = (int(each[0]) for each in windows.numbered(np.array([row])))
        sample = None if self._samples is store else self._samples[series]
        leaves = store_leaves(store, series) if sample is None else store.schema.flatten(sample)
        steps = slice(numbers * windows.stride, numbers * windows.stride + windows.length)
        fields = zip(store.schema.fields, leaves, strict=True)
        cut = [leaf[steps] if field.name in windows.fields else leaf for field, leaf in fields]
        return _Row(cut, sample)


def store_leaves(store: Store, row: int) -> list[Tensor]:
    """The fields of a row of a store."""
    return [column.row(row) for column in store.columns]


class PlainCollate:
    """``default_collate``, and then the batch transform, where a worker process does both."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        forms: Mapping[str, Form],
        transform: Callable[..., Any] | None,
    ) -> None:
        self._schema, self._forms = store.schema, dict(forms)
        windows = rows if isinstance(rows, WindowedRows) else None
        self._fields = [
            field.windowed(windows.length) if windows and field.name in windows.fields else field
            for field in store.schema.fields
        ]
        self._is_plain = not any(field.num_variable for field in self._fields)
        self._build: Collate | None = None
        cpu = torch.device("cpu")
        self._transform = None if transform is None else DeviceTransform(transform, cpu)

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch, on the CPU, of items of `PlainRows`."""
        batch = self._collate(samples)
        if self._transform is None:
            return batch
        return self._transform(batch, int(torch.randint(2**62, ())))

    def _collate(self, samples: list[Any]) -> Any:
        rows: list[_Row] = samples
        if not isinstance(samples[0], _Row):
            if self._build is None and self._is_plain:
                with suppress(TypeError):
                    return default_collate(samples)
            rows = [_Row(self._schema.flatten(sample), sample) for sample in samples]
        if self._build is None:
            # Not before a worker has a sample at hand: reading one before the workers are forked
            # would make them share the files that it opens.
            self._build = FormedCollate(self._schema, self._forms, rows[0].sample)
        columns = zip(self._fields, zip(*(row.leaves for row in rows), strict=True), strict=True)
        return self._build([_stack(field, column) for field, column in columns])


def expected_hashes(
    store: Store,
    sampler: Sampler,
    schedule: BatchSchedule,
    num_steps: int,
    forms: Mapping[str, Form],
) -> list[int]:
    """The hash of each global batch from the first epoch on, which every variant must match."""
    rows = PlainRows(store, store, sampler.pool.rows)
    collate = PlainCollate(store, sampler.pool.rows, forms, None)

    def expected(index: int) -> int:
        epoch, step = divmod(index, len(schedule))
        numbers = sampler.dataset_rows(epoch, range(*schedule.bounds(step)))
        return hash_batch(collate([rows[row] for row in numbers.tolist()]))

    return [expected(index) for index in range(num_steps)]


def _stack(field: Field, rows: tuple[Any, ...]) -> Tensor | VariableRows:
    if field.num_variable:
        tensors = (row if isinstance(row, Tensor) else torch.from_numpy(row.copy()) for row in rows)
        return rows_in_memory(field, list(tensors))
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return torch.from_numpy(np.stack(rows))
