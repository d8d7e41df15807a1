"""Pages of HTML that need nothing else: no script, no font, no network."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_memmap.sizes import format_bytes
from lightning_memmap.tables import BAD, GOOD, UNSURE

#: Classes of the style sheet, by the style of a text.
_CLASSES = {"": "", GOOD: "good", BAD: "bad", UNSURE: "unsure"}


def templates() -> Environment:
    """Make what renders the templates."""
    pages = Environment(
        loader=PackageLoader(__name__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["bytes"] = format_bytes
    pages.filters["mood"] = _CLASSES.__getitem__
    return pages
