"""Schemas from JSON values, as the manifest of a store has them."""

from typing import Any

import msgspec

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.validation import check_schema, read_dtype


def to_json(schema: Schema) -> Any:
    """The JSON values of a schema."""
    return msgspec.to_builtins(schema, enc_hook=dtype_name)


def read_schema(value: Any) -> Schema:
    """Read a schema that nobody has checked."""
    try:
        schema = msgspec.convert(value, Schema, dec_hook=read_dtype)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SchemaError(str(error)) from error
    check_schema(schema)
    return schema
