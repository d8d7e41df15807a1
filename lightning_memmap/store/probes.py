"""Probe rows: a few rows of a dataset, by which it is recognised and found out to be random."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.schema import Schema

NUM_PROBES = 8


def probe_rows(num_rows: int) -> list[int]:
    """The rows that are probed: spread over the dataset, with the first and the last one."""
    return sorted(set(np.linspace(0, num_rows - 1, NUM_PROBES).astype(np.int64).tolist()))


def read_row(dataset: Any, row: int, schema: Schema) -> list[Tensor | np.ndarray]:
    """The leaves of one row, checked against the schema.

    Raises:
        DatasetError: The dataset raised at this row.
        SchemaError: The sample does not fit. Both messages name the row.
    """
    try:
        sample = dataset[row]
    except Exception as error:
        raise DatasetError(
            f"the dataset raised at row {row}: {type(error).__name__}: {error}"
        ) from error
    try:
        return schema.flatten(sample)
    except SchemaError as error:
        raise SchemaError(
            f"row {row}, {error}. All rows of a store share one structure, and each field one"
            " dtype and shape: convert, crop or pad it in the dataset"
        ) from error


def leaf_bytes(leaf: Tensor | np.ndarray) -> np.ndarray:
    """The bytes of one leaf as a flat uint8 array, in the byte order of this machine."""
    if isinstance(leaf, Tensor):
        return leaf.contiguous().reshape(-1).view(torch.uint8).numpy()
    native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8)


def hash_row(leaves: Sequence[Tensor | np.ndarray]) -> str:
    """XXH3 over the bytes of all leaves, 64 bits in hexadecimal."""
    digest = xxhash.xxh3_64()
    for leaf in leaves:
        digest.update(leaf_bytes(leaf).data)
    return digest.hexdigest()


def take_probes(dataset: Any, num_rows: int, schema: Schema) -> tuple[tuple[int, str], ...]:
    """Read each probe row twice and hash it.

    Raises:
        DatasetError: A row differs between the two reads: the dataset is random.
    """
    probes = []
    for row in probe_rows(num_rows):
        first, second = (read_row(dataset, row, schema) for _ in range(2))
        for field, one, other in zip(schema.fields, first, second, strict=True):
            if leaf_bytes(one).tobytes() != leaf_bytes(other).tobytes():
                raise random_dataset_error(row, field.name)
        probes.append((row, hash_row(first)))
    return tuple(probes)


def random_dataset_error(row: int, field: str) -> DatasetError:
    """What to say of a dataset whose rows change from read to read."""
    return DatasetError(
        f"row {row}, field {field!r}: two reads of the same row differ, so the dataset is"
        " random. A store would freeze its augmentation. Take the random part out of the"
        " dataset and pass it as `transform=`, where it runs on every batch"
        " (`lightning_memmap.transforms.PerSample` adapts a per-sample callable)"
    )


def check_same_dataset(
    dataset: Any, num_rows: int, schema: Schema, probes: tuple[tuple[int, str], ...], where: str
) -> None:
    """Check that a dataset is the one that was stored: length, schema and probe rows.

    Raises:
        DatasetError: It is another one. The message says what differs and what to do.
    """
    remedy = (
        f"the store at {where} was built from another dataset. Build it anew (`overwrite=True`,"
        " or `lightning-memmap store build --overwrite`), choose another `store_dir`, or give no"
        " dataset to use the store as it is"
    )
    found = len(dataset)
    if found != num_rows:
        raise DatasetError(f"the dataset has {found} rows, the store {num_rows}: {remedy}")
    for row, expected in probes:
        try:
            leaves = read_row(dataset, row, schema)
        except SchemaError as error:
            raise DatasetError(f"{error}: {remedy}") from error
        if hash_row(leaves) != expected:
            raise DatasetError(f"row {row} of the dataset differs from the stored row: {remedy}")
