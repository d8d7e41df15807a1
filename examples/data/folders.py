"""Folders of example files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(directory: Path) -> Iterator[Path]:
    """Make a folder that is complete or absent, even if several processes make it at once.

    Args:
        directory: The folder, which does not exist yet.

    Yields:
        An empty folder with another name, which is renamed to ``directory`` at the end of the
        block. If another process was faster, its folder is kept and this one is removed.
    """
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    yield partial
    try:
        partial.rename(directory)
    except OSError:
        shutil.rmtree(partial)
        if not directory.exists():
            raise
