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

from lightning_memmap.callbacks.memory_trace import batches_of
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import has_several
from lightning_memmap.loading import FormedCollate, Padded, RowList
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.split import image_decoders
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.transform import DeviceTransform, takes_generator
from lightning_memmap.loading.variable_rows import VariableRows, rows_in_memory
from lightning_memmap.sampling import Integers, Rows, WindowedRows
from lightning_memmap.schema import Field, Form
from lightning_memmap.store import Store
from lightning_memmap.store.sources.stream import is_stream

MODULUS = 2**64


def hash_rows(leaves: Sequence[Tensor | list[Tensor]]) -> int:
    """Sum, modulo 2**64, the XXH3 of each row over the bytes of all its leaves.

    The sum does not depend on the order of rows, and the sums of two halves of a batch add up to
    that of the batch. A row that is repeated or missing changes it.

    Args:
        leaves: Tensors of shape (B, ...), on any device, or where rows differ in length, lists of
            ``B`` tensors.

    Returns:
        The sum; 0 where there are no bytes.
    """
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
    """List the leaves of a batch that have rows, in the order of its containers.

    Args:
        batch: Any nesting of tensors; those without dimensions are left out.

    Returns:
        The tensors, each of shape (B, ...), on the device that they were on; for rows that differ
        in length, a list of them, without their padding.
    """
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
    """Hash the rows of a batch, or of all batches of a super-batch together, by `hash_rows`.

    Args:
        batch: What a loader yields or a model is given.

    Returns:
        The sum of the hashes of all rows, modulo `MODULUS`.
    """
    return sum(hash_rows(leaves_of(part)) for part in batches_of(batch)) % MODULUS


class HashedTransform(nn.Module):
    """A batch transform that records the hash of its rows before it changes them.

    Args:
        transform: The transform to apply.
        hashes: The hash of each call is appended to this list.
    """

    def __init__(self, transform: Callable[..., Any], hashes: list[int]) -> None:
        super().__init__()
        # As an attribute, a module is copied to the data device with this one.
        self.transform = transform
        self._note = hashes.append
        self._takes_generator = takes_generator(transform)

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        """Record the hash of the rows, and transform them.

        Args:
            batch: A batch of one data device.
            generator: Random generator on the batch's device; passed on to a transform that takes
                it.
        """
        self._note(hash_batch(batch))
        if self._takes_generator:
            return self.transform(batch, generator=generator)
        return self.transform(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HashedTransform":
        # All copies, one for each data device, append to one list.
        other = HashedTransform(copy.deepcopy(self.transform, memo), [])
        other._note = self._note
        return other


class _Window(NamedTuple):
    """A window over a series."""

    series: Any
    """The sample that it is cut from."""
    begin: int
    """The step of the series at which it begins."""


class PlainRows:
    """The training rows of a data module one by one: item ``i`` is row ``i`` of its order.

    That is a sample of the dataset, of one of several datasets that are mixed, or a window that
    `PlainCollate` cuts. Where a dataset is not given, or can only be iterated over, the rows are
    read from the store. The class is none of torch's ``Dataset``, which help texts list to choose
    from.

    Args:
        data: The data module.
        store: Its training store.
        rows: The rows of its order.
    """

    def __init__(self, data: MemmapDataModule, store: Store, rows: Rows) -> None:
        given = data.datasets["train"]
        several = [*given.values()] if has_several(given) else [given]
        if any(dataset is None or is_stream(dataset) for dataset in several):
            self._samples: Any = store
        else:
            self._samples = ConcatDataset(several) if has_several(given) else given
        self._windows = rows if isinstance(rows, WindowedRows) else None

    def __getitem__(self, row: int) -> Any:
        if self._windows is None:
            return self._samples[row]
        series, windows = self._windows.numbered(np.array([row]))
        return _Window(self._samples[int(series[0])], int(windows[0]) * self._windows.stride)


class PlainCollate:
    """``default_collate``, and then the batch transform, where a worker process does both.

    Samples that ``default_collate`` does not take, such as PIL images and dataclasses, become the
    tensors that the store has of them. Fields whose rows differ in length have the form that they
    have in batches of the store, and windows are cut out of their series.

    Args:
        store: The training store.
        rows: The rows of the order.
        forms: How batches give fields, by name.
        transform: The batch transform; None for none.
    """

    def __init__(
        self,
        store: Store,
        rows: Rows,
        forms: Mapping[str, Form],
        transform: Callable[..., Any] | None,
    ) -> None:
        self._schema, self._forms = store.schema, dict(forms)
        self._windows = rows if isinstance(rows, WindowedRows) else None
        self._fields = [_batched(field, rows) for field in store.schema.fields]
        self._is_plain = self._windows is None and not any(f.num_variable for f in self._fields)
        self._build: Collate | None = None
        cpu = torch.device("cpu")
        self._transform = None if transform is None else DeviceTransform(transform, cpu)

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch.

        Args:
            samples: Items of `PlainRows`.

        Returns:
            The batch, on the CPU.
        """
        batch = self._collate(samples)
        if self._transform is None:
            return batch
        return self._transform(batch, int(torch.randint(2**62, ())))

    def _collate(self, samples: list[Any]) -> Any:
        if self._build is None:
            if self._is_plain:
                with suppress(TypeError):
                    return default_collate(samples)
            # Not before a worker has a sample at hand: reading one before the workers are forked
            # would make them share the files that it opens.
            first = samples[0].series if isinstance(samples[0], _Window) else samples[0]
            self._build = FormedCollate(self._schema, self._forms, first)
        columns = zip(*map(self._leaves, samples), strict=True)
        pairs = zip(self._fields, columns, strict=True)
        return self._build([_stack(field, column) for field, column in pairs])

    def _leaves(self, sample: Any) -> list[Tensor]:
        if self._windows is None:
            return self._schema.flatten(sample)
        steps = slice(sample.begin, sample.begin + self._windows.length)
        return [
            leaf[steps] if field.name in self._windows.fields else leaf
            for field, leaf in zip(
                self._schema.fields, self._schema.flatten(sample.series), strict=True
            )
        ]


def stored_leaves(
    store: Store, rows: Rows, forms: Mapping[str, Form]
) -> Callable[[Integers], list[Tensor | list[Tensor]]]:
    """What reads rows of an order from the store, without a loader.

    Args:
        store: The store.
        rows: The rows of the order.
        forms: How batches give fields, by name: encoded images are decoded.

    Returns:
        A function of rows, int64 of shape (B,), that returns the leaves of each field: a tensor of
        shape (B, *field shape), or where rows differ in length a list of ``B`` tensors.
    """
    decoders = image_decoders(store.manifest.columns, store.columns, forms)
    line = rows if isinstance(rows, WindowedRows) else None
    cut = [_batched(field, rows) is not field for field in store.schema.fields]

    def read(numbers: Integers) -> list[Tensor | list[Tensor]]:
        rows, windows = (numbers, numbers) if line is None else line.numbered(numbers)
        leaves = list[Any]()
        for place, column in enumerate(store.columns):
            if line is not None and cut[place]:
                # One by one: a series may be long.
                pairs = zip(rows.tolist(), (windows * line.stride).tolist(), strict=True)
                leaves.append(
                    torch.stack([column.row(row)[at : at + line.length] for row, at in pairs])
                )
            else:
                leaves.append(column.fetch(rows))
        for place, decoder in decoders.items():
            leaves[place], places = decoder.decoded([row.numpy() for row in leaves[place]])
            if decoder.form.with_scale:
                leaves.append(places)
        return leaves

    return read


def _batched(field: Field, rows: Rows) -> Field:
    """A field as batches have it."""
    if isinstance(rows, WindowedRows) and field.name in rows.fields:
        return field.windowed(rows.length)
    return field


def _stack(field: Field, rows: tuple[Tensor, ...]) -> Tensor | VariableRows:
    if field.num_variable:
        return rows_in_memory(field, rows)
    return torch.stack(rows)
