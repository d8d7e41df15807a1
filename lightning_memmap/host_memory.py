"""How much memory of the host this process may still use, as its control groups limit it.

In a container the machine's free memory says little: the kernel ends a process that goes beyond
the limit of its group, however much the machine has.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

#: Where the kernel shows the control groups, and those that a process is in.
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

#: By version: where groups are, the files of limit and use, and the page cache in ``memory.stat``.
_VERSION_1 = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "", "memory.max", "memory.current", ""


def available_bytes() -> int:
    """Bytes that this process can use without anything being swapped or killed.

    Pages of files that the kernel can drop count as available.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """What each group with a limit leaves that this process is in, or that holds such a group."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # No Linux, or no control groups.
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            version = _VERSION_2
        elif "memory" in controllers.split(","):
            version = _VERSION_1
        else:
            continue
        # Inside a container, the groups above its own are not to be seen, and its own is the top.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            left = _left_in(GROUPS / version[0] / str(group).lstrip("/"), *version[1:])
            if left is not None:
                yield left


def _left_in(group: Path, limit: str, use: str, prefix: str) -> int | None:
    try:
        allowed, used = ((group / name).read_text().strip() for name in (limit, use))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if allowed == "max":
        return None
    cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return max(0, int(allowed) - int(used) + cached)
