"""The user's options for fields: layouts, windows, decoding, and declared variation."""

from abc import ABC, abstractmethod
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
    """The rows of one field in a step. A `Layout` converts them to its part of the batch."""

    def padded(self, value: float, multiple: int) -> Any:
        """Return a `lightning_memmap.loading.Padded`; see `Pad`."""

    def jagged(self) -> Any:
        """Return a nested tensor with ``layout=torch.jagged``."""

    def listed(self) -> Any:
        """Return a `lightning_memmap.loading.RowList` with one tensor or text per row."""


class Layout(ABC):
    """The form of variable-length rows in a batch: ``MemmapDataModule(layout={"field": layout})``.

    To add a layout, implement `batch` in a subclass and pass an instance of it.
    """

    #: The name of this layout, as in ``layout={"audio": "pad"}``.
    name: ClassVar[str]

    def check(self, field: Field) -> None:  # noqa: B027  # Most layouts support every field.
        """Check that a batch can hold a field in this layout.

        Args:
            field: A field whose rows vary in length. It is never text.

        Raises:
            ValueError: This layout does not support the field.
        """

    def for_mask(self) -> "Layout":
        """Return the layout for the mask of records that may be None, if the records have this."""
        return self

    @abstractmethod
    def batch(self, rows: FetchedRows) -> Any:
        """Convert the rows of one step to the value of the field in the batch."""


@dataclass(frozen=True)
class Pad(Layout):
    """Pads rows to the longest of their step: a batch holds a `lightning_memmap.loading.Padded`.

    Args:
        value: The padding value.
        multiple: Round the padded length up to a multiple of this, at least 1.

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
        # Rounding is fine in floating point dtypes.
        is_exact = not (field.dtype.is_floating_point or field.dtype.is_complex)
        if is_exact and not fits:
            raise ValueError(
                f"layout: field {field.name!r} is {dtype_name(field.dtype)}, which cannot represent"
                f" Pad(value={self.value!r}): choose another value"
            )

    @override
    def for_mask(self) -> Layout:
        return replace(self, value=0)

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.padded(self.value, self.multiple)


class Jagged(Layout):
    """Returns rows that vary in one dimension as a nested tensor with ``layout=torch.jagged``."""

    name = "jagged"

    @override
    def check(self, field: Field) -> None:
        if field.num_variable > 1:
            raise ValueError(
                f"layout: field {field.name!r} varies in {field.num_variable} dimensions, but a"
                " jagged tensor can vary in one only: choose 'pad' or 'list'"
            )

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.jagged()


class ListOfRows(Layout):
    """Returns rows as a list with one tensor or text per row."""

    name = "list"

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.listed()


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Pad, Jagged, ListOfRows)}


@dataclass(frozen=True)
class Windows:
    """Windows over rows that are time series: ``MemmapDataModule(windows=Windows(...))``.

    Each window of shape (length, ...) is a row of a batch. The windows of a series start at steps
    ``0``, ``stride``, ``2 * stride`` and so on, and must fit into the series. A series that is
    shorter than ``length`` has no windows. Windows are views, so no step is stored twice. Series
    may vary in length.

    Args:
        fields: The name of the field to cut into windows, or several names. Several fields must
            have the same number of steps in each row. Every window of a series repeats its other
            fields.
        length: Steps per window, at least 1.
        stride: Steps from the start of one window to the start of the next, at least 1. Windows
            overlap if it is less than ``length``.

    Raises:
        TypeError: A name is not a string, or a number of steps is not an integer.
        ValueError: ``fields`` is empty or names a field twice, or a number is less than 1.
    """

    fields: str | Sequence[str]
    length: int
    stride: int

    def __post_init__(self) -> None:
        names = read_names("Windows: fields", self.fields)
        if not names:
            raise ValueError("Windows: fields=[]: name at least one field")
        object.__setattr__(self, "fields", names)
        for name in ("length", "stride"):
            steps = check_integer(f"Windows: {name}", getattr(self, name), 1, "at least 1 step")
            object.__setattr__(self, name, steps)


@dataclass(frozen=True)
class Decode:
    """Decodes images that are stored as the bytes of JPEG, PNG or other image files.

    Threads decode the images of the next step during the current one. A batch has uint8 of shape
    (B, channels, height, width). Images are rotated upright as their EXIF data says, and have no
    transparency unless ``mode`` includes it.

    Args:
        mode: ``"RGB"``, ``"RGBA"`` or ``"L"`` (greyscale). Images of other modes are converted.
        size: Height and width in pixels, or one number for both. Each image is scaled to cover this
            size, then cropped to it. By default, all images must have the same size.
        num_threads: Decoding threads. By default, the cores of this process, or its fraction of
            them if several processes use them, at most 16.
        crop: ``"center"``, or ``"random_resized"``: training batches have a random crop of each
            image, with 8 to 100 % of its area and an aspect ratio (width / height) from 3/4 to 4/3,
            scaled to ``size``. It is drawn from seed, epoch and row, and is the same in all fields.
            JPEG files are decoded at 1/2, 1/4 or 1/8 of their size if that is enough; the package
            ``simplejpeg`` makes this faster. Other batches have centre crops.
        with_scale: Return a `lightning_memmap.loading.Scaled` with the images, and their ``scale``
            and ``offset``. These convert boxes and points in pixels of the upright image.

    Raises:
        TypeError: A number has the wrong type, or ``with_scale`` is not a bool.
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
            threads = check_integer("Decode: num_threads", self.num_threads, 1, "at least 1 thread")
            object.__setattr__(self, "num_threads", threads)
        if not isinstance(self.with_scale, bool):
            raise TypeError(f"Decode: with_scale={self.with_scale!r}: pass True or False")
        if self.crop not in ("center", "random_resized"):
            raise ValueError(f"Decode: crop={self.crop!r}: choose center or random_resized")
        if self.crop != "center" and (self.size is None or self.with_scale):
            raise ValueError(
                f"Decode: crop={self.crop!r} with size={self.size}, with_scale={self.with_scale}:"
                " pass a size, and leave with_scale out"
            )

    def check(self, field: Field) -> None:
        """Raise a ValueError if a field does not hold bytes."""
        if isinstance(field.kind, Bytes) and not field.kind.many:
            return
        raise ValueError(
            f"decode: field {field.name!r} is {field}, not the bytes of image files. If its images"
            " are stored decoded, leave it out; otherwise return bytes in the dataset, such as"
            " pathlib.Path(...).read_bytes()"
        )

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of each decoded image; None without ``size``."""
        return None if self.size is None else (CHANNELS[self.mode], *self.size)


@dataclass(frozen=True)
class Declared:
    """The user's declaration of variable and nullable fields.

    A build infers both from the first rows, which may not show all variation.
    """

    #: The number of leading dimensions that may vary, by the name of a field or list.
    variable: Mapping[str, int] = field(default_factory=dict)
    #: Fields and containers that may be None.
    nullable: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names of all declared fields and containers."""
        return self.nullable | self.variable.keys()

    def union(self, other: "Declared") -> "Declared":
        """Return the declarations of both. The counts of ``other`` replace those here."""
        return Declared({**self.variable, **other.variable}, self.nullable | other.nullable)

    def beyond(self, other: "Declared") -> "Declared":
        """Return the declarations that are missing or different in ``other``."""
        variable = {
            name: count
            for name, count in self.variable.items()
            if count != other.variable.get(name)
        }
        return Declared(variable, self.nullable - other.nullable)

    def __str__(self) -> str:
        """Format this as arguments of `build_store`."""
        is_list = all(count == 1 for count in self.variable.values())
        variable = [*self.variable] if is_list else dict(self.variable)
        arguments = [f"variable={variable}"] * bool(variable)
        arguments += [f"nullable={sorted(self.nullable)}"] * bool(self.nullable)
        return ", ".join(arguments)


def read_declared(
    variable: Collection[str] | Mapping[str, int] | None, nullable: Collection[str] | None
) -> Declared:
    """Check the arguments ``variable`` and ``nullable`` of a build."""
    names = frozenset(read_names("nullable", nullable))
    if not isinstance(variable, Mapping):
        return Declared(dict.fromkeys(read_names("variable", variable), 1), names)
    read_names("variable", list(variable))
    why = "the number of leading dimensions that may vary from row to row, at least 1"
    counts = {
        stored_name(name): check_integer(f"variable[{name!r}]", count, 1, why)
        for name, count in variable.items()
    }
    return Declared(counts, names)


def use_center_crops(decode: Mapping[str, Decode] | None) -> dict[str, Decode]:
    """Replace random crops by centre crops."""
    return {name: replace(value, crop="center") for name, value in (decode or {}).items()}


def read_names(argument: str, names: str | Collection[str] | None) -> tuple[str, ...]:
    """Check an argument of names of fields, and return the stored names."""
    if names is None:
        return ()
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, (Sequence, Set)) or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument}={short_repr(names)}: pass a list of field names")
    stored = tuple(map(stored_name, listed))
    if len(set(stored)) < len(stored):
        raise ValueError(f"{argument}={short_repr(names)}: name each field once")
    return stored


def read_layouts(layout: Mapping[str, Any] | None) -> dict[str, Layout]:
    """Check the argument ``layout``, and return the layouts by stored field name."""
    example = "{'audio': 'pad'}, or {'audio': Pad(value=-1)}"
    return {
        stored_name(name): _read_layout(name, value)
        for name, value in _check_mapping("layout", layout, example).items()
    }


def _read_layout(name: str, value: Any) -> Layout:
    if isinstance(value, Layout) and type(value) is not Layout:
        return value
    if isinstance(value, Mapping):
        return _create(Pad, f"layout[{name!r}]", value)
    if isinstance(value, str) and value in LAYOUTS:
        return LAYOUTS[value]()
    raise ValueError(
        f"layout[{name!r}]={short_repr(value)}: choose one of {', '.join(LAYOUTS)}, or pass the"
        " arguments of Pad, such as {'value': -1, 'multiple': 8}"
    )


def read_decode(decode: Mapping[str, Any] | None) -> dict[str, "Decode"]:
    """Check the argument ``decode``, and return its values by stored field name."""
    example = "{'image': Decode(size=224)}"
    decoders = {}
    for name, value in _check_mapping("decode", decode, example).items():
        if isinstance(value, Mapping):
            value = _create(Decode, f"decode[{name!r}]", value)
        if not isinstance(value, Decode):
            raise TypeError(f"decode[{name!r}]={short_repr(value)}: pass a Decode, as in {example}")
        decoders[stored_name(name)] = value
    return decoders


def read_windows(windows: Any) -> Windows | None:
    """Check the argument ``windows``, which may be a dict from a config."""
    if isinstance(windows, Mapping):
        return _create(Windows, "windows", windows)
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
            f"{argument}={short_repr(value)}: pass a dict with field names as keys, such as"
            f" {example}"
        )
    return value


def _create(options: type[Options], argument: str, keywords: Mapping[str, Any]) -> Options:
    """Create an option from its keywords in a config."""
    try:
        return options(**keywords)
    except (TypeError, ValueError) as error:
        advice = ""
        if is_argument_mismatch(error):  # A keyword is missing or unknown.
            parameters = ", ".join(signature(options).parameters)
            advice = f". {options.__name__} has the parameters {parameters}"
        raise type(error)(f"{argument}: {error}{advice}") from error
