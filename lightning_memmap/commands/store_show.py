"""``lightning-memmap store show``."""

from pathlib import Path

from lightning_memmap.commands.store_find import open_stores
from lightning_memmap.commands.store_options import print_line
from lightning_memmap.commands.store_page import make_section
from lightning_memmap.tables import check_page, render_page, write_atomically


def show(path: str, *, out: str = "store.html") -> int:
    """Write a page with samples and sizes.

    Args:
        path: Directory of a store, or of one store per split.
        out: The HTML file. A page that this command has written before is replaced.
    """
    check_page("out", Path(out))
    sections = [make_section(name, store) for name, store in open_stores(path).items()]
    write_atomically(Path(out), render_page("samples.html", sections=sections).encode())
    print_line(out)
    return 0
