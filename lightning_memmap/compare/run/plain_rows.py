"""The training rows as a ``DataLoader`` takes them, and as their store has them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, default_collate

from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import has_several
from lightning_memmap.loading import FormedCollate
from lightning_memmap.loading.split import image_decoders
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.loading.variable_rows import VariableRows, rows_in_memory
from lightning_memmap.sampling import Integers, Shards, WindowShards
from lightning_memmap.schema import Field, Form
from lightning_memmap.store import Store
from lightning_memmap.store.sources.stream import is_stream


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
        shards: The rows of its order.
    """

    def __init__(self, data: MemmapDataModule, store: Store, shards: Shards) -> None:
        given = data.datasets["train"]
        several = [*given.values()] if has_several(given) else [given]
        if any(dataset is None or is_stream(dataset) for dataset in several):
            self._samples: Any = store
        else:
            self._samples = ConcatDataset(several) if has_several(given) else given
        base = shards.base
        self._windows = base if isinstance(base, WindowShards) else None

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
        shards: The rows of the order.
        forms: How batches give fields, by name.
        transform: The batch transform; None for none.
    """

    def __init__(
        self,
        store: Store,
        shards: Shards,
        forms: Mapping[str, Form],
        transform: Callable[..., Any] | None,
    ) -> None:
        self._schema, self._forms = store.schema, dict(forms)
        self._windows = base if isinstance(base := shards.base, WindowShards) else None
        self._fields = [_batched(field, base) for field in store.schema.fields]
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

    def _leaves(self, sample: Any) -> list[Tensor | np.ndarray]:
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
    store: Store, shards: Shards, forms: Mapping[str, Form]
) -> Callable[[Integers], list[Tensor | list[Tensor]]]:
    """What reads rows of an order from the store, without a loader.

    Args:
        store: The store.
        shards: The rows of the order.
        forms: How batches give fields, by name: encoded images are decoded.

    Returns:
        A function of rows, int64 of shape (B,), that returns the leaves of each field: a tensor of
        shape (B, *field shape), or where rows differ in length a list of ``B`` tensors.
    """
    decoders = image_decoders(store.manifest.columns, store.columns, forms)
    line = base if isinstance(base := shards.base, WindowShards) else None
    cut = [_batched(field, base) is not field for field in store.schema.fields]

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


def _batched(field: Field, base: Shards) -> Field:
    """A field as batches have it."""
    if isinstance(base, WindowShards) and field.name in base.fields:
        return field.windowed(base.length)
    return field


def _stack(field: Field, rows: tuple[Any, ...]) -> Tensor | VariableRows:
    if field.num_variable:
        tensors = (row if isinstance(row, Tensor) else torch.from_numpy(row.copy()) for row in rows)
        return rows_in_memory(field, list(tensors))
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return torch.from_numpy(np.stack(rows))
