"""How much host memory this process may still use, within the limits of its control groups.

In a container, the free memory of the machine isn't decisive: the kernel kills a process that
exceeds the limit of its group, however much memory the machine has.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

#: The control groups, and the file that names the groups of this process.
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

#: By version: folder of groups, files of limit and use, prefix of the cache in ``memory.stat``.
_VERSION_1 = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "", "memory.max", "memory.current", ""


def available_bytes() -> int:
    """Measure the host memory that is available to this process."""
    return min([int(psutil.virtual_memory().available), *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    """Yield the free bytes of each group of this process with a limit, ancestors included."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux, or no control groups.
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
        # A container does not see the groups above its own, and its own is the top.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            free_bytes = _free_bytes(GROUPS / version[0] / str(group).lstrip("/"), *version[1:])
            if free_bytes is not None:
                yield free_bytes


def _free_bytes(group: Path, limit: str, use: str, prefix: str) -> int | None:
    try:
        allowed, used = ((group / name).read_text().strip() for name in (limit, use))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if allowed == "max":
        return None
    cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return max(0, int(allowed) - int(used) + cached)
