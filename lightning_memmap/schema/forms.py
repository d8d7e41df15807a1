"""Forms: how a batch gives a field whose rows differ in length or are encoded images, and what to
expect of its rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from reprlib import repr as short_repr
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from lightning_memmap.errors import check_integer, check_number, is_argument_mismatch
from lightning_memmap.images import CHANNELS, check_mode, parse_size
from lightning_memmap.schema.fields import Field, dtype_name, name_as_stored
from lightning_memmap.schema.kinds import Bytes


class FetchedRows(Protocol):
    """The rows of one field in a step, of which a `Form` makes what the batch has for them."""

    def padded(self, value: float, multiple: int) -> Any:
        """A `lightning_memmap.loading.Padded`; see `Pad`."""

    def jagged(self) -> Any:
        """A nested tensor of torch, with ``layout=torch.jagged``."""

    def listed(self) -> Any:
        """A `lightning_memmap.schema.RowList` with one tensor, or one text, for each row."""

    def decoded(self, form: "Decode") -> Any:
        """Images, uint8 of shape (B, channels, height, width)."""


class Form:
    """How a batch gives a field, for ``MemmapDataModule(variable={"field": form})``.

    `Pad`, `Jagged` and `Rows` are for rows that differ in length, `Windows` for series, `Decode`
    for bytes that are images, and `Nullable` for rows that may be None. A new one is a class like
    these, and its name in ``_FORMS``.
    """

    #: The name of this form, as in ``variable={"audio": "pad"}``.
    name: ClassVar[str]
    #: Whether all rows of the field may have one shape.
    takes_one_shape: ClassVar[bool] = False
    #: Whether it is for bytes, one in each row. Others leave texts and bytes as they are.
    takes_bytes: ClassVar[bool] = False
    #: Whether a batch gives the field as it does without a form.
    is_default: ClassVar[bool] = False
    #: Leading dimensions that may differ from row to row, and whether rows may be None.
    dims: int = 0
    nullable: bool = False

    def check(self, field: Field) -> None:
        """Check that batches can give a field in this form.

        Args:
            field: The field.

        Raises:
            ValueError: They cannot.
        """
        if field.is_text:
            raise ValueError(
                f"variable: field {field.name!r} is {field.kind}, which batches give as a list in"
                " any case: leave it out"
            )
        if not (field.num_variable or self.takes_one_shape):
            raise ValueError(
                f"variable: in the store, all rows of field {field.name!r} have the shape"
                f" {field.shape}: leave it out, or build the store again with overwrite=True"
            )

    def of_mask(self) -> "Form":
        """The form of a mask beside a field that has this form: where the field has values."""
        return self

    def batch(self, rows: FetchedRows) -> Any:
        """Make what a batch has for some rows.

        Args:
            rows: The rows of one step.
        """
        return rows.listed()


@dataclass(frozen=True)
class _Variable(Form):
    """A form of rows that differ in length, with the arguments that all of these have."""

    dims: int = 1
    nullable: bool = False

    def __post_init__(self) -> None:
        name, reason = type(self).__name__, "at least 1 dimension differs from row to row"
        object.__setattr__(self, "dims", check_integer(f"{name}: dims", self.dims, 1, reason))
        if not isinstance(self.nullable, bool):
            raise TypeError(f"{name}: nullable={self.nullable!r}: give True or False")


@dataclass(frozen=True)
class Pad(_Variable):
    """Pads rows that differ in length: a batch has a `lightning_memmap.loading.Padded`.

    Rows are padded to the longest one of their step.

    Args:
        dims: Leading dimensions that may differ from row to row, at least 1. Needed only while the
            store is built, if the first rows that are read do not show it.
        nullable: Whether rows may be None. Needed only while the store is built, if the first rows
            that are read do not show it.
        value: What the rows are padded with.
        multiple: The padded length is a multiple of this, at least 1.
    """

    name = "pad"
    value: float = 0
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value, (bool, int)):
            object.__setattr__(self, "value", check_number("Pad: value", self.value))
        reason = "the padded length is a multiple of this: give 1 or more"
        multiple = check_integer("Pad: multiple", self.multiple, 1, reason)
        object.__setattr__(self, "multiple", multiple)

    @override
    def check(self, field: Field) -> None:
        super().check(field)
        try:
            torch.tensor([self.value]).to(field.dtype)
            fits = torch.tensor([self.value], dtype=field.dtype).item() == self.value
        except (RuntimeError, OverflowError):
            fits = False
        # Others round what they are padded with.
        is_exact = not (field.dtype.is_floating_point or field.dtype.is_complex)
        if is_exact and not fits:
            raise ValueError(
                f"variable: field {field.name!r} is {dtype_name(field.dtype)}, which does not have"
                f" the value {self.value!r} to pad with: choose another value"
            )

    @override
    def of_mask(self) -> Form:
        # What the values are padded with is no value of a mask.
        return replace(self, value=0)

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.padded(self.value, self.multiple)


@dataclass(frozen=True)
class Jagged(_Variable):
    """Gives rows that differ in one dimension as a nested tensor with ``layout=torch.jagged``.

    Args:
        dims: As of `Pad`.
        nullable: As of `Pad`.
    """

    name = "jagged"

    @override
    def check(self, field: Field) -> None:
        super().check(field)
        if field.num_variable > 1:
            raise ValueError(
                f"variable: field {field.name!r} differs in {field.num_variable} dimensions, and a"
                " jagged tensor in one: choose 'pad' or 'list'"
            )

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.jagged()


@dataclass(frozen=True)
class Rows(_Variable):
    """Gives rows that differ in length as a list with one tensor for each row.

    Args:
        dims: As of `Pad`.
        nullable: As of `Pad`.
    """

    name = "list"


@dataclass(frozen=True)
class Windows(Form):
    """Cuts rows that are series into windows of one length, each of which is a row of a batch.

    The windows of a series begin at its steps ``0``, ``stride``, ``2 * stride`` and so on, as far
    as they lie within it: a series that is shorter than a window has none. They are views, so
    nothing is stored twice. All fields of the split that are cut have the same windows. The rows
    may differ in length, or all have one shape.

    Args:
        length: Steps of a window, at least 1.
        stride: Steps from the beginning of a window to that of the next one, at least 1. Windows
            overlap if it is less than the length.
    """

    name = "windows"
    takes_one_shape = True
    dims = 1
    length: int
    stride: int

    def __post_init__(self) -> None:
        for name in ("length", "stride"):
            steps = check_integer(f"Windows: {name}", getattr(self, name), 1, "at least 1 step")
            object.__setattr__(self, name, steps)


@dataclass(frozen=True)
class Decode(Form):
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

    name = "decode"
    takes_bytes = True
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

    @override
    def check(self, field: Field) -> None:
        if isinstance(field.kind, Bytes) and not field.kind.many:
            return
        raise ValueError(
            f"variable: field {field.name!r} is {field}, and 'decode' is for the bytes of image"
            " files: if its images are stored decoded, leave it out; otherwise give bytes in the"
            " dataset, such as pathlib.Path(...).read_bytes()"
        )

    @override
    def batch(self, rows: FetchedRows) -> Any:
        return rows.decoded(self)

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The shape of each image, (channels, height, width); None where the images decide."""
        return None if self.size is None else (CHANNELS[self.mode], *self.size)


@dataclass(frozen=True)
class Nullable(Form):
    """Says that rows may be None, if the first rows that are read do not show it.

    Otherwise a batch gives the field as it does by default.
    """

    name = "nullable"
    is_default = True
    nullable = True


_FORMS: dict[str, type[Form]] = {
    form.name: form for form in (Pad, Jagged, Rows, Windows, Decode, Nullable)
}


def center_crops(forms: Mapping[str, Form]) -> dict[str, Form]:
    """Return the forms with crops in the centre instead of random ones."""
    return {
        name: replace(form, crop="center") if isinstance(form, Decode) else form
        for name, form in forms.items()
    }


def read_forms(given: Mapping[str, Any] | None) -> dict[str, Form]:
    """Check the argument ``variable`` of a data module or of a build."""
    if not isinstance(given, Mapping | None):
        raise TypeError(
            f"variable={short_repr(given)}: give a form for each field, such as"
            " variable={'audio': 'pad'}"
        )
    for name in given or {}:
        if not isinstance(name, str):
            raise TypeError(f"variable={short_repr(given)}: {name!r} is no name of a field")
    return {name_as_stored(name): _form(name, form) for name, form in (given or {}).items()}


def _form(name: str, given: Any) -> Form:
    if isinstance(given, Form) and type(given) is not Form:
        return given
    arguments = dict(given) if isinstance(given, Mapping) else {"form": given}
    kind = arguments.pop("form", None)
    if not isinstance(kind, str) or kind not in _FORMS:
        way_out = f"choose one of {', '.join(_FORMS)}"
        if isinstance(given, Mapping) and kind is None:
            way_out += ", and give its name with all of its arguments, as in {form: pad, value: -1}"
        raise ValueError(f"variable: {short_repr(given)} for field {name!r} is no form: {way_out}")
    try:
        return _FORMS[kind](**arguments)
    except (TypeError, ValueError) as error:
        known = ""
        if is_argument_mismatch(error):  # An argument is missing, or is none of the form's.
            known = f": form {kind!r} has {', '.join(signature(_FORMS[kind]).parameters)}"
        raise type(error)(f"variable: field {name!r}: {error}{known}") from error
