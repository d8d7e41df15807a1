"""Probe rows: a few rows that identify a dataset, and show whether it is random."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.schema import Form, Schema
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.samples import flatten_row, infer_schema, read_row, read_sample
from lightning_memmap.store.workers import Workers, run_tasks

NUM_PROBES = 8
#: The most rows that are read to find out what a list consists of that is empty in the first ones.
MAX_PROBES = 1024


def probe_rows(num_rows: int) -> list[int]:
    """Choose the probe rows of a dataset: spread over it, the first and the last row among them."""
    return sorted(set(np.linspace(0, num_rows - 1, NUM_PROBES).astype(np.int64).tolist()))


def hash_row(leaves: Sequence[Tensor | np.ndarray]) -> str:
    """Hash a row, given as leaves on the CPU: XXH3 of the shapes and bytes of all of them."""
    digest = xxhash.xxh3_64()
    for leaf in leaves:
        # Otherwise ("ab", "c") would be ("a", "bc").
        digest.update(np.array([leaf.ndim, *leaf.shape], np.int64).data)
        # True may be any byte but 0, as in images of one bit, and is 1 in a copy.
        is_bool = leaf.dtype in (torch.bool, np.bool_)
        digest.update(leaf_bytes(leaf & True if is_bool else leaf).data)
    return digest.hexdigest()


class Probes(NamedTuple):
    """Rows that were the same in two reads, and what they show of the others."""

    schema: Schema
    digests: tuple[tuple[int, str], ...]
    """Row and hash of each; see `hash_row`."""
    row_s: float
    """Seconds that reading a row takes."""
    row_bytes: int
    """Bytes of the largest one over all fields."""
    typical_bytes: float
    """Bytes of one, as the median."""


def first_sample(dataset: Any, num_workers: int) -> Any:
    """Read the first sample of a dataset, in the process in which `take_probes` would read it."""
    if num_workers == 0:
        return read_sample(dataset, 0)
    pickled: list[bytes | None] = []
    run_tasks(partial(_pickled, dataset), [0], 1, pickled.append)
    return read_sample(dataset, 0) if pickled[0] is None else pickle.loads(pickled[0])


def _pickled(dataset: Any, row: int) -> bytes | None:
    sample = read_sample(dataset, row)
    try:
        return pickle.dumps(sample)
    except Exception:  # Its class may raise anything.
        return None


def take_probes(workers: Workers, num_rows: int, forms: Mapping[str, Form] | Schema) -> Probes:
    """Read each probe row twice and hash it. The schema is found with some forms, or given."""
    found = list[Probes]()
    workers.run(partial(Prober, forms=forms), [num_rows], found.append)
    return found[0]


def find_schema(
    samples: list[Any],
    rows: list[int],
    forms: Mapping[str, Form],
    more: Iterator[tuple[int, Any]],
) -> Schema:
    """The schema of samples, with more of them where these do not show what has some names."""
    schema = infer_schema(samples, rows, forms)
    # As many as there are: all are looked at again.
    while schema.unknown.keys() & forms.keys() and (new := list(islice(more, len(samples)))):
        rows += [row for row, _ in new]
        samples += [sample for _, sample in new]
        schema = infer_schema(samples, rows, forms)
    if not schema.fields:
        raise SchemaError(
            f"the {len(rows)} rows that were read first hold no tensor, array or number: empty"
            " lists and None have no dtype; give arrays, or add a field that has values"
        )
    for name, what in schema.unknown.items():
        if name in forms or what == "None":
            way_out = (
                "give arrays in place of lists, such as numpy.array(values, numpy.int64)"
                if what != "None"
                else f"let more rows be read with variable={{{name!r}: 'nullable'}}"
                if name not in forms
                else "leave it out of the samples"
            )
            raise SchemaError(
                f"field {name!r} is {what} in each of the {len(rows)} rows that were read first, so"
                f" that its dtype is not known: {way_out}"
            )
    return schema


@dataclass(frozen=True)
class Prober:
    """Reads each probe row of a dataset of so many rows twice; see `take_probes`."""

    dataset: Any
    forms: Mapping[str, Form] | Schema

    def __call__(self, num_rows: int) -> Probes:
        """Read them."""
        rows, durations = probe_rows(num_rows), list[float]()
        samples = list[Any]()
        for row in rows:
            start = perf_counter()
            samples.append(read_sample(self.dataset, row))
            durations.append(perf_counter() - start)
        schema = self.forms
        if not isinstance(schema, Schema):
            spread = np.linspace(0, num_rows - 1, MAX_PROBES).astype(np.int64).tolist()
            others = sorted({*spread} - {*rows})[: MAX_PROBES - len(rows)]
            more = ((row, read_sample(self.dataset, row)) for row in others)
            schema = find_schema(list(samples), list(rows), schema, more)
        digests, sizes = [], list[int]()
        for row, sample in zip(rows, samples, strict=True):
            leaves, again = flatten_row(sample, row, schema), read_row(self.dataset, row, schema)
            for field, one, other in zip(schema.fields, leaves, again, strict=True):
                if leaf_bytes(one).tobytes() != leaf_bytes(other).tobytes():
                    raise random_dataset_error(row, field.name)
            digests.append((row, hash_row(leaves)))
            sizes.append(sum(leaf_bytes(leaf).nbytes for leaf in leaves))
        return Probes(schema, tuple(digests), median(durations), max(sizes), median(sizes))


def random_dataset_error(row: int, field: str) -> DatasetError:
    """Make the error for a dataset whose rows change from read to read."""
    return DatasetError(
        f"row {row}, field {field!r}: two reads of the same row differ, so the dataset is"
        " random, and a store would freeze its augmentation; or it gives arrays that it later"
        " overwrites. Take the random part out of the dataset and pass it as `transform=`, where"
        " it runs on every batch (`lightning_memmap.transforms.PerSample` adapts a per-sample"
        " callable); give copies of arrays that are used again"
    )
