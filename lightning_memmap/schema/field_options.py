"""What a user says of the fields of a store, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memmap.schema.forms import Form, read_forms
from lightning_memmap.schema.narrowing import check_store_dtypes
from lightning_memmap.schema.schema import Schema


@dataclass(frozen=True)
class FieldOptions:
    """What the user says of fields, beyond what the rows that are read first show.

    Args:
        forms: By name, the form of each field or list whose rows may differ in length, or be None.
            Those that do among the rows that are read first need not be named.
        dtypes: Other dtypes in which fields are kept, by name.
    """

    forms: Mapping[str, Form]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(
        cls,
        variable: Mapping[str, Any] | None,
        store_dtypes: Mapping[str, str | torch.dtype] | None,
    ) -> "FieldOptions":
        """Check what a user gives; see `lightning_memmap.store.build_store`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: There is no such form or dtype.
        """
        return cls(read_forms(variable), check_store_dtypes(store_dtypes))

    @property
    def names(self) -> set[str]:
        """The fields and lists that are named."""
        return {*self.forms, *self.dtypes}

    def schema_of(self, sample: Any) -> Schema:
        """The schema of one sample.

        Raises:
            SchemaError: The sample cannot be stored, or these options do not fit it.
        """
        return Schema.from_sample(sample, self.forms).stored_as(self.dtypes)
