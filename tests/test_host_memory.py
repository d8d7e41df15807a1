"""Memory that is left in control groups, of trees of files as the kernel shows them."""

from pathlib import Path

import psutil
import pytest

from lightning_memmap import host_memory

GIB = 2**30


def group(path: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    path.mkdir(parents=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(stat)


VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
VERSION_2 = "memory.max", "memory.current"


def available(tmp_path: Path, membership: str, monkeypatch: pytest.MonkeyPatch) -> int:
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    return host_memory.available_bytes()


def test_group_of_version_2_limits_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "groups" / "user" / "job"
    stat = "anon 5\ninactive_file 1000\nactive_file 200\n"
    group(path, VERSION_2, "10000000", 4_000_000, stat)
    group(tmp_path / "groups" / "other", VERSION_2, "10", 5, stat)
    # The page cache of the group can be dropped.
    assert available(tmp_path, "0::/user/job\n", monkeypatch) == 6_001_200


def test_group_of_version_1_that_holds_ours_limits_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 70\ntotal_active_file 7\n"
    path = tmp_path / "groups" / "memory" / "outer"
    group(path, VERSION_1, "2000000", 1_500_000, stat)
    group(path / "inner", VERSION_1, str(2**63 - 4096), 1_000_000, stat)
    membership = "9:cpu:/elsewhere\n4:memory,hugetlb:/outer/inner\n"
    assert available(tmp_path, membership, monkeypatch) == 500_077


def test_group_that_only_its_own_container_shows_limits_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its path is that of the machine, and the container shows the group itself as the top.
    stat = "total_inactive_file 0\ntotal_active_file 0\n"
    group(tmp_path / "groups" / "memory", VERSION_1, "1000", 400, stat)
    assert available(tmp_path, "4:memory:/docker/abc\n", monkeypatch) == 600


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_group_without_a_limit_leaves_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    group(tmp_path / "groups" / "job", VERSION_2, limit, 4 * GIB, "inactive_file 0\n")
    # What else runs on the machine may change between the two readings.
    free = psutil.virtual_memory().available
    found = available(tmp_path, "0::/job\n", monkeypatch)
    assert abs(found - free) < 2 * GIB


def test_group_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "groups" / "job", VERSION_2, "1000", 2000, "inactive_file 10\n")
    assert available(tmp_path, "0::/job\n", monkeypatch) == 0
