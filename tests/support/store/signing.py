"""A manifest that was edited and signed again, so that its digest matches its false content."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_memmap.store.manifest import MANIFEST, sign


def read_manifest(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return body


def encode_signed(body: dict[str, Any]) -> bytes:
    """A manifest's bytes, with the digest of its content."""
    body.pop("digest", None)
    return sign(json.dumps(body).encode())


def sign_manifest(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a store's manifest in place and give it the digest of its new content."""
    body = read_manifest(directory)
    edit(body)
    (directory / MANIFEST).write_bytes(encode_signed(body))
