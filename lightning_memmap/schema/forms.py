"""What a user says about fields: how a batch holds them, and what a build cannot see yet."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from inspect import signature
from reprlib import repr as short_repr
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from typing_extensions import override

from lightning_memmap.errors import check_integer, check_number, is_argument_mismatch
from lightning_memmap.images import CHANNELS, check_mode, parse_size
from lightning_memmap.schema.fields import Field, dtype_name, stored_name
from lightning_memmap.schema.kinds import Bytes

Options = TypeVar("Options", "Pad", "Decode", "Windows")


class FetchedRows(Protocol):
    """The rows of one field in a step, from which a `Layout` makes its part of the batch."""

    def padded(self, value: float, multiple: int) -> Any:
        """Return a `lightning_memmap.loading.Padded`; see `Pad`."""

    def jagged(self) -> Any:
        """Return a nested tensor with ``layout=torch.jagged``."""

    def listed(self) -> Any:
        """Return a `lightning_memmap.loading.RowList` with one tensor, or one text, per row."""


class Layout:
    """How a batch holds rows that differ in length: ``MemmapDataModule(layout={"field": layout})``.

    A new layout is a subclass that implements `batch`. Pass an instance of it.
    """

    #: The name of this layout, as in ``layout={"audio": "pad"}``.
    name: ClassVar[str]

    def check(self, field: Field) -> None:
        """Check that a batch can hold a field in this layout.

        Args:
            field: A field whose rows differ in length, but no text.

        Raises:
            ValueError: It cannot.
        """

    def for_mask(self) -> "Layout":
        """Return the layout of the mask of records that may be None, whose field has this one."""
        return self

    def batch(self, rows: FetchedRows) -> Any:
        """Make what the batch holds for this field.

        Args:
            rows: The rows of one step.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Pad(Layout):
    """Pads rows to the longest of their step: a batch holds a `lightning_memmap.loading.Padded`.

    Args:
        value: What the rows are padded with.
        multiple: The padded length is a multiple of this, at least 1.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``multiple`` is less than 1.
    """

    name = "pad"
    value: float = 0
    multiple: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.value, (bool, int)):
            object.__setattr__(self, "value", check_number("Pad: value", self.value))
        reason = "the padded length is a multiple of this: pass 1 or more"
        multiple = check_integer("Pad: multiple", self.multiple, 1, reason)
        object.__setattr__(self, "multiple", multiple)

    @override
    def check(self, field: Field) -> None:
        try:
            torch.tensor([self.value]).to(field.dtype)
            fits = torch.tensor([self.value], dtype=field.dtype).item() == self.value
        except (RuntimeError, OverflowError):
            fits = False
        # Floating point dtypes round the value.
        is_exact = not (field.dtype.is_floating_point or field.dtype.is_complex)
        if is_exact and not fits:
            raise ValueError(
                f"layout: field {field.name!r} is {dtype_name(field.dtype)}, which cannot hold"
                f" Pad(value={self.value!r}): choose another value"
            )

    @override
    def for_mask(self) -> Layout:
        return replace(self, value=0)

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.padded(self.value, self.multiple)


class Jagged(Layout):
    """Holds rows that differ in one dimension as a nested tensor with ``layout=torch.jagged``."""

    name = "jagged"

    @override
    def check(self, field: Field) -> None:
        if field.num_variable > 1:
            raise ValueError(
                f"layout: field {field.name!r} differs in {field.num_variable} dimensions, and a"
                " jagged tensor in one: choose 'pad' or 'list'"
            )

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.jagged()


class ListOfRows(Layout):
    """Holds rows as a list with one tensor, or one text, for each."""

    name = "list"

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.listed()


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (Pad, Jagged, ListOfRows)}


@dataclass(frozen=True)
class Windows:
    """Windows over rows that are series: ``MemmapDataModule(windows=Windows(...))``.

    Each window is a row of a batch, (length, ...). The windows of a series begin at its steps
    ``0``, ``stride``, ``2 * stride`` and so on, as far as they lie within it: a series that is
    shorter than a window has none. They are views, so nothing is stored twice. The series may
    differ in length, or all have one shape.

    Args:
        fields: The name of the field that is cut into windows, or the names of several, which have
            the same number of steps in each row. Other fields repeat the row of their series.
        length: Steps of a window, at least 1.
        stride: Steps from the beginning of a window to the next one, at least 1. Windows overlap if
            it is less than the length.

    Raises:
        TypeError: A name is not a string, or a number of steps not an integer.
        ValueError: There is no field, a field is named twice, or a number is less than 1.
    """

    fields: str | Sequence[str]
    length: int
    stride: int

    def __post_init__(self) -> None:
        names = check_names("Windows: fields", self.fields)
        if not names:
            raise ValueError("Windows: fields=[]: name at least one field")
        object.__setattr__(self, "fields", names)
        for name in ("length", "stride"):
            steps = check_integer(f"Windows: {name}", getattr(self, name), 1, "at least 1 step")
            object.__setattr__(self, name, steps)


@dataclass(frozen=True)
class Decode:
    """Decodes images that the store keeps as the bytes of JPEG, PNG and other files.

    Threads decode the images of the next step while a step is used. A batch has uint8 of shape
    (B, channels, height, width), as for images that are stored decoded: upright, and without
    transparency unless the mode has it.

    Args:
        mode: ``"RGB"``, ``"RGBA"`` or ``"L"``, grey values, to which images of other modes are
            converted.
        size: Height and width, or one number for both. Each image is scaled to fill them, and what
            sticks out on two sides is cut off. By default all images must have one size.
        num_threads: Threads that decode; by default the cores of this process, or its share of
            them, and at most 16.
        crop: ``"center"``, or ``"random_resized"``: training batches have a random part of each
            image, of 8 to 100 % of its area and with width / height from 3/4 to 4/3, scaled to
            ``size``. It is drawn from seed, epoch and row, alike for all fields. A JPEG is decoded
            at 1/2, 1/4 or 1/8 of its size where that is enough, faster with the package
            ``simplejpeg``. Other batches have the centre.
        with_scale: Let a batch say by how much each image was scaled, and where its corner lies
            then, for boxes and points in pixels of the upright image: it has a
            `lightning_memmap.loading.Scaled` of the images, ``scale`` and ``offset``.

    Raises:
        TypeError: An argument is not a number, or ``with_scale`` not a bool.
        ValueError: An argument is out of range.
    """

    mode: str = "RGB"
    size: tuple[int, int] | None = None
    num_threads: int | None = None
    with_scale: bool = False
    crop: str = "center"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        object.__setattr__(self, "size", parse_size(self.size))
        if self.num_threads is not None:
            given = check_integer("Decode: num_threads", self.num_threads, 1, "at least 1 thread")
            object.__setattr__(self, "num_threads", given)
        if not isinstance(self.with_scale, bool):
            raise TypeError(f"Decode: with_scale={self.with_scale!r}: give True or False")
        if self.crop not in ("center", "random_resized"):
            raise ValueError(f"Decode: crop={self.crop!r}: choose center or random_resized")
        if self.crop != "center" and (self.size is None or self.with_scale):
            raise ValueError(
                f"Decode: crop={self.crop!r} with size={self.size}, with_scale={self.with_scale}:"
                " pass a size, and leave with_scale out"
            )

    def check(self, field: Field) -> None:
        """Raise a ValueError for a field that doesn't hold bytes."""
        if isinstance(field.kind, Bytes) and not field.kind.many:
            return
        raise ValueError(
            f"decode: field {field.name!r} is {field}, not the bytes of image files: if its images"
            " are stored decoded, leave it out; otherwise return bytes in the dataset, such as"
            " pathlib.Path(...).read_bytes()"
        )

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The shape of each image, (channels, height, width); None where the images decide."""
        return None if self.size is None else (CHANNELS[self.mode], *self.size)


@dataclass(frozen=True)
class Declared:
    """What may differ from row to row, where the rows that a build reads first don't show it."""

    #: By name of a field or list, the number of leading dimensions that may differ.
    variable: Mapping[str, int] = field(default_factory=dict)
    #: Fields and containers that may be None.
    nullable: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return self.nullable | self.variable.keys()

    def beyond(self, other: "Declared") -> "Declared":
        """Return what this declares and another one doesn't."""
        variable = {
            name: count
            for name, count in self.variable.items()
            if count != other.variable.get(name)
        }
        return Declared(variable, self.nullable - other.nullable)

    def __str__(self) -> str:
        """Return the arguments of `build_store` that declare this."""
        is_list = all(count == 1 for count in self.variable.values())
        variable = [*self.variable] if is_list else dict(self.variable)
        arguments = [f"variable={variable}"] * bool(variable)
        arguments += [f"nullable={sorted(self.nullable)}"] * bool(self.nullable)
        return ", ".join(arguments)


def read_declared(
    variable: Collection[str] | Mapping[str, int] | None, nullable: Collection[str] | None
) -> Declared:
    """Check the arguments ``variable`` and ``nullable`` of a build."""
    names = frozenset(check_names("nullable", nullable))
    if not isinstance(variable, Mapping):
        return Declared(dict.fromkeys(check_names("variable", variable), 1), names)
    check_names("variable", list(variable))
    why = "the number of leading dimensions that may differ from row to row, at least 1"
    counts = {
        stored_name(name): check_integer(f"variable[{name!r}]", count, 1, why)
        for name, count in variable.items()
    }
    return Declared(counts, names)


def center_crops(decode: Mapping[str, Decode] | None) -> dict[str, Decode]:
    """Return the same decoding with crops in the centre instead of random ones."""
    return {name: replace(value, crop="center") for name, value in (decode or {}).items()}


def check_names(argument: str, names: str | Collection[str] | None) -> tuple[str, ...]:
    """Check names of fields, and return them as they are stored."""
    if names is None:
        return ()
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, (Sequence, Set)) or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument}={short_repr(names)}: pass a list of the names of fields")
    stored = tuple(map(stored_name, listed))
    if len(set(stored)) < len(stored):
        raise ValueError(f"{argument}={short_repr(names)}: a field is named twice")
    return stored


def read_layouts(layout: Mapping[str, Any] | None) -> dict[str, Layout]:
    """Check the argument ``layout``, and return a layout for each name of a field as stored."""
    example = "{'audio': 'pad'}, or {'audio': Pad(value=-1)}"
    return {
        stored_name(name): _layout(name, value)
        for name, value in _check_mapping("layout", layout, example).items()
    }


def _layout(name: str, value: Any) -> Layout:
    if isinstance(value, Layout) and type(value) is not Layout:
        return value
    if isinstance(value, Mapping):
        return _made(Pad, f"layout[{name!r}]", value)
    if isinstance(value, str) and value in LAYOUTS:
        return LAYOUTS[value]()
    raise ValueError(
        f"layout[{name!r}]={short_repr(value)}: choose one of {', '.join(LAYOUTS)}, or pass the"
        " arguments of Pad, such as {'value': -1, 'multiple': 8}"
    )


def read_decode(decode: Mapping[str, Any] | None) -> dict[str, "Decode"]:
    """Check the argument ``decode``, and return a value for each name of a field as stored."""
    example = "{'image': Decode(size=224)}"
    found = {}
    for name, value in _check_mapping("decode", decode, example).items():
        if isinstance(value, Mapping):
            value = _made(Decode, f"decode[{name!r}]", value)
        if not isinstance(value, Decode):
            raise TypeError(f"decode[{name!r}]={short_repr(value)}: pass a Decode, as in {example}")
        found[stored_name(name)] = value
    return found


def read_windows(windows: Any) -> Windows | None:
    """Check the argument ``windows``."""
    if isinstance(windows, Mapping):
        return _made(Windows, "windows", windows)
    if windows is None or isinstance(windows, Windows):
        return windows
    raise TypeError(
        f"windows={short_repr(windows)}: pass Windows(fields=['x'], length=10, stride=5)"
    )


def _check_mapping(argument: str, value: Any, example: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"{argument}={short_repr(value)}: pass a dict by names of fields, such as {example}"
        )
    return value


def _made(kind: type[Options], argument: str, arguments: Mapping[str, Any]) -> Options:
    """Make a value from its arguments in a config."""
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        known = ""
        if is_argument_mismatch(error):  # An argument is missing or unknown.
            known = f": {kind.__name__} has {', '.join(signature(kind).parameters)}"
        raise type(error)(f"{argument}: {error}{known}") from error
