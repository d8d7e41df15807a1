"""Tables, for the terminal and for pages alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

from rich import box
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

_STYLES = {"": "", "good": "green", "bad": "bold red", "unsure": "yellow", "soft": "dim"}

Mood = Literal["", "good", "bad", "unsure", "soft"]


@dataclass(frozen=True)
class Cell:
    """A text, and how it is meant."""

    text: str
    mood: Mood = ""
    bar: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    label: str
    meaning: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """A table, with notes below it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[Cell] = ()


def printable(value: object) -> str:
    """A text that is safe to print: codes that control the terminal are replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def print_table(table: Table, console: Console) -> None:
    """Print a table and its notes, after an empty line."""
    rich = RichTable(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        collapse_padding=True,
    )
    for index, column in enumerate(table.columns):
        # The name of a variant is never broken.
        is_left = index == 0 or column.is_text
        rich.add_column(
            column.label
            if column.is_text
            else fill(column.label, 9, break_long_words=False, break_on_hyphens=False),
            justify="left" if is_left else "right",
            no_wrap=not column.is_text,
            overflow="fold" if is_left else "ellipsis",
        )
    for row in table.rows:
        rich.add_row(*map(_text, row))
    title = Text(f"\n{table.title}", style="bold")
    console.print(Group(title, rich, *map(_text, table.notes)), soft_wrap=False)


def _text(cell: Cell) -> Text:
    # A baseline may come from anyone.
    return Text(printable(cell.text), style=_STYLES[cell.mood])
