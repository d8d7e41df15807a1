"""Samples whose leaves are laid one after the other have the values of those taken one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema import Pad, Schema
from lightning_memmap.schema.forms import FieldOptions
from tests.datasets import texts

SIZES = st.integers(0, 4)


def a_sample(rows: int, columns: int, text: str, is_given: bool) -> dict[str, Any]:
    return {
        "text": text if is_given else None,
        "array": np.full((rows, 3), columns, ">i2"),
        "tensor": torch.full((rows, columns, 2), 0.5) if rows else None,
        "label": rows if is_given else None,
        "bytes": text.encode(),
        "fixed": {"x": np.float32(rows), "y": torch.full((2,), columns)},
    }


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(SIZES, SIZES, texts(4), st.booleans()), min_size=1))
def test_stacked_samples_have_the_values_of_each_sample(drawn: list[Any]) -> None:
    samples = [a_sample(*values) for values in drawn]
    shown = [a_sample(1, 1, "a", True), a_sample(2, 3, "ab", False), a_sample(0, 2, "", True)]
    schema = Schema.infer(shown)
    assert {field.name for field in schema.fields if field.num_variable} == {
        *("text", "array", "tensor", "bytes")
    }
    one_by_one = [schema.flatten(sample) for sample in samples]
    stacked = schema.stack(samples)
    for field, found, *expected in zip(schema.fields, stacked, *one_by_one, strict=True):
        rows = [np.asarray(row) for row in expected]
        items, sizes, _ = found
        if sizes is None:
            np.testing.assert_array_equal(np.asarray(items), np.stack(rows))
            continue
        assert sizes.tolist() == [[*row.shape[: field.num_variable]] for row in rows]
        flat = [row.reshape(-1, *field.item_shape) for row in rows]
        np.testing.assert_array_equal(np.asarray(items), np.concatenate(flat))
        given = [leaf for sample in samples for leaf in (sample["array"], sample["tensor"])]
        shared = [np.asarray(leaf) for leaf in given if leaf is not None]
        assert not any(np.shares_memory(items, leaf) for leaf in shared)


def test_samples_of_which_one_does_not_fit_are_not_stacked() -> None:
    schema = Schema.infer([a_sample(2, 3, "ab", True)], FieldOptions({"array": Pad()}))
    wrong = {**a_sample(2, 3, "ab", True), "array": np.zeros((2, 4), ">i2")}
    for other in (wrong, {**wrong, "array": [1, 2]}, {**wrong, "array": torch.zeros(2, 3)}):
        with pytest.raises(SchemaError, match="'array"):
            schema.stack([a_sample(2, 3, "ab", True), other])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([2, 2, 2, 1, 3]), min_size=1, max_size=4),
    st.sampled_from(["i2", ">i2", "f4"]),
    st.booleans(),
)
def test_leaves_are_stacked_in_given_memory_only_where_all_fit(
    sizes: list[int], dtype: str, are_tensors: bool
) -> None:
    arrays = [np.full((size, 3), row, dtype) for row, size in enumerate(sizes)]
    leaves: Any = (
        [torch.from_numpy(a.astype(a.dtype.newbyteorder("="))) for a in arrays]
        if are_tensors
        else arrays
    )
    schema = Schema.infer([np.zeros((2, 3), "i2")])
    # Their sizes may add up all the same.
    room = torch.full((len(sizes), 2, 3), -1, dtype=torch.int16)
    if set(sizes) != {2} or dtype == "f4":
        with pytest.raises(SchemaError, match="field 'value': found"):
            schema.stack(leaves, {"value": room})
        return
    stacked = schema.stack(leaves, {"value": room})
    np.testing.assert_array_equal(np.asarray(stacked[0].data), np.stack(arrays))
    if are_tensors or dtype == "i2":
        assert np.shares_memory(np.asarray(stacked[0].data), room.numpy())
