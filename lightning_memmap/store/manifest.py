"""The manifest of a store: what the store contains, checked value by value when it is read.

A manifest may come from an untrusted source. Reading it runs no code from it, and every size and
name in it is checked before a file is touched.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import xxhash

from lightning_memmap.errors import SchemaError, StoreError, StoreNotFoundError, check_integer
from lightning_memmap.sampling import Integers, Pool, Shards, WindowedRows
from lightning_memmap.schema import Schema, read_schema
from lightning_memmap.schema.spec import MAX_FIELDS
from lightning_memmap.store.columns import Column, columns_from_json, columns_to_json
from lightning_memmap.store.files import TEMPORARY, check_plain, open_plain, unreadable
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.row_bytes import rows_bytes, window_bytes
from lightning_memmap.store.strict_json import parse_json

MANIFEST = "manifest.json"
FORMAT = "lightning_memmap store"
VERSION = 2

#: The most shards of a store.
MAX_SHARDS = 2**16
# Limits of a manifest, so that reading one takes about a second and some tens of MB at most.
#: The most bytes of one.
MAX_MANIFEST_BYTES = 8 * 2**20
_MAX_CHECKSUMS = 2**17
_MAX_VALUES = 2**18
_MAX_CONTAINERS = 2**16
_MAX_JSON_DEPTH = 72  # Two for each level of a sample, and those around it.
_MAX_PROBES = 64
_MAX_SOURCE = 64
_MAX_TEXT = 4096
_MAX_CLASSES, _MAX_CLASS_LETTERS = 2**15, 128
_MAX_ROWS = 2**48
#: The most rows where no field has a byte, since no file then bounds their number.
_MAX_EMPTY_ROWS = 2**20
_HEX = re.compile(r"[0-9a-f]{16}")
#: What the directory of a generation is named.
GENERATION = re.compile(r"g-[0-9a-f]{16}")


@dataclass(frozen=True)
class Manifest:
    """What a store contains.

    Args:
        shards: The rows of the dataset, and the shards that they are divided into.
        schema: The fields and the nesting of a sample.
        columns: How each field is kept in files, in the order of the fields.
        probes: Row and hash of a few rows, by which the dataset is recognised.
        checksums: XXH3 (64 bits, hexadecimal) of each shard, by field name.
        source: Where the store came from, for people to read.
        fingerprint: The identity of the dataset; None in stores that were not built from one.
        classes: The names of its classes, by label; empty where it has none.
        generation: The directory of its files, in that of the manifest.
    """

    shards: Shards
    schema: Schema
    columns: tuple[Column, ...]
    probes: tuple[tuple[int, str], ...]
    checksums: Mapping[str, Sequence[str]]
    source: Mapping[str, str]
    fingerprint: Fingerprint | None = None
    classes: tuple[str, ...] = ()
    generation: str = "g-" + "0" * 16

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self.shards.num_rows

    @property
    def num_shards(self) -> int:
        """Shards that the rows are divided into."""
        return self.shards.num_shards

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return rows_bytes(self.columns, range(self.num_rows))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average and rounded up."""
        return -(-self.num_bytes // self.num_rows)

    def shard_bytes(
        self,
        pool: Pool | None = None,
        fields: Collection[str] | None = None,
        num_data_devices: int = 1,
    ) -> Integers:
        """Bytes of the rows of each shard.

        Args:
            pool: How the rows, or some of them, are divided into shards; by default as stored.
            fields: Names of the fields that count; by default all.
            num_data_devices: Data devices of all processes, each of which has a copy of what their
                shards share.

        Returns:
            int64 of shape (C,). Where the size of each row is not known, they are rounded up.
        """
        columns = [c for c in self.columns if fields is None or c.field.name in fields]
        if pool is not None and isinstance(pool.rows, WindowedRows):
            return window_bytes(columns, pool, num_data_devices)
        parts = self.shards if pool is None else pool
        sizes = [rows_bytes(columns, parts.rows_of(c)) for c in range(parts.num_shards)]
        return np.array(sizes, np.int64)

    @property
    def content(self) -> str:
        """The contents of the store in one line.

        The line is the same for all stores with the same rows, no matter where and when they were
        built.
        """
        sums = {name: list(sums) for name, sums in self.checksums.items()}
        digest = _digest({**self.schema.to_json(), "checksums": sums})
        return f"{self.num_rows} rows in {self.num_shards} shards, content {digest}"

    def write(self, directory: Path) -> None:
        """Write the manifest; its presence is what makes the directory a store.

        Args:
            directory: The directory with the files of the columns.

        Raises:
            StoreError: The manifest could not be read again. Nothing has been written.
            OSError: The file cannot be written. A manifest that was there before is as it was.
        """
        data = self.encode()
        temporary = directory / (MANIFEST + TEMPORARY)
        # What a killed process has left there, or others have planted, is removed, not written to.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / MANIFEST)

    def encode(self) -> bytes:
        """Convert the manifest to the bytes of its file.

        Returns:
            The bytes: JSON, with its own digest in it.

        Raises:
            StoreError: The bytes could not be read again.
        """
        body = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "num_rows": self.num_rows,
            "num_shards": self.num_shards,
            **self.schema.to_json(),
            "probes": [list(probe) for probe in self.probes],
            "checksums": {name: list(sums) for name, sums in self.checksums.items()},
            "source": dict(self.source),
            **columns_to_json(self.columns),
        }
        if self.fingerprint is not None:
            body["fingerprint"] = self.fingerprint.to_json()
        if self.classes:
            body["classes"] = list(self.classes)
        body["digest"] = _digest(body)
        data = json.dumps(body, indent=1).encode()
        try:
            if len(self.schema.fields) > MAX_FIELDS:
                raise ValueError(f"{len(self.schema.fields)} fields: a store has 1 to {MAX_FIELDS}")
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError(
                    f"its manifest would have {len(data)} bytes, and at most"
                    f" {MAX_MANIFEST_BYTES} are read"
                )
            self._decode(data)
        except (ValueError, SchemaError) as error:
            raise StoreError(f"no store can be made of this: {error}") from error
        return data

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check the manifest of a store.

        Args:
            directory: Directory of the store.

        Returns:
            The manifest. Whether its files are there is not checked: see `check_files`.

        Raises:
            StoreNotFoundError: There is no store in this directory.
            StoreError: The manifest cannot be read, is damaged, contradicts itself, or has another
                version.
        """
        path = directory / MANIFEST
        try:
            with open(open_plain(path), "rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(
                f"no store at {directory}: build it by giving the dataset, or with"
                f" `lightning-memmap store build {directory} --dataset ...`"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from error
        return cls.decode(data, str(directory))

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Read and check the bytes of a manifest.

        Args:
            data: At most one byte more than `MAX_MANIFEST_BYTES`.
            where: Where the store is, for messages.

        Raises:
            StoreError: It is damaged, contradicts itself, or has another version.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise StoreError(
                f"the manifest of the store at {where} is larger than {MAX_MANIFEST_BYTES} bytes"
            )
        try:
            return cls._decode(data)
        except _VersionError as error:
            raise OtherVersionError(
                f"the store at {where} has format version {error}, and this version of"
                f" lightning_memmap reads version {VERSION}: remove it and build it again"
            ) from None
        except (ValueError, SchemaError) as error:
            raise StoreError(
                f"the manifest of the store at {where} cannot be trusted: {error};"
                " build the store again"
            ) from error

    @classmethod
    def _decode(cls, data: bytes) -> "Manifest":
        body = parse_json(
            data,
            max_values=_MAX_VALUES,
            max_containers=_MAX_CONTAINERS,
            max_depth=_MAX_JSON_DEPTH,
        )
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it does not name the format {FORMAT!r}")
        if body.get("version") != VERSION:
            raise _VersionError(short_repr(body.get("version")))
        if body.pop("digest", None) != _digest(body):
            raise ValueError("its digest does not match its content")
        return cls._from_json(body)

    @classmethod
    def _from_json(cls, body: dict[str, Any]) -> "Manifest":
        schema = read_schema(body)
        num_rows = _count(body, "num_rows", _MAX_ROWS)
        num_shards = _count(body, "num_shards", MAX_SHARDS)
        if len(schema.fields) * num_shards > _MAX_CHECKSUMS:
            raise ValueError(
                f"{num_shards} shards of {len(schema.fields)} fields have more than the"
                f" {_MAX_CHECKSUMS} checksums that a manifest holds: use fewer shards"
            )
        shards = Shards(num_rows, num_shards)
        columns = columns_from_json(schema, shards, body.get("columns", {}))
        if not any(column.file_bytes for column in columns):
            _count(body, "num_rows", _MAX_EMPTY_ROWS)
        identity = body.get("fingerprint")
        return cls(
            shards,
            schema,
            columns,
            _probes(body.get("probes"), num_rows),
            _checksums(body.get("checksums"), shards, schema),
            _source(body.get("source")),
            None if identity is None else Fingerprint.from_json(identity),
            _classes(body.get("classes", [])),
            _generation(body.get("generation")),
        )


def _probes(found: Any, num_rows: int) -> tuple[tuple[int, str], ...]:
    if not isinstance(found, list) or len(found) > _MAX_PROBES:
        raise ValueError(f"its probes are not a list of at most {_MAX_PROBES}")
    if not all(
        isinstance(probe, list)
        and len(probe) == 2
        and type(probe[0]) is int
        and 0 <= probe[0] < num_rows
        and _is_hex_list(probe[1:])
        for probe in found
    ):
        raise ValueError("its probes are not rows with a hash each")
    return tuple((row, digest) for row, digest in found)


def _checksums(found: Any, shards: Shards, schema: Schema) -> dict[str, tuple[str, ...]]:
    names = [field.name for field in schema.fields]
    if not isinstance(found, dict) or list(found) != names:
        raise ValueError("its checksums are not those of its fields")
    for name, sums in found.items():
        if not _is_hex_list(sums) or len(sums) != shards.num_shards:
            raise ValueError(f"the checksums of {name!r} are not one for each shard")
    return {name: tuple(sums) for name, sums in found.items()}


def _source(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or len(found) > _MAX_SOURCE:
        raise ValueError(f"its source is not a table of at most {_MAX_SOURCE} texts")
    if not all(_is_text(text) for entry in found.items() for text in entry):
        raise ValueError(f"its source holds more than printable texts of {_MAX_TEXT} letters")
    return found


def _generation(found: Any) -> str:
    if not isinstance(found, str) or not GENERATION.fullmatch(found):
        raise ValueError(f"its generation is {short_repr(found)}, and not like g-0123456789abcdef")
    return found


def _classes(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not are_class_names(found):
        raise ValueError("its classes are not a list of short texts")
    return tuple(found)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that every file of the columns is there, is a plain file, and has exactly its size.

    Args:
        directory: Where the files are.
        manifest: The manifest of the store.

    Raises:
        StoreError: The message names the file, what was found and what was expected.
    """
    for column in manifest.columns:
        for name, expected in column.file_bytes.items():
            path = directory / name
            try:
                found = check_plain(path)
            except FileNotFoundError:
                raise StoreError(f"{path} is missing: build the store again") from None
            except OSError as error:
                raise unreadable(path, error) from error
            if found != expected:
                raise StoreError(
                    f"{path} has {found} bytes, expected {expected}"
                    f" ({manifest.num_rows} rows of {column.field}): build the store again"
                )


def check_num_shards(num_shards: int) -> int:
    """Check a number of shards that a user gives.

    Args:
        num_shards: The value.

    Returns:
        The value as an int of Python.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is not in ``[1, MAX_SHARDS]``.
    """
    num_shards = check_integer("num_shards", num_shards)
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"num_shards={num_shards}: at least 1 is needed, and at most {MAX_SHARDS}")
    return num_shards


class OtherVersionError(StoreError):
    """A store is of another version of the format."""


class _VersionError(ValueError):
    """The version that a manifest names."""


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _count(body: dict[str, Any], key: str, limit: int) -> int:
    value = body.get(key)
    if type(value) is not int or not 1 <= value <= limit:
        raise ValueError(f"{key}={short_repr(value)} is not a number from 1 to {limit}")
    return value


def _is_hex_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) and _HEX.fullmatch(item) for item in value
    )


def are_class_names(names: Sequence[Any]) -> bool:
    """Whether names can be kept as those of classes: short texts that can be shown."""
    return len(names) <= _MAX_CLASSES and all(
        _is_text(name) and len(name) <= _MAX_CLASS_LETTERS for name in names
    )


def _is_text(value: Any) -> bool:
    """Whether a value is a short text that can be shown.

    Codes that control a terminal are not printable.
    """
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()
