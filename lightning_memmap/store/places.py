"""Where a store is, from what a user gives: the directory, or a URL."""

import os
import re
from pathlib import Path

#: The environment variable that names the cache.
CACHE = "LIGHTNING_MEMMAP_CACHE"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S")
#: What `Path` makes of one.
_SHORTENED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


class StoreUrl(str):
    """The URL of a store, or of a directory of stores, which ``/`` leads into as with a path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> "StoreUrl":
        return StoreUrl(f"{self.rstrip('/')}/{name}")


def place_of(given: str | Path) -> Path | StoreUrl:
    """Tell URLs from paths."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"path={given!r}: give the path of a store")
    if isinstance(given, str) and _URL.match(given):
        return StoreUrl(given)
    if _SHORTENED_URL.match(os.fspath(given)):
        raise ValueError(
            f"path {os.fspath(given)!r}: a URL has two slashes, and pathlib.Path leaves one: give"
            f" it as text, or a directory of this name as ./{os.fspath(given)}"
        )
    return local_path(given)


def local_path(given: str | Path) -> Path:
    """The path that a user gives, with ``~`` as a shell has it: a config passes no shell."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{given!r}: give a path")
    return Path(os.path.expanduser(given))


def store_directory(path: str | Path) -> Path:
    """The directory of a store, from what a user gives for something that is not done at a URL."""
    if isinstance(place := place_of(path), StoreUrl):
        raise ValueError(
            f"path={str(path)!r} is a URL, and this needs a directory: build stores in one and"
            " push them (`lightning-memmap store push DIRECTORY URL`)"
        )
    if not os.fspath(path):
        raise ValueError(f"path={path!r}: name the directory of the store")
    directory = Path(os.path.realpath(place))
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"path={path!r}: torch maps files with names in UTF-8 only") from error
    return directory


def cache_directory() -> Path:
    """The cache that the environment names, by default the user's."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    given = os.environ.get(CACHE) or home / "lightning_memmap"
    return Path(os.path.realpath(Path(given).expanduser()))
