import collections
import dataclasses
import enum
import io
import json
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.masked import masked_tensor
from torch.utils.data import default_collate

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import DTYPES, Field, RowList, field_name
from lightning_memmap.schema.schema import Schema
from tests.programs.reliability.manifest_fuzz import places
from tests.support.datasets import assert_same, texts
from tests.support.store.schemas import read_schema, to_json


class Colour(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Example:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Checked:
    """A class whose own checks hold for one sample and not for a batch."""

    score: Any

    def __post_init__(self) -> None:
        if isinstance(self.score, Tensor) and self.score.ndim:
            raise ValueError("one score only")


def stacked(schema: Schema, samples: list[Any]) -> list[Tensor]:
    """One batch tensor per field, as a take makes them."""
    rows = [[torch.as_tensor(leaf) for leaf in schema.flatten(sample)] for sample in samples]
    return [torch.stack(leaves) for leaves in zip(*rows, strict=True)]


def as_dict(sample: Any) -> Any:
    """Other mappings become dicts."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def names_of(schema: Schema) -> list[str]:
    return [field.name for field in schema.fields]


# Nesting

MakeSample = Callable[[int], Any]

COLLATED: dict[str, tuple[MakeSample, list[str]]] = {
    "tensor": (lambda i: torch.full((2, 3), i), ["value"]),
    "array": (lambda i: np.full((2, 3), i, np.uint8), ["value"]),
    "scalar array": (lambda i: np.float32(i), ["value"]),
    "int": (lambda i: i, ["value"]),
    "float": (lambda i: i / 2, ["value"]),
    "bool": (lambda i: i % 2 == 0, ["value"]),
    "tuple": (lambda i: (torch.tensor([i]), i), ["0", "1"]),
    "list": (lambda i: [torch.tensor([i]), i], ["0", "1"]),
    "tuple of one": (lambda i: (i,), ["0"]),
    "dict": (lambda i: {"image": torch.tensor([i]), "label": i}, ["image", "label"]),
    "dict not sorted": (lambda i: {"z": i, "a": i / 2}, ["z", "a"]),
    "dict of int keys": (lambda i: {3: i, 0: -i}, ["3", "0"]),
    "namedtuple": (lambda i: Pair(torch.tensor([i]), i), ["image", "label"]),
    "nested": (
        lambda i: {"views": (torch.tensor([i]), [i, {"x": i / 2}]), "pair": Pair(i, (i, i))},
        ["views.0", "views.1.0", "views.1.1.x", "pair.image", "pair.label.0", "pair.label.1"],
    ),
    "empty containers": (lambda i: ({}, i), ["1"]),
    "ordered dict": (lambda i: collections.OrderedDict(b=i, a=-i), ["b", "a"]),
    "proxy": (lambda i: types.MappingProxyType({"b": i, "a": -i}), ["b", "a"]),
}


@pytest.mark.parametrize("kind", COLLATED)
def test_builder_any_nesting_equals_default_collate(kind: str) -> None:
    make, names = COLLATED[kind]
    samples = [make(i) for i in range(5)]
    schema = Schema.infer([samples[0]])
    assert names_of(schema) == names
    leaves, expected = stacked(schema, samples), default_collate(list(map(as_dict, samples)))
    assert_same(schema.make_builder(samples[0])(leaves), expected)
    # Without a sample, from a manifest, classes are made that look alike.
    again = read_schema(json.loads(json.dumps(to_json(schema))))
    batch = again.make_builder()(leaves)
    if kind == "namedtuple":
        assert (type(batch).__name__, batch._fields) == ("Pair", ("image", "label"))
        batch, expected = list(batch), list(expected)
    elif kind == "nested":
        assert batch["pair"]._fields == ("image", "label")
        batch["pair"], expected["pair"] = list(batch["pair"]), list(expected["pair"])
    assert_same(batch, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: list(range(i, i + 1200)),
        lambda i: tuple(i + k / 7 for k in range(16)),
        lambda i: [np.float32(i * k) for k in range(16)],
    ],
)
def test_builder_many_numbers_are_one_tensor(make: MakeSample) -> None:
    samples = [{"x": make(i)} for i in range(5)]
    schema = Schema.infer([samples[0]])
    batch = schema.make_builder(samples[0])(stacked(schema, samples))
    expected = torch.stack(default_collate([list(sample["x"]) for sample in samples]), 1)
    assert_same(batch, {"x": expected})


def test_builder_dataclass_keeps_its_class_or_looks_alike() -> None:
    samples = [Checked(0.5), Checked(1.5)]  # Their own check does not hold for a batch.
    schema = Schema.infer(samples)
    for sample in (samples[0], None):
        batch = schema.make_builder(sample)(stacked(schema, samples))
        assert (type(batch) is Checked) == (sample is not None)
        assert type(batch).__name__ == "Checked"
        assert [field.name for field in dataclasses.fields(batch)] == ["score"]
        assert batch.score.tolist() == [0.5, 1.5]


# Lists of numbers


@pytest.mark.parametrize(
    "sample",
    [
        list(range(15)),
        [1.5, *range(15)],
        [True, *range(15)],
        [torch.ones(1)] * 16,
        [torch.tensor(1.0), *[0.5] * 15],
        collections.namedtuple("Many", [f"f{k}" for k in range(16)])(*range(16)),
    ],
    ids=["fewer", "int and float", "int and bool", "vectors", "float32 and float64", "namedtuple"],
)
def test_numbers_that_are_few_or_not_alike_are_a_field_each(sample: Any) -> None:
    assert len(Schema.infer([sample]).fields) == len(sample)


@pytest.mark.parametrize(
    "row",
    [
        tuple(range(16)),
        [np.int64(k) for k in range(16)],
        [torch.tensor(0), *range(1, 16)],
        [Number.ONE - 1, *map(int, range(1, 16))],
        np.arange(16),
    ],
    ids=["tuple", "numpy", "tensor among them", "subclass", "array"],
)
def test_numbers_of_the_same_dtype_in_another_row_are_the_same_field(row: Any) -> None:
    schema = Schema.infer([[0] * 16])
    (found,) = schema.flatten(row)
    assert torch.as_tensor(found).tolist() == list(range(16))
    assert schema.fields == (Field("value", torch.int64, (16,)),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5] * 16, r"found float64 \(16,\), expected int64 \(16,\)"),
        ([0] * 15, r"found int64 \(15,\), expected int64 \(16,\)"),
        ([0.5, *range(15)], "found a list of float, int, expected numbers of one dtype"),
        ([2**63] * 16, "found an integer that does not fit into int64"),
        ([], r"found int64 \(0,\), expected"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_their_field_named(row: Any, message: str) -> None:
    schema = Schema.infer([{"tokens": [0] * 16}])
    with pytest.raises(SchemaError, match=f"field 'tokens': {message}"):
        schema.flatten({"tokens": row})


# Names


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("image", "image"),
        (-1, "-1"),
        ("a.b", "a~2Eb"),
        ("../../etc/passwd", "~2E~2E~2F~2E~2E~2Fetc~2Fpasswd"),
        ("/", "~2F"),
        ("\0", "~00"),
        ("", "~"),
        ("km/h", "km~2Fh"),
        ("größe, 年龄, नाम", "größe, 年龄, नाम"),
        ("\x1b[31m", "~1B~5B31m"),
        ("\u202e", "~E2~80~AE"),
        ("\ud800", "~ED~A0~80"),
    ],
)
def test_field_name_any_key_is_one_safe_file_name(key: str | int, name: str) -> None:
    schema = Schema.infer([{key: 1, "other": {key: 2}}])
    assert names_of(schema) == [name, f"other.{name}"]
    assert read_schema(json.loads(json.dumps(to_json(schema)))) == schema


@given(st.lists(texts(6), min_size=1, max_size=6, unique_by=str.casefold))
def test_field_name_different_keys_have_different_names_without_separators(
    keys: list[str],
) -> None:
    names = names_of(Schema.infer([dict.fromkeys(keys, 1)]))
    assert len(set(names)) == len(keys)
    for name in names:
        assert name not in ("", ".", "..")
        assert Path(name).name == name
        assert name.isprintable()


@pytest.mark.parametrize(
    "sample",
    [{"image": 1, "Image": 2}, {1: 1, "1": 2}, {"a": {"b": 1}, "A": {"B": 2}}],
)
def test_field_names_that_share_a_file_are_refused(sample: Any) -> None:
    with pytest.raises(SchemaError, match="differ only in case"):
        Schema.infer([sample])


def test_field_with_the_name_of_a_mask_is_refused() -> None:
    one, other = {"a": {"mask": 1}}, {"a": None}
    for samples in ([one, other], [other, one]):
        with pytest.raises(SchemaError, match=r"'a.mask' .*mask of an optional field"):
            Schema.infer(samples)


def test_field_name_too_long_for_a_file_is_refused() -> None:
    assert names_of(Schema.infer([{"k" * 234: 1}])) == ["k" * 234]
    with pytest.raises(SchemaError, match="longer than the 234 bytes"):
        Schema.infer([{"é" * 118: 1}])
    with pytest.raises(SchemaError, match="longer than the 234 bytes"):
        Schema.infer([{"k" * 200: {"k" * 100: 1}}])


@pytest.mark.parametrize("key", [True, 1.5, None, (1, 2), b"a", Colour.RED, Number.ONE])
def test_dict_key_that_json_cannot_give_back_is_refused(key: Any) -> None:
    with pytest.raises(SchemaError, match=r"dict key .* is neither a plain string nor a plain"):
        Schema.infer([{"outer": {key: 1}}])


def test_sample_without_leaf_is_refused() -> None:
    for sample in ((), [], {}, [{}, {}], None):
        with pytest.raises(SchemaError, match=r"holds no tensor|the sample is None"):
            Schema.infer([sample])


def test_sample_nested_too_deeply_is_refused() -> None:
    sample: Any = 1
    for _ in range(32):
        sample = [sample]
    assert Schema.infer([sample]).fields[0].name == ".".join(["0"] * 32)
    endless: list[Any] = []
    endless.append(endless)
    for deep in ([sample], endless):
        with pytest.raises(SchemaError, match="nested deeper than 32 levels"):
            Schema.infer([deep])


# Leaves


@pytest.mark.parametrize(
    ("leaf", "dtype", "shape"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.bfloat16, (2, 3)),
        (torch.zeros(0, 3), torch.float32, (0, 3)),
        (np.zeros((2, 3), np.uint16), torch.uint16, (2, 3)),
        (np.zeros(2, np.longlong), torch.int64, (2,)),
        (np.zeros(2, ">f4"), torch.float32, (2,)),
        (np.int8(1), torch.int8, ()),
        (True, torch.bool, ()),
        (-(2**63), torch.int64, ()),
        (1j, torch.complex128, ()),
    ],
)
def test_leaf_is_described_as_it_is(leaf: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    schema = Schema.infer([leaf])
    assert schema.fields == (Field("value", dtype, shape),)
    assert schema.fields[0].row_bytes == torch.empty(shape, dtype=dtype).nbytes


with warnings.catch_warnings():
    # That their classes may change.
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    RAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    STRIDED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    MASKED = masked_tensor(torch.ones(2), torch.tensor([True, False]))

REFUSED = {
    "masked array": np.ma.array([1, 2], mask=[False, True]),
    "masked tensor": MASKED,
    "quantized tensor": QUANTIZED,
    "nested tensor": RAGGED,
    "durations without a unit": np.array([3]).view("timedelta64"),
    "palette": Image.new("P", (2, 2)),
    "many numbers beyond int64": [2**63] * 16,
    "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "object array": np.array([object()]),
    "text array": np.array(["a", "b"]),
    "missing time": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    "long double": np.zeros(2, np.longdouble),
    "sparse": torch.eye(3).to_sparse(),
    "number beyond int64": 2**63,
    "class": Example,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_leaf_that_cannot_be_stored_is_refused_with_its_field(kind: str) -> None:
    for refused in (lambda sample: Schema.infer([sample]), Schema.infer([{"x": (1, 1)}]).flatten):
        with pytest.raises(SchemaError, match=r"field 'x\.1': "):
            refused({"x": (1, REFUSED[kind])})


def test_image_that_cannot_be_decoded_is_refused_and_its_field_named() -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    truncated = Image.open(io.BytesIO(file.getvalue()[:1000]))
    with pytest.raises(SchemaError, match=r"field .x.: the image cannot be read: .*truncated"):
        Schema.infer([{"x": truncated}])


BASE = {"image": torch.zeros(3, 4, dtype=torch.uint8), "label": (1, 2.0)}


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (
            {"image": torch.zeros(3, 5, dtype=torch.uint8), "label": (1, 2.0)},
            [r"'image'", r"uint8 \(3, 5\)", r"expected uint8 \(3, 4\)"],
        ),
        (
            {"image": torch.zeros(3, 4), "label": (1, 2.0)},
            [r"'image'", r"float32 \(3, 4\)", r"expected uint8 \(3, 4\)"],
        ),
        (
            {"image": BASE["image"], "label": (1, 2)},
            [r"'label\.1'", r"int64 \(\)", r"expected float64 \(\)"],
        ),
        (
            {"image": BASE["image"], "label": (1, 2.0, 3)},
            [r"'label'", r"found tuple of \[0, 1, 2\]", r"expected \[0, 1\]"],
        ),
        ({"image": BASE["image"]}, ["the sample", r"found dict of \['image'\]", "'label'"]),
    ],
)
def test_flatten_sample_that_does_not_fit_names_field_found_and_expected(
    sample: Any, named: list[str]
) -> None:
    schema = Schema.infer([BASE])
    with pytest.raises(SchemaError, match=".*".join(named)):
        schema.flatten(sample)


def test_flatten_image_of_another_mode_with_same_shape_is_refused() -> None:
    schema = Schema.infer([Image.new("RGB", (5, 4))])
    with pytest.raises(SchemaError, match=r"\(YCbCr image\), expected .*\(RGB image\)"):
        schema.flatten(Image.new("YCbCr", (5, 4)))


# JSON

LEAVES = st.one_of(
    st.sampled_from(list(DTYPES.values())).flatmap(
        lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
            lambda shape: torch.zeros(shape, dtype=dtype)
        )
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.sampled_from([np.zeros(2, np.float16), np.int16(1), Image.new("RGB", (2, 1))]),
)
# No upper-case letters: keys that differ in case alone are refused.
KEYS = st.text(alphabet="ab_.~/% é\0", max_size=3)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(st.integers(-5, 5), children, max_size=3),
        st.builds(Pair, children, children),
        st.builds(Example, children, children),
        st.builds(Checked, st.integers(0, 9)),
        st.lists(st.floats(), min_size=16, max_size=18),
    )


SAMPLES = st.tuples(LEAVES, st.recursive(LEAVES, containers, max_leaves=8))


@given(SAMPLES)
def test_json_any_schema_comes_back_equal(sample: Any) -> None:
    schema = Schema.infer([sample])
    text = json.dumps(to_json(schema))
    again = read_schema(json.loads(text))
    assert again == schema
    assert json.dumps(to_json(again)) == text


@given(SAMPLES)
def test_builder_any_sample_gives_back_the_leaves_in_their_places(sample: Any) -> None:
    schema = Schema.infer([sample])
    leaves = [torch.full(field.shape or (1,), index) for index, field in enumerate(schema.fields)]
    for built in (schema.make_builder(sample)(leaves), schema.make_builder()(leaves)):
        again = Schema.infer([built])
        assert names_of(again) == names_of(schema)
        for found, expected in zip(again.flatten(built), leaves, strict=True):
            assert torch.equal(torch.as_tensor(found), expected)


# Batches of rows


def test_from_batch_describes_one_row() -> None:
    batch = {"a": torch.zeros(5, 3, 2, dtype=torch.bfloat16), "b": (torch.zeros(5) > 0, [])}
    schema = Schema.from_batch(batch)
    assert schema.fields == (
        Field("a", torch.bfloat16, (3, 2)),
        Field("b.0", torch.bool, ()),
    )
    assert schema.structure == Schema.infer([{"a": batch["a"][0], "b": (True, [])}]).structure


def test_stack_batch_gives_the_tensors_in_the_order_of_the_fields() -> None:
    schema = Schema.from_batch({"a": torch.zeros(2), "b": torch.zeros(2, 3)})
    a, b = torch.arange(4.0, requires_grad=True), torch.ones(4, 3)
    found = schema.stack_batch({"b": b, "a": a})
    assert torch.equal(found[0].data, a)
    assert not found[0].data.requires_grad
    assert torch.equal(found[1].data, b)
    texts_too = {"a": torch.zeros(2), "text": RowList(["a", "bc"])}
    with pytest.raises(SchemaError, match=r"'text' has 0 rows, .*'a' has 2"):
        Schema.from_batch(texts_too).stack_batch({**texts_too, "text": RowList()})
    values = torch.tensor([1 + 2j, 3 - 1j])
    (conjugate,) = Schema.from_batch(values).stack_batch(values.conj())
    assert conjugate.data.tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(2), "text"], "field '1': found str"),
        ({"n": 3}, "field 'n': found int"),
        ({"n": torch.tensor(3)}, "field 'n': found a tensor without dimensions"),
        ([], "holds no tensor"),
        ({"b": STRIDED}, r"field 'b': .* layout=torch.jagged"),
    ],
)
def test_from_batch_of_no_rows_raises_schema_error(batch: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_batch(batch)
    # As where only the last batch has one row, and loses a dimension.
    if isinstance(batch, dict) and "float8" not in message:
        with pytest.raises(SchemaError, match=message):
            Schema.from_batch(dict.fromkeys(batch, torch.zeros(3))).stack_batch(batch)


def valid_json() -> Any:
    sample = {"image": torch.zeros(3, 4), "pair": Pair(1, 2), "example": Example(1, (2, 3))}
    value = json.loads(json.dumps(to_json(Schema.infer([sample]))))
    read_schema(value)
    return value


def leaf_json(name: str) -> Any:
    return {"kind": "leaf", "field": {"name": name, "dtype": "int64", "shape": []}}


def one_leaf(key: str) -> Any:
    """A structure of a dict with one leaf."""
    structure = {"kind": "dict", "keys": [key], "children": [leaf_json(key)]}
    return {"structure": structure}


def with_container(kind: str, keys: list[Any], name: Any = "Sample") -> Any:
    """A structure of one container of leaves, whose fields are named as the keys."""
    return {
        "structure": {
            "kind": kind,
            "keys": keys,
            "name": name if kind in ("namedtuple", "dataclass") else "",
            "children": [leaf_json(field_name((key,))) for key in keys],
        },
    }


def edited(*path: Any, value: Any) -> Any:
    root = valid_json()
    place = root
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return root


def nested(depth: int) -> Any:
    structure = leaf_json(".".join(["0"] * depth))
    for _ in range(depth):
        structure = {"kind": "list", "keys": [0], "children": [structure]}
    return {"structure": structure}


FIRST = ("structure", "children", 0, "field")
SECOND = ("structure", "children", 1, "children", 0, "field")


HOSTILE = {
    "not a dict": [],
    "empty": {},
    "field is a text": edited(*FIRST, value="image"),
    "leaf without a field": edited(*FIRST, value=None),
    "leaf with a mask": edited(*FIRST[:-1], "mask", value="image.mask"),
    "leaf with keys": edited(*FIRST[:-1], "keys", value=["a"]),
    "container with a field": edited("structure", "field", value=leaf_json("value")["field"]),
    "list outside of a list": edited(*FIRST, "kind", value={"type": "text", "many": True}),
    "unknown dtype": edited(*FIRST, "dtype", value="float8_e4m3fn"),
    "attribute of torch as dtype": edited(*FIRST, "dtype", value="load"),
    "negative size": edited(*FIRST, "shape", value=[-1]),
    "huge size": edited(*FIRST, "shape", value=[2**40]),
    "null as size": edited(*FIRST, "shape", value=[3, None]),
    "kind is missing": edited(*FIRST, "kind", value=None),
    "duplicate names": edited(*SECOND, "name", value="image"),
    "name with a slash": edited(*FIRST, "name", value="a/b"),
    "name that points up": edited(*FIRST, "name", value=".."),
    "absolute name": edited(*FIRST, "name", value="/etc/passwd"),
    "name that is no leaf": edited(*FIRST, "name", value="other"),
    "unknown container": edited("structure", "kind", value="set"),
    "too few keys": edited("structure", "keys", value=["image"]),
    "bool as key": with_container("dict", [True]),
    "duplicate keys": with_container("dict", ["a", "a"]),
    "keys that differ in case": with_container("dict", ["a", "A"]),
    "positions out of order": with_container("tuple", [1, 0]),
    "too deep": nested(33),
    "much too deep": nested(400),
    "code as field of a named tuple": with_container("namedtuple", ['__import__("os")']),
    "code as field of a dataclass": with_container("dataclass", ['__import__("os")']),
    "code as name of a named tuple": with_container("namedtuple", ["a"], '__import__("os")'),
    "keyword in a named tuple": with_container("namedtuple", ["class"]),
    "private field of a named tuple": with_container("namedtuple", ["_a"]),
    "duplicate fields of a dataclass": with_container("dataclass", ["a", "a"]),
    "null byte in a name": with_container("dataclass", ["a"], "A\0B"),
    "terminal codes as mode": edited(*FIRST, "kind", value={"type": "image", "mode": "\x1b[2J"}),
    "kind of nothing": edited(*FIRST, "kind", value={"type": "nothing"}),
    "name too long": with_container("dict", ["k" * 235]),
    "lone surrogate": edited(*FIRST, "name", value="\ud800"),
    "twins of one name": with_container("namedtuple", ["ﬁ", "fi"]),
    "name that Python reads as another": with_container("dataclass", ["ﬁ", "b"]),
    "terminal codes as class": with_container("dataclass", ["a"], "\x1b"),
    "many dimensions": edited(*FIRST, "shape", value=[1] * 64 + [4]),
}


def test_json_edited_value_is_valid_without_the_edit() -> None:
    # What the table below rests on: each entry is refused for its one edit.
    for value in (
        one_leaf("a"),
        with_container("dict", ["a", "b"]),
        with_container("namedtuple", ["a", "b"]),
        with_container("dataclass", ["a", "b"]),
        with_container("tuple", [0, 1]),
        with_container("dict", ["k" * 234]),
        nested(32),
    ):
        assert isinstance(read_schema(value), Schema)


@pytest.mark.parametrize("kind", HOSTILE)
def test_json_hostile_value_raises_schema_error(kind: str) -> None:
    with pytest.raises(SchemaError):
        read_schema(HOSTILE[kind])


def test_json_hostile_class_name_is_text_alone(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    name = f'__import__("pathlib").Path({str(mark)!r}).touch()'
    schema = read_schema(with_container("dataclass", ["a"], name))
    built = schema.make_builder()([torch.ones(1)])
    assert type(built).__name__ == name
    assert repr(built).startswith(name)
    assert not mark.exists()


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts(8)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(texts(8), children, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data(), JSON_VALUES)
def test_json_any_value_replaced_is_refused_or_a_sound_schema(
    data: st.DataObject, value: Any
) -> None:
    root = valid_json()
    container, key = data.draw(st.sampled_from(places(root)))
    siblings = [other[key] for other, name in places(root) if name == key]
    container[key] = data.draw(st.one_of(st.just(value), st.sampled_from(siblings)))
    try:
        schema = read_schema(root)
    except SchemaError:
        return
    assert read_schema(to_json(schema)) == schema
    leaves = [torch.tensor([index]) for index in range(len(schema.fields))]
    assert names_of(Schema.infer([schema.make_builder()(leaves)])) == names_of(schema)
