"""Tables for the terminal and for pages of HTML. All of their text is safe to print."""

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memmap.sizes import format_bytes

#: Names this package in the head of each of its pages.
_GENERATOR = '<meta name="generator" content="lightning_memmap">'
#: Bytes at the beginning of a page that have its head.
_HEAD_BYTES = 1024
#: Styles of texts that report a success, a failure, or a doubt.
GOOD = "green"
BAD = "bold red"
UNSURE = "yellow"


def printable(value: object) -> str:
    """Return the text of an untrusted value, without codes that control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def text(value: object, style: str = "") -> Text:
    """Make a cell of a table, or a line."""
    return Text(printable(value), style)


@dataclass(frozen=True)
class TitledTable:
    """A table with a title above it and notes below, which a console prints."""

    title: str
    table: Table
    notes: Sequence[Text] = ()

    def __rich__(self) -> Group:
        return Group(text(""), text(self.title, "bold"), self.table, *self.notes)


def make_table(
    labels: Sequence[str], rows: Iterable[Sequence[object]], words: Collection[str] = ()
) -> Table:
    """Make a table that mostly fits into eighty columns. Cells are texts, or become texts."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, collapse_padding=True
    )
    for label in labels:
        is_text = label in words
        # The first column has the names of the rows, which are never broken.
        is_left = is_text or label == labels[0]
        narrow = fill(label, 9, break_long_words=False, break_on_hyphens=False)
        table.add_column(
            text(label) if is_text else Text(narrow),
            justify="left" if is_left else "right",
            no_wrap=not is_text,
            overflow="fold" if is_left else "ellipsis",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in row))
    return table


def render_page(template: str, **values: Any) -> str:
    """Render a page of HTML that needs no script, font or network."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the page needs {error.name}: pip install 'lightning_memmap[compare]'"
        ) from error
    pages = Environment(
        loader=PackageLoader("lightning_memmap"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["bytes"] = format_bytes
    # Classes of the style sheet, by the style of a text.
    pages.filters["mood"] = {"": "", GOOD: "good", BAD: "bad", UNSURE: "unsure"}.__getitem__
    return pages.get_template(template).render(**values, generator=_GENERATOR)


def is_our_page(path: Path) -> bool:
    """Return whether a file is a page that this package has written."""
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return _GENERATOR.encode() in file.read(_HEAD_BYTES)


def check_page(argument: str, path: Path) -> None:
    """Check that a page may be written to a path.

    Raises:
        ValueError: Something other than a page of this package is there.
    """
    if path.is_dir():
        raise ValueError(
            f"{argument}={str(path)!r} is a directory. Pass the HTML file, such as"
            f" {path / 'page.html'}"
        )
    if (path.is_symlink() or path.exists()) and not is_our_page(path):
        raise ValueError(
            f"{argument}={str(path)!r} exists and is not a page of this command. Choose another"
            " file, or remove it"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent, in place of an existing file."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as file:
            file.write(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
