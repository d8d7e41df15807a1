"""Samples whose leaves are laid one after the other have the values of those taken one by one."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.stack import Samples, stack
from tests.support.datasets import texts

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


NUMBERS = st.integers(-(2**63), 2**63 - 1)
FIXED = st.floats(width=32).map(lambda number: np.full(2, number, ">f4"))
RAGGED = st.tuples(SIZES, NUMBERS).map(lambda row: torch.full((row[0], 2), row[1]))
LEAVES = [NUMBERS, FIXED, texts(3), st.binary(max_size=3)]
RECORDS = [*LEAVES, st.fixed_dictionaries({"a": NUMBERS, "b": st.none() | texts(2)})]


def nested(parts: Any) -> Any:
    """Strategies that draw containers of what others draw."""
    pairs = st.lists(parts, min_size=1, max_size=2)
    return st.one_of(
        pairs.map(lambda each: st.tuples(*each)),
        pairs.map(lambda each: st.fixed_dictionaries(dict(zip("ab", each, strict=False)))),
        parts.map(lambda each: st.none() | each),
    )


STRUCTURES = st.recursive(
    st.sampled_from([*LEAVES, RAGGED, *(st.lists(each, max_size=3) for each in RECORDS)]),
    nested,
    max_leaves=5,
)


def assert_equal(found: Any, expected: Any) -> None:
    """What a store gives back for a part of a sample is that part, bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()  # Those of the first sample have the order.
        found, expected = [found[key] for key in expected], list(expected.values())
    if isinstance(expected, (list, tuple)) and not isinstance(found, torch.Tensor):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif expected is None or isinstance(expected, (str, bytes)):
        assert found == expected
    else:
        given = expected.numpy() if isinstance(expected, torch.Tensor) else expected
        array = np.asarray(given, found.numpy().dtype)
        assert (found.shape, found.numpy().tobytes()) == (array.shape, array.tobytes())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_nested_samples_come_back_as_each_alone_does(data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.tuples(NUMBERS, data.draw(STRUCTURES)), min_size=2, max_size=6))
    try:
        schema = Schema.infer(samples)
    except SchemaError:  # As where some lists are None and others have None in them.
        reject()
    assume(not schema.unknown)
    build = schema.make_builder(is_row=True)
    stacked = zip(*(values.rows() for values in schema.stack(samples)), strict=True)
    for sample, row in zip(samples, stacked, strict=True):
        for one, alone in zip(row, schema.flatten(sample), strict=True):
            assert (one.shape, one.numpy().tobytes()) == (alone.shape, alone.numpy().tobytes())
        pairs = zip(schema.fields, row, strict=True)
        assert_equal(build([field.value(leaf) for field, leaf in pairs]), sample)


def test_stacked_values_share_no_memory_with_the_samples() -> None:
    array, tensor = np.zeros((2, 3)), torch.zeros(2, 3)
    for sample in (array, tensor, {"x": array, "y": tensor}):
        for values in Schema.infer([sample]).stack([sample]):
            assert not np.shares_memory(values.data.numpy(), array)
            assert not np.shares_memory(values.data.numpy(), tensor.numpy())


def test_samples_of_which_one_does_not_fit_are_not_stacked() -> None:
    schema = Schema.infer([a_sample(2, 3, "ab", True)], Declared({"array": 1}))
    wrong = {**a_sample(2, 3, "ab", True), "array": np.zeros((2, 4), ">i2")}
    for other in (wrong, {**wrong, "array": [1, 2]}, {**wrong, "array": torch.zeros(2, 3)}):
        with pytest.raises(SchemaError, match="'array"):
            schema.stack([a_sample(2, 3, "ab", True), other])


@pytest.mark.parametrize("to_leaf", [np.asarray, torch.as_tensor])
def test_leaves_whose_sizes_add_up_all_the_same_are_not_stacked(to_leaf: Any) -> None:
    schema = Schema.infer([np.zeros((2, 3), "i2")])
    with pytest.raises(SchemaError, match="field 'value': found"):
        schema.stack([to_leaf(np.zeros((size, 3), "i2")) for size in (1, 3)])


def test_keys_in_another_order_are_the_same_sample() -> None:
    samples = [{"a": 1, "b": 2}, OrderedDict(b=4, a=3)]
    schema = Schema.infer(samples)
    found = [values.data.tolist() for values in stack(Samples(samples), schema.structure)]
    assert found == [[1, 3], [2, 4]]


def test_sizes_may_differ_up_to_the_last_dimension_that_differs() -> None:
    for other, shape in (((3, 3, 5), (None, None, None)), ((3, 3, 4), (None, 3, 4))):
        schema = Schema.infer([torch.zeros(2, 3, 4), torch.zeros(other)])
        assert schema.fields[0].shape == shape
