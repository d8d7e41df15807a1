"""Figures over processes and repeats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_memmap.compare.arms import parse_arms
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.results import Edge, Spread, cost_of, holding_of

from lightning_memmap.compare.report import Report, read_report
from tests.unit.compare.reports import (
    FACTS,
    GLOBAL_BATCH,
    STEPS,
    make_arm,
    make_parity,
    make_rank,
    make_report,
    make_run,
)

MIB = 2**20


def test_spread_is_median_and_ends() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0, (3.0, 1.0, 10.0))


def test_rates_of_data_parallel_processes_add_up() -> None:
    run = make_run(make_rank(0, 2, 500.0), make_rank(1, 2, 490.0))
    cost = cost_of([run], GLOBAL_BATCH, STEPS)
    assert cost.samples_per_s.median == 990.0
    assert cost.first_batch_s.median == 1.5
    assert sum(cost.parts_s.values()) == pytest.approx(32 / 500 / 4 + 32 / 490 / 4)
    assert cost.data_share.median == pytest.approx(1 / len(PARTS))


def test_processes_that_share_their_rows_count_once() -> None:
    ranks = (make_rank(0, 2, 500.0, data_rank=0), make_rank(1, 2, 400.0, data_rank=0))
    assert cost_of([make_run(*ranks)], GLOBAL_BATCH, STEPS).samples_per_s.median == 400.0


def test_each_process_counts_once_however_many_saw_it() -> None:
    def seen(pid: int, parent: int, own: int) -> dict[str, int]:
        return {"pid": pid, "parent": parent, "rss": own + MIB, "own": own, "shared": MIB}

    ranks = (
        # Rank 0 has started rank 1, and sees it and its worker too.
        make_rank(0, 2, memory=[seen(100, 1, 7), seen(101, 100, 99), seen(200, 101, 1)]),
        make_rank(1, 2, memory=[seen(101, 100, 5), seen(200, 101, 1)]),
    )
    cost = cost_of([make_run(*ranks)], GLOBAL_BATCH, STEPS)
    assert [p["process"] for p in cost.processes] == ["rank 0", "rank 1", "worker of rank 1"]
    assert cost.own_bytes.median in (7 + 5 + 1, 7 + 99 + 1)
    assert cost.max_shared_bytes.median == MIB


def test_peaks_of_processes_on_one_device_add_up_and_the_highest_run_counts() -> None:
    def peak(allocated: int) -> dict[str, Any]:
        return {"cuda:0": {"allocated": allocated, "reserved": 2 * allocated}}

    runs = [
        make_run(make_rank(0, 2, device_peaks=peak(10)), make_rank(1, 2, device_peaks=peak(5))),
        make_run(make_rank(0, 2, device_peaks=peak(3)), make_rank(1, 2, device_peaks=peak(4))),
    ]
    peaks = cost_of(runs, GLOBAL_BATCH, STEPS).device_peaks
    assert peaks == {"cuda:0": {"allocated": 15, "reserved": 30}}


def test_energy_is_that_of_a_sample_and_of_all_runs_or_none() -> None:
    with_energy = make_run(make_rank(joules=64.0))
    assert cost_of([with_energy], GLOBAL_BATCH, STEPS).joules_per_sample == Spread.of([0.2])
    assert cost_of([with_energy, make_run()], GLOBAL_BATCH, STEPS).joules_per_sample is None


@pytest.mark.parametrize(
    ("arm", "values", "edges"),
    [
        ("auto", {}, []),
        (
            "memmap_superbatch",
            {"data_devices": ["cpu", "cpu"], "batch_bytes": 640},
            [Edge("data device 1: cpu", "rank 0: cpu", 320, "rows", True)],
        ),
        (
            "memmap_superbatch",
            {"data_devices": ["cuda:0", "cuda:1"], "root_device": "cuda:0", "batch_bytes": 640},
            [Edge("data device 1: cuda:1", "rank 0: cuda:0", 320, "rows", False)],
        ),
        ("memmap_superbatch", {"data_devices": ["cpu", "cpu"], "is_assembled": False}, []),
        ("auto+workers2", {"batch_bytes": 640},
         [Edge("DataLoader", "rank 0: cpu", 640, "rows", True)]),
        (
            "auto+workers2",
            {"batch_bytes": 640, "root_device": "cuda:0"},
            [Edge("DataLoader", "rank 0: cuda:0", 640, "rows", False)],
        ),
        ("auto+ideal", {}, []),
    ],
)  # fmt: skip
def test_edges_are_what_moves(arm: str, values: dict[str, Any], edges: list[Edge]) -> None:
    (parsed,) = parse_arms(arm)
    holding = holding_of(make_run(make_rank(**values)), parsed, FACTS)
    assert list(holding.edges) == edges
    assert holding.moved_bytes == sum(edge.num_bytes for edge in edges if not edge.logical)


def test_collectives_are_edges_of_each_process() -> None:
    holding = make_arm("ddp").holding
    assert holding is not None
    assert [edge.source for edge in holding.edges] == ["rank 0", "rank 1"]
    assert holding.moved_bytes == 8000
    assert holding.state_bytes_per_device == 16_000


WRONG = make_parity(held=False, problems=("losses differ",))
UNJUDGED = make_parity(held=None)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"parity": WRONG}, 1),
        ({"parity": UNJUDGED}, 3),
        ({"status": "failed", "cost": None}, 3),
        ({"status": "failed", "parity": WRONG}, 1),
        ({"status": "unavailable", "parity": None, "cost": None}, 0),
        ({"status": "refused", "parity": None, "cost": None}, 0),
        ({"status": "pending"}, 3),
    ],
)
def test_exit_code_says_whether_parity_held(changes: dict[str, Any], code: int) -> None:
    report = make_report(make_arm("auto"), replace(make_arm("ddp"), **changes))
    assert report.exit_code == code
    assert replace(report, interrupted=True).exit_code == 130


def test_exit_code_of_nothing_that_ran_is_not_zero() -> None:
    arm = make_arm("fsdp", (), status="unavailable", parity=None, cost=None)
    assert make_report(arm).exit_code == 3


def test_report_is_written_as_json_without_nan(tmp_path: Path) -> None:
    report = make_report(make_arm("auto", timed_losses=(float("nan"), 1.0)), make_arm("ddp"))
    report.write(tmp_path / "report.json")
    values = read_report(tmp_path / "report.json")
    assert values["arms"][0]["timed_losses"] == [None, 1.0]
    assert values["arms"][1]["cost"]["samples_per_s"]["values"] == [1000.0, 1100.0]
    assert values["arms"][1]["holding"]["moved_bytes"] == 8000
    assert values["parity_held"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "not the report"),
        ('{"schema": "other"}', "not the report"),
        ('{"schema": "lightning_memmap.compare", "schema_version": 99}', "version 99"),
    ],
)
def test_read_of_another_file_says_so(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_report(tmp_path / "report.json")


def test_schema_of_the_docs_names_every_field(tmp_path: Path) -> None:
    report: Report = make_report(make_arm("auto"), make_arm("ddp"))
    report.write(tmp_path / "report.json")
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text(encoding="utf-8")

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*(names(item) for item in value))
        return set(value) if isinstance(value, dict) else set()

    values = json.loads((tmp_path / "report.json").read_text())
    found = set(values) | names(values["arms"]) | names(values["scaling"])
    for arm in values["arms"]:
        for part in ("parity", "holding", "cost"):
            found |= names(arm[part])
    missing = sorted(name for name in found if f"`{name}`" not in page)
    assert not missing
