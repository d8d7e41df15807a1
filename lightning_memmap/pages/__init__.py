"""Pages of HTML that need nothing else: no script, no font, no network."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from lightning_memmap.sizes import format_bytes
from lightning_memmap.tables import Cell, Table


def templates(*packages: str) -> Environment:
    """Make what renders the templates of packages.

    Args:
        packages: Packages with a folder ``templates``. Those of this one are there as well.

    Returns:
        An environment in which all values are text, whatever they look like: they come from
        configs, errors and paths.
    """
    pages = Environment(
        loader=ChoiceLoader([PackageLoader(each) for each in (*packages, __name__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["bytes"] = format_bytes
    return pages


def write_tables(path: Path, title: str, lines: Sequence[Cell], tables: Sequence[Table]) -> None:
    """Write a page of tables, with a bar in each cell that has one.

    Args:
        path: The file.
        title: Heading of the page.
        lines: What is said above the tables.
        tables: The tables.
    """
    page = templates().get_template("tables.html").render(title=title, lines=lines, tables=tables)
    # A lone half of a surrogate pair, as in the name of a file, cannot be part of a page.
    path.write_text(page, encoding="utf-8", errors="replace")
