"""The manifest of a store: what the store contains, checked value by value when it is read.

A manifest may come from an untrusted source. Reading it runs no code from it, and every size and
name in it is checked before a file is touched.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as short_repr
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta
from msgspec.structs import replace

from lightning_memmap.errors import SchemaError, StoreError, StoreNotFoundError, check_integer
from lightning_memmap.integers import ceil_div
from lightning_memmap.sampling.rows import Shards, default_shards
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import Node
from lightning_memmap.schema.validation import check_schema, read_dtype
from lightning_memmap.store.checksums import (
    CHECKSUM_BYTES,
    ColumnChunks,
    choose_chunk_bytes,
    num_chunks,
)
from lightning_memmap.store.columns import FixedColumn, ShardItems, VariableColumn, shard_items
from lightning_memmap.store.files import TEMPORARY, make_unreadable_error, read_plain
from lightning_memmap.store.identity import Identity

MANIFEST = "manifest.json"
FORMAT = "lightning_memmap store"
VERSION = 6

#: The most shards of a store.
MAX_SHARDS = 2**16
# Limits that keep reading a manifest below about a second and some tens of MB.
#: The most bytes of a manifest.
MAX_MANIFEST_BYTES = 8 * 2**20
#: The most shards, summed over all fields.
_MAX_FIELD_SHARDS = 2**17
_MAX_PROBES = 64
_MAX_SOURCE = 64
_MAX_CLASSES = 2**15
_MAX_CLASS_LETTERS = 128
#: The most rows if no field has any bytes, so that no file bounds their number.
_MAX_EMPTY_ROWS = 2**20
#: Names of generations.
GENERATION = re.compile(r"g-[0-9a-f]{16}")
_Sum = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Probe = tuple[Annotated[int, Meta(ge=0)], _Sum]
_Text = Annotated[str, Meta(max_length=4096)]
_ClassName = Annotated[str, Meta(max_length=_MAX_CLASS_LETTERS)]
_DIGEST_BYTES = len(b'{"digest":"0123456789abcdef",')


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The contents of a store. Its file begins with the digest of everything else."""

    format: str = FORMAT
    version: int = VERSION
    generation: Annotated[str, Meta(pattern=rf"^{GENERATION.pattern}\Z")]
    num_rows: Annotated[int, Meta(ge=1, le=2**48)]
    num_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    probes: Annotated[tuple[_Probe, ...], Meta(max_length=_MAX_PROBES)]
    #: The checksums of the chunks of each field, see `lightning_memmap.store.checksums`. Decoding a
    #: list of them would take most of the time in which a store is opened.
    checksums: dict[str, bytes]
    source: Annotated[dict[_Text, _Text], Meta(max_length=_MAX_SOURCE)]
    identity: Identity | None = msgspec.field(default=None, name="fingerprint")
    classes: Annotated[tuple[_ClassName, ...], Meta(max_length=_MAX_CLASSES)] = ()
    structure: Node
    #: The number of items in each shard, for fields whose rows differ in length. Empty in a draft.
    items: dict[str, ShardItems] = msgspec.field(name="columns", default_factory=dict)

    @cached_property
    def schema(self) -> Schema:
        """The fields and the nesting of a sample."""
        return Schema(self.structure)

    @cached_property
    def shards(self) -> Shards:
        """The shards that the rows are divided into."""
        return Shards(self.num_rows, self.num_shards)

    @cached_property
    def columns(self) -> tuple[FixedColumn | VariableColumn, ...]:
        """The column of each field, in the order of the fields."""
        return tuple(
            VariableColumn(field, self.shards, tuple(self.items.get(field.name, ())))
            if field.num_variable
            else FixedColumn(field, self.shards)
            for field in self.schema.fields
        )

    @property
    def has_default_shards(self) -> bool:
        """Whether the number of shards is the default for the number of rows."""
        return self.num_shards == default_shards(self.num_rows)

    def choose_num_shards(self, num_rows: int) -> int:
        """Return the number of shards for ``num_rows`` rows or windows of the store."""
        return default_shards(num_rows) if self.has_default_shards else self.num_shards

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of the files that one checksum covers."""
        return choose_chunk_bytes(self.columns)

    @property
    def num_checksums(self) -> int:
        """The number of chunks of all fields."""
        return sum(map(len, self.checksums.values())) // CHECKSUM_BYTES

    @property
    def checksum_bytes(self) -> dict[str, int]:
        """Bytes of the checksums of each field."""
        return {
            column.field.name: CHECKSUM_BYTES * num_chunks(column, self.chunk_bytes)
            for column in self.columns
        }

    @cached_property
    def chunks(self) -> tuple[ColumnChunks, ...]:
        """The chunks of each field, in the order of the fields."""
        return tuple(
            ColumnChunks(column, self.chunk_bytes, self.checksums[column.field.name])
            for column in self.columns
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(column.num_bytes for column in self.columns)

    @property
    def file_bytes(self) -> dict[str, int]:
        """The size of each file by its name."""
        return {name: size for column in self.columns for name, size in column.file_bytes.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average and rounded up."""
        return ceil_div(self.num_bytes, self.num_rows)

    @cached_property
    def content(self) -> str:
        """The contents of the store in one line."""
        named = {name: getattr(self, name) for name in ("structure", "checksums")}
        text = msgspec.json.encode(named, order="sorted", enc_hook=dtype_name)
        digest = xxhash.xxh3_64_hexdigest(text)
        return f"{self.num_rows} rows in {self.num_shards} shards, content {digest}"

    @classmethod
    def draft(cls, num_rows: int, num_shards: int, schema: Schema, **more: Any) -> "Manifest":
        """Make the manifest of a store before its rows are written."""
        draft = cls(
            generation="g-" + "0" * 16,
            num_rows=num_rows,
            num_shards=num_shards,
            checksums={},
            structure=schema.structure,
            **{"probes": (), "source": {}, **more},
        )
        draft.encode()
        return draft

    def write(self, directory: Path, name: str = MANIFEST) -> None:
        """Write the manifest in one step. Under its own name, it makes the directory a store."""
        data = self.encode()
        temporary = directory / (name + TEMPORARY)
        # A file there may be of a killed process, or planted: remove it instead of writing to it.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if name == MANIFEST:  # A draft goes to the disk with the first rows.
                os.fsync(file.fileno())
        os.replace(temporary, directory / name)

    def encode(self) -> bytes:
        """Convert the manifest to the bytes of its file."""
        try:
            stated = replace(self, items=shard_items(self.columns))
            if not self.checksums:  # A draft.
                sizes = stated.checksum_bytes
                stated = replace(stated, checksums={name: bytes(n) for name, n in sizes.items()})
            data = sign(msgspec.json.encode(stated, enc_hook=dtype_name))
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError(
                    f"its manifest would have {len(data)} bytes, and at most"
                    f" {MAX_MANIFEST_BYTES} are read"
                )
            self._decode(data)
        except (ValueError, SchemaError) as error:
            raise StoreError(f"these rows can't be stored: {error}") from error
        return data

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check the manifest of a store."""
        path = directory / MANIFEST
        try:
            data = read_plain(path, MAX_MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(
                f"no store at {directory}: build it from a dataset, or with"
                f" `lightning-memmap store build {directory} --dataset ...`"
            ) from None
        except OSError as error:
            raise make_unreadable_error(path, error) from error
        return cls.decode(data, str(directory))

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Read and check the bytes of a manifest."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise StoreError(
                f"the manifest of the store at {where} is larger than {MAX_MANIFEST_BYTES} bytes"
            )
        try:
            return cls._decode(data, where)
        except (ValueError, SchemaError) as error:
            raise StoreError(
                f"the manifest of the store at {where} cannot be trusted: {error};"
                " build the store again"
            ) from error

    @classmethod
    def _decode(cls, data: bytes, where: str = "") -> "Manifest":
        try:
            header = msgspec.json.decode(data, type=_Header)
            if bytes(header.format) != b'"%s"' % FORMAT.encode():
                raise ValueError(f"it does not name the format {FORMAT!r}")
            if bytes(header.version) != b"%d" % VERSION:
                raise OtherVersionError(
                    f"the store at {where} has format version {_shorten(header.version)}, and this"
                    f" version of lightning_memmap reads version {VERSION}: remove it and build it"
                    " again"
                )
            body = b"{" + data[_DIGEST_BYTES:]
            if sign(body) != data:
                raise ValueError("its digest does not match its content")
            manifest = msgspec.json.decode(body, type=cls, dec_hook=read_dtype)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(
                f"{error or 'it is nested too deeply'}{_name_value(data, error)}"
            ) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Check that the values match each other."""
        check_schema(self.schema)
        names = [field.name for field in self.schema.fields]
        counts = {field.name: self.num_shards for field in self.schema.fields if field.num_variable}
        if {name: len(items) for name, items in self.items.items()} != counts:
            raise ValueError("its columns do not match its fields")
        if len(names) * self.num_shards > _MAX_FIELD_SHARDS:
            raise ValueError(
                f"num_shards={self.num_shards}: fields times shards may be at most"
                f" {_MAX_FIELD_SHARDS}, and there are {len(names)} fields: use fewer shards"
            )
        if {name: len(sums) for name, sums in self.checksums.items()} != self.checksum_bytes:
            raise ValueError("its checksums do not match its fields: one for each chunk")
        if any(row >= self.num_rows for row, _ in self.probes):
            raise ValueError(f"its probes are not among its {self.num_rows} rows")
        # Codes that control a terminal are not printable.
        for text in (*self.source, *self.source.values(), *self.classes):
            if not text.isprintable():
                raise ValueError(f"{short_repr(text)} is not a printable text")
        if (
            not any(column.file_bytes for column in self.columns)
            and self.num_rows > _MAX_EMPTY_ROWS
        ):
            raise ValueError(
                f"{self.num_rows} rows without any bytes: at most {_MAX_EMPTY_ROWS} are supported"
            )


class _Header(msgspec.Struct):
    format: msgspec.Raw = msgspec.Raw(b"")
    version: msgspec.Raw = msgspec.Raw(b"None")


def sign(body: bytes) -> bytes:
    """Insert the digest of a JSON object as its first value."""
    return b'{"digest":"%s",%s' % (xxhash.xxh3_64_hexdigest(body).encode(), body[1:])


def _name_value(data: bytes, error: Exception) -> str:
    """Return the value that an error is about, if the error names its key."""
    match = re.search(r"`\$\.(\w+)", str(error))
    if match is None:
        return ""
    value = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(match[1])
    return "" if value is None else f", in {match[1]}={_shorten(value)}"


def _shorten(value: msgspec.Raw) -> str:
    return short_repr(bytes(value)[:99].decode(errors="replace"))[1:-1]


def check_num_shards(num_shards: int) -> int:
    """Check the num_shards argument of a user."""
    num_shards = check_integer("num_shards", num_shards)
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"num_shards={num_shards}: must be at least 1 and at most {MAX_SHARDS}")
    return num_shards


class OtherVersionError(StoreError):
    """A store has another version of the format."""


def are_class_names(names: Sequence[Any]) -> bool:
    """Return whether a manifest can hold these class names: short printable texts."""
    return len(names) <= _MAX_CLASSES and all(
        isinstance(name, str) and len(name) <= _MAX_CLASS_LETTERS and name.isprintable()
        for name in names
    )
