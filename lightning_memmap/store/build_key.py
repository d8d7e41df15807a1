"""The key of a build, written down: only a build with the same key goes on with its files."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from platform import node
from typing import Any

from lightning_memmap.store.files import TEMPORARY
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.own_files import own_directory, read_own

KEY = "build.json"
_MAX_KEY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class BuildKey:
    """What a build makes, and of what. An interrupted build is resumed by one with the same key.

    Args:
        fingerprint: The identity of the dataset.
        contents: Rows, shards, schema, columns and probes as JSON values.
        file_bytes: The size of each file that grows, by its name.
    """

    fingerprint: Fingerprint
    contents: Mapping[str, Any]
    file_bytes: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return int(self.contents["num_rows"])

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, as `difference` reads them, with the process that builds."""
        return {
            "builder": this_process(),
            "fingerprint": self.fingerprint.to_json(),
            **self.contents,
        }

    def difference(self, found: Mapping[str, Any]) -> str | None:
        """Say in words how the key of an interrupted build differs from this one.

        Args:
            found: The key that was found, as JSON values that have not been checked.

        Returns:
            The first difference; None if there is none.

        Raises:
            ValueError: What was found is not a key.
        """
        changed = Fingerprint.from_json(found.get("fingerprint")).difference(self.fingerprint)
        if changed is not None:
            return f"since then, {changed}"
        for key, value in self.contents.items():
            if (was := found.get(key)) == value:
                continue
            if key == "order":
                return "its rows are read in another order"
            if key == "probes":
                return "rows that are read for comparison have changed"
            if type(was) is int:
                return f"it has {key}={was}, and this one {key}={value}"
            return f"it has other {key}"
        return None


def write_key(building: Path, key: BuildKey, **more: Any) -> None:
    """Write the key of a build in parts: all of it or nothing.

    Args:
        building: The directory in which the store is being built, and where no key is.
        key: What the build makes.
        **more: JSON values that are kept with it, and are not compared with those of other parts.

    Raises:
        OSError: It cannot be written.
    """
    temporary = building / (KEY + TEMPORARY)
    with open(temporary, "x", encoding="utf-8") as file:
        json.dump({**more, **key.to_json()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, building / KEY)


def read_key(building: Path) -> dict[str, Any]:
    """Read the key of a build.

    Args:
        building: The directory in which the store is being built.

    Returns:
        The key as JSON values, which have not been checked. All belongs to this user.

    Raises:
        FileNotFoundError: There is none.
        StoreError: Something there belongs to another user, or is too large.
        ValueError: It is not JSON.
        OSError: It cannot be read.
    """
    with own_directory(building) as directory:
        return read_key_in(directory)


def this_process() -> str:
    """Name this process, for the message of another one: its number, its machine and the time."""
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {node()} at {now}"


def read_key_in(directory: int) -> dict[str, Any]:
    """Read the key in an open directory; see `read_key`.

    Args:
        directory: The descriptor of the directory, which belongs to this user.
    """
    found = json.loads(read_own(KEY, directory, _MAX_KEY_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{KEY} holds no JSON object")
    return found


def builder_text(builder: object) -> str:
    """What is said of the process that builds.

    Args:
        builder: As `this_process` has named it, not checked.
    """
    is_line = isinstance(builder, str) and len(builder) < 200 and builder.isprintable()
    return str(builder) if is_line else "another process"
