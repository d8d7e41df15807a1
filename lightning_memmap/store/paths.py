"""Paths and URLs of stores, as users pass them."""

import os
import re
from pathlib import Path

#: The environment variable that names the cache.
CACHE = "LIGHTNING_MEMMAP_CACHE"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S")
#: A URL after `Path` has removed one of its slashes.
_SHORTENED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


class StoreUrl(str):
    """The URL of a store, or of a directory of stores. ``/`` appends a name, as with a path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> "StoreUrl":
        return StoreUrl(f"{self.rstrip('/')}/{name}")


def path_or_url(path: str | Path) -> Path | StoreUrl:
    """Convert the path argument of a user to a path or a URL."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r}: must be the path or the URL of a store")
    if isinstance(path, str) and _URL.match(path):
        return StoreUrl(path)
    if _SHORTENED_URL.match(os.fspath(path)):
        raise ValueError(
            f"path {os.fspath(path)!r}: a URL has two slashes, and pathlib.Path keeps one. Pass"
            f" the URL as text, or a directory of this name as ./{os.fspath(path)}"
        )
    return local_path(path)


def local_path(path: str | Path) -> Path:
    """Convert a user's path to a `Path`. ``~`` is expanded, because a config file has no shell."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{path!r}: must be a path")
    return Path(os.path.expanduser(path))


def store_directory(path: str | Path) -> Path:
    """Return the absolute directory of a store. A URL is an error."""
    if isinstance(local := path_or_url(path), StoreUrl):
        raise ValueError(
            f"path={str(path)!r} is a URL, and this needs a directory: build stores in one and"
            " push them (`lightning-memmap store push DIRECTORY URL`)"
        )
    if not os.fspath(path):
        raise ValueError(f"path={path!r}: must be the directory of the store")
    directory = Path(os.path.realpath(local))
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"path={path!r}: torch maps only files whose names are UTF-8") from error
    return directory


def cache_directory() -> Path:
    """Return the directory of the cache: from the environment, or the user's cache directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = os.environ.get(CACHE) or home / "lightning_memmap"
    return Path(os.path.realpath(Path(directory).expanduser()))
