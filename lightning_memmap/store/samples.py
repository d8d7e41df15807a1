"""Samples of a dataset: read by row, and checked against the schema of a store.

Probe rows are a few of them, which identify a dataset, and show whether it is random.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.fields import Values, field_name
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.held import SharedMemoryCheck, copy_sample
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.workers import RowNumbers, Workers, calling

NUM_PROBES = 8
#: Samples that are held as Python objects, before they are copied.
_HELD_BYTES, _MAX_HELD_ROWS = 2**20, 1024
#: The most rows that are read to find out what a list consists of that is empty in the first ones.
MAX_PROBES = 1024
#: What makes samples of a table that tell more than its rows.
Tell = Callable[[Any], Sequence[Any]]
_ONE_STRUCTURE = (
    "All rows of a store share one structure, and each field one dtype and number of dimensions:"
    " convert it in the dataset"
)


def read_sample(dataset: Any, row: int) -> Any:
    """Read one sample of a dataset."""
    try:
        return dataset[row]
    except SchemaError as error:  # Of a table.
        raise SchemaError(f"row {row}, {error}") from error
    except Exception as error:
        raise DatasetError(f"the dataset raised at row {row}: {describe_error(error)}") from error


class ReadAhead:
    """A dataset that keeps samples which were read before it was known how they are stored."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.kept = dataset, dict[int, Any]()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]

    def keep(self, rows: Integers) -> None:
        """Read samples, and keep each until it is read again."""
        self.kept.update(
            (row, copy_sample(read_sample(self.dataset, row))) for row in rows.tolist()
        )


class SampleReader:
    """Reads samples of a dataset, and stacks their leaves.

    They are held until they are stacked. Once some of them have memory in common, which the dataset
    may have overwritten, they are read again, and from then on copied one by one.
    """

    def __init__(self, dataset: Any, schema: Schema) -> None:
        is_ahead = isinstance(dataset, ReadAhead)
        self._dataset = dataset.dataset if is_ahead else dataset
        self._kept: dict[int, Any] = dataset.kept if is_ahead else {}
        self._schema = schema
        self._gives_many = _gives_many(self._dataset)
        self._is_copying = False

    def read(self, rows: RowNumbers) -> list[Values]:
        """Read rows; see `stack_rows`."""
        numbers = list(rows) if isinstance(rows, range) else rows.tolist()
        kept = {row: self._kept.pop(row) for row in numbers if row in self._kept}
        others = [row for row in numbers if row not in kept] if kept else numbers
        if self._gives_many and (many := self._many(others)) is not None:
            samples = _merged(numbers, kept, many)
            if (stacked := self._stacked(samples, rows, is_exact=True)) is not None:
                return stacked
            self._gives_many = False
        if not self._is_copying:
            found = [read_sample(self._dataset, row) for row in others]
            samples = _merged(numbers, kept, found)
            if (stacked := self._stacked(samples, rows, is_exact=False)) is not None:
                return stacked
            self._is_copying = True
        found = [copy_sample(read_sample(self._dataset, row)) for row in others]
        return stack_rows(_merged(numbers, kept, found), rows, self._schema, self._first)

    def _stacked(
        self, samples: Sequence[Any], rows: RowNumbers, *, is_exact: bool
    ) -> list[Values] | None:
        """Stack samples; None where some have memory in common."""
        if len(samples) == 1:
            return stack_rows(samples, rows, self._schema, self._first)
        sharing = SharedMemoryCheck(is_exact=is_exact)
        try:
            stacked = self._schema.stack(samples, sharing)
        except SchemaError:
            if not sharing.is_shared:
                stack_rows(samples, rows, self._schema, self._first)  # It names the row.
            return None
        return None if sharing.is_shared else stacked

    def _first(self) -> Any:
        return read_sample(self._dataset, 0)

    def _many(self, rows: list[int]) -> Sequence[Any] | None:
        with suppress(Exception):  # Row by row, the error has its row.
            many = self._dataset.__getitems__(rows)
            if isinstance(many, (list, tuple)) and len(many) == len(rows):
                return many
        return None


def _merged(rows: list[int], kept: dict[int, Any], others: Sequence[Any]) -> Sequence[Any]:
    """Samples in the order of their rows: those that were kept, and the others in their order."""
    if not kept:
        return others
    found = iter(others)
    return [kept[row] if row in kept else next(found) for row in rows]


def rows_at_once(row_bytes: int) -> int:
    """How many samples are read, before they are copied."""
    return max(1, min(_MAX_HELD_ROWS, _HELD_BYTES // max(1, row_bytes)))


def first_sample(dataset: Any, num_workers: int) -> Any:
    """Read the first sample of a dataset: where worker processes read it, in one of them."""
    if num_workers:
        pickled = list[bytes]()
        with suppress(Exception):  # Its class may be one that cannot be sent.
            with Workers(dataset, 1) as workers:
                workers.run(calling(_pickled), [0], lambda _, found: pickled.append(found))
            return pickle.loads(pickled[0])
    return read_sample(dataset, 0)


def _pickled(dataset: Any, row: int) -> bytes:
    return pickle.dumps(read_sample(dataset, row))


def _gives_many(dataset: Any) -> bool:
    """Whether ``__getitems__`` gives what ``__getitem__`` does."""
    kind = type(dataset)
    if kind is Subset:
        return _gives_many(dataset.dataset)
    names = ("__getitems__", "__getitem__")
    owners = (next((base for base in kind.__mro__ if name in vars(base)), object) for name in names)
    many, one = owners
    return many is not object and issubclass(many, one)


def infer_schema(samples: Sequence[Any], rows: Sequence[int], declared: Declared) -> Schema:
    """Find the schema of samples; see `Schema.infer`. An error names the row."""
    with suppress(SchemaError):
        return Schema.infer(samples, declared)
    schema: Schema | None = None
    for count, (row, sample) in enumerate(zip(rows, samples, strict=True), 1):
        try:
            schema = Schema.infer(samples[:count], declared)
        except SchemaError as error:
            if schema is not None and isinstance(error, MismatchError):
                try:
                    flatten_row(sample, row, schema, lambda: samples[0])
                except SchemaError as found:
                    # Another field may differ too, and would only have to be declared.
                    if str(error).partition(":")[0] in str(found):
                        raise
                raise SchemaError(f"row {row}, {error}. {_ONE_STRUCTURE}") from error
            has_names = isinstance(sample, (Mapping, tuple)) or is_dataclass(sample)
            raise _at_row(row, error, is_bare=not has_names) from error
    raise AssertionError("the samples have a schema")


def _at_row(row: int, error: SchemaError, *, is_bare: bool, remedy: str = "") -> SchemaError:
    """An error that names the row. A sample that is one value has no field to name."""
    text = str(error)
    if is_bare and text.startswith(name := f"field {field_name(())!r}"):
        text = f"the sample{text.removeprefix(name)}"
    return SchemaError(f"row {row}, {text}{remedy}")


def stack_rows(
    samples: Sequence[Any],
    rows: range | Integers,
    schema: Schema,
    another: Callable[[], Any] | None = None,
) -> list[Values]:
    """Stack the leaves of samples; see `Schema.stack`."""
    try:
        return schema.stack(samples)
    except SchemaError:
        for row, sample in zip(np.asarray(rows).tolist(), samples, strict=True):
            flatten_row(sample, row, schema, another)
        raise


def flatten_row(
    sample: Any, row: int, schema: Schema, another: Callable[[], Any] | None = None
) -> list[Tensor]:
    """The leaves of the sample at one row, by `Schema.flatten`; see `stack_rows`."""
    try:
        return schema.flatten(sample)
    except SchemaError as error:
        remedy = ""
        if isinstance(error, MismatchError):
            sample = copy_sample(sample)  # Before another one is read.
            remedy = f". {_way_out(schema, [another(), sample]) if another else _ONE_STRUCTURE}"
        is_bare = schema.structure.field is not None
        raise _at_row(row, error, is_bare=is_bare, remedy=remedy) from error


def _way_out(schema: Schema, samples: Sequence[Any]) -> str:
    """What to do about samples of which the last one does not fit."""
    known = schema.declared
    try:
        found = Schema.infer(samples, known)
    except MismatchError:
        return _ONE_STRUCTURE
    except SchemaError as error:
        return str(error)
    new = found.declared.beyond(known)
    if not new.names:
        return (
            "The records of a list must be alike within a row: convert them in the dataset; a value"
            " that may be None is declared by its name, as in nullable=['boxes.label']"
        )
    what = "are None" if new.nullable else "differ in length"
    return f"Where rows {what}, that must be declared: {new}"


def find_schema(
    samples: list[Any], rows: list[int], declared: Declared, more: Iterator[tuple[int, Any]]
) -> Schema:
    """The schema of samples, with more of them where these do not show what has some names."""
    schema = infer_schema(samples, rows, declared)
    # As many as there are: all are looked at again.
    while schema.unknown.keys() & declared.names and (new := list(islice(more, len(samples)))):
        rows += [row for row, _ in new]
        samples += [sample for _, sample in new]
        schema = infer_schema(samples, rows, declared)
    for name, what in schema.unknown.items():
        if what == "an empty tuple" and name not in declared.names:
            continue  # A tuple has one length.
        is_none = what == "None"
        argument = "nullable" if is_none else "variable"
        remedy = "give arrays, such as numpy.array(values, numpy.int64)"
        if is_none:
            remedy = "fill it as its type allows, such as with NaN, 0, '' or a date"
        if name not in declared.names:
            remedy += f", let more rows be read with {argument}={[name]!r}"
        raise SchemaError(
            f"field {name!r} is {what} in each of the {len(rows)} rows that were read first, so"
            f" that its dtype is not known: {remedy}, or leave it out of the samples"
        )
    return schema


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
    """Rows that were read first, and what they show of the others."""

    schema: Schema
    digests: tuple[tuple[int, str], ...]
    """Row and hash of each; see `hash_row`."""
    row_s: float
    """Seconds that reading a row takes."""
    row_bytes: int
    """Bytes of the largest one over all fields."""
    typical_bytes: float
    """Bytes of one, as the median."""


def take_probes(workers: Workers, num_rows: int, declared: Declared | Schema, tell: Tell) -> Probes:
    """Read the probe rows and hash them. The schema is inferred, or passed."""
    found = list[Probes]()
    workers.run(
        calling(read_probes, declared, tell), [num_rows], lambda _, probes: found.append(probes)
    )
    return found[0]


def read_probes(declared: Declared | Schema, tell: Tell, dataset: Any, num_rows: int) -> Probes:
    """Read the probe rows of a dataset of so many rows in this process; see `take_probes`."""
    rows, durations = probe_rows(num_rows), list[float]()
    samples = list[Any]()
    for row in rows:
        start = perf_counter()
        samples.append(copy_sample(read_sample(dataset, row)))
        durations.append(perf_counter() - start)
    schema = declared
    if isinstance(schema, Declared):
        schema = _schema_of(dataset, samples, rows, schema, tell)
    digests, sizes = [], list[int]()
    for row, sample in zip(rows, samples, strict=True):
        leaves = flatten_row(sample, row, schema)
        digests.append((row, hash_row(leaves)))
        sizes.append(sum(leaf_bytes(leaf).nbytes for leaf in leaves))
    return Probes(schema, tuple(digests), median(durations), max(sizes), median(sizes))


def _schema_of(
    dataset: Any, samples: list[Any], rows: list[int], declared: Declared, tell: Tell
) -> Schema:
    """The schema of a dataset, by samples of some rows, and if need be of others."""
    told, fitting, schema = tell(dataset), [*samples], None
    for some in [told, *([each] for each in told)]:
        with suppress(SchemaError):  # Whoever reads the row says what is wrong in it.
            schema = Schema.infer([*fitting, *some], declared)
            fitting += some
            if some is told:
                break
    if schema is not None and not schema.unknown:
        return schema
    spread = np.linspace(0, len(dataset) - 1, MAX_PROBES).astype(np.int64).tolist()
    others = sorted({*spread} - {*rows})[: MAX_PROBES - len(rows)]
    more = ((row, copy_sample(read_sample(dataset, row))) for row in others)
    return find_schema([*samples], [*rows], declared, more)


class RandomDatasetError(DatasetError):
    """Rows change from read to read: none of them is kept."""


def random_dataset_error(row: int, fields: Sequence[str]) -> RandomDatasetError:
    """Make the error for a dataset whose rows change from read to read."""
    names = ", ".join(map(repr, fields))
    return RandomDatasetError(
        f"row {row}, field {names}: two reads of the same row differ, so the dataset is random, and"
        " a store would freeze its augmentation. Take the random part out of the dataset and pass"
        " it as `transform=`, where it runs on every batch"
        " (`lightning_memmap.transforms.PerSample` adapts a per-sample callable)"
    )
