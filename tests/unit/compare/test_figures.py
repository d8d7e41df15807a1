"""Figures over processes and repeats; what moves; and a figure that comes from outside."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from lightning_memmap.compare.render.html import render_html
from lightning_memmap.compare.render.tables import regression_table
from lightning_memmap.compare.render.terminal import print_report
from lightning_memmap.compare.report.figures import (
    FIGURES,
    SECONDS,
    TABLES,
    Figure,
    each_run,
    figures_of,
)
from lightning_memmap.compare.report.footprint import Edge, footprint_of
from lightning_memmap.compare.report.records import PARTS, DevicePeak, ProcessMemory, TimedRank
from lightning_memmap.compare.report.regression import check_regression
from lightning_memmap.compare.report.report import VariantResult, read_report
from lightning_memmap.compare.run.findings import Findings, VariantRuns
from lightning_memmap.compare.run.launch import RunResult
from lightning_memmap.compare.run.variants import Variant, parse_variants
from lightning_memmap.compare.run.worker import Facts
from lightning_memmap.tables import print_table
from tests.unit.compare.reports import (
    DATA,
    ENVIRONMENT,
    GLOBAL_BATCH,
    MIB,
    MODEL,
    SETTINGS,
    STEPS,
    check_rank,
    make_report,
    make_variant,
    measured,
    timed_rank,
)

AUTO = Variant("auto")
DOCS = Path(__file__).parents[3] / "docs" / "compare.md"


def results(*variants: VariantRuns, repeats: int = 1) -> list[VariantResult]:
    """What the report says of variants with these runs."""
    settings = replace(SETTINGS, repeats=repeats)
    facts = Facts(ENVIRONMENT, DATA, MODEL, ())
    logs = Path("unused", "logs")
    findings = Findings(variants, facts, settings, syncs_batch_norm=False, logs=logs)
    return list(findings.results)


def timed(*runs: tuple[TimedRank, ...], variant: Variant = AUTO) -> VariantRuns:
    return VariantRuns(variant, timed=[RunResult(Path("unused"), ranks) for ranks in runs])


def test_variant_whose_records_do_not_fit_costs_no_other(tmp_path: Path) -> None:
    # Its check run says that it succeeded, and its weights are not there.
    broken = timed((timed_rank(),), variant=Variant("ddp"))
    broken.checks = [RunResult(tmp_path, (check_rank(0, 2), check_rank(1, 2, loader_hashes=())))]
    found, good = results(broken, timed((timed_rank(rate=700.0),)))
    assert (found.status, good.status) == ("failed", "ok")
    assert "cannot be evaluated" in found.reason
    assert good.figures["samples_per_s"] == (700.0,)


def test_rates_of_data_parallel_processes_add_up() -> None:
    found = figures_of(measured([timed_rank(0, 2, 500.0), timed_rank(1, 2, 490.0)]))
    assert found["samples_per_s"] == (990.0,)
    assert found["first_batch_s"] == (1.5,)
    step_s = sum(found[f"{part}_s"][0] for part in PARTS)
    assert step_s == pytest.approx(32 / 500 / 4 + 32 / 490 / 4)
    assert found["data_share"][0] == pytest.approx(1 / len(PARTS))


def test_processes_that_share_their_rows_count_once() -> None:
    ranks = [timed_rank(0, 2, 500.0, data_rank=0), timed_rank(1, 2, 400.0, data_rank=0)]
    assert figures_of(measured(ranks))["samples_per_s"] == (400.0,)


def test_each_process_counts_once_however_many_saw_it() -> None:
    def seen(pid: int, parent: int, own: int) -> ProcessMemory:
        return ProcessMemory(pid, parent, own + MIB, own)

    ranks = (
        # Rank 0 has started rank 1, and sees it and its worker too.
        timed_rank(0, 2, memory=(seen(100, 1, 7), seen(101, 100, 99), seen(200, 101, 1))),
        timed_rank(1, 2, memory=(seen(101, 100, 5), seen(200, 101, 1))),
    )
    (result,) = results(timed(ranks))
    assert [p.process for p in result.processes] == ["rank 0", "rank 1", "worker of rank 1"]
    assert result.figures["num_processes"] == (3,)
    assert result.figures["own_bytes"][0] in (7 + 5 + 1, 7 + 99 + 1)
    assert result.figures["max_shared_bytes"] == (MIB,)


def test_memory_that_is_not_known_is_no_figure() -> None:
    ranks = (timed_rank(memory=(ProcessMemory(100, 1, MIB, None),)),)
    found = figures_of(measured(ranks))
    assert "own_bytes" not in found
    assert "max_shared_bytes" not in found


def test_peaks_of_processes_on_one_device_add_up_and_the_highest_run_counts() -> None:
    def peak(allocated: int) -> dict[str, DevicePeak]:
        return {"cuda:0": DevicePeak(allocated, 2 * allocated)}

    (result,) = results(
        timed(
            (timed_rank(0, 2, device_peaks=peak(10)), timed_rank(1, 2, device_peaks=peak(5))),
            (timed_rank(0, 2, device_peaks=peak(3)), timed_rank(1, 2, device_peaks=peak(4))),
        )
    )
    assert result.device_peaks == {"cuda:0": DevicePeak(15, 30)}
    assert result.figures["device_peak_bytes"] == (15, 7)
    assert result.figures["device_reserved_bytes"] == (30, 14)


def test_ideal_of_a_strategy_is_its_own() -> None:
    auto, ideal, ddp = results(
        timed((timed_rank(rate=900.0),)),
        timed((timed_rank(rate=1200.0),), variant=Variant("auto", "ideal")),
        timed((timed_rank(rate=600.0),), variant=Variant("ddp")),
    )
    assert auto.figures["ideal_share"] == (0.75,)
    assert ideal.figures["ideal_share"] == (1.0,)
    assert "ideal_share" not in ddp.figures


def test_operations_a_second_are_those_of_the_reference() -> None:
    found = figures_of(measured([timed_rank(rate=500.0)], flops_per_row=100.0))
    assert found["flops_per_s"] == (50_000.0,)


def test_variant_with_a_run_missing_is_pending() -> None:
    (result,) = results(timed((timed_rank(),)), repeats=3)
    assert (result.status, result.reason) == ("pending", "interrupted after 1 of 3 runs")


def test_figures_of_a_report_are_those_that_are_declared() -> None:
    assert set(make_variant("auto+workers2").figures) <= set(FIGURES)
    assert {figure.table for figure in FIGURES.values()} - {""} == set(TABLES)


def test_docs_have_the_list_of_figures() -> None:
    rows = []
    for key, figure in FIGURES.items():
        better = f"; {figure.better} is better" if figure.better else ""
        rows.append(f"| `{key}` | {figure.label} | {figure.meaning}{better} |")
    page = DOCS.read_text(encoding="utf-8")
    assert not [row for row in rows if row not in page]


WINDOW = Figure(
    key="window_s",
    label="window",
    unit=SECONDS,
    meaning="all measured steps together",
    measure=each_run(lambda run: max(sum(rank.step_s) for rank in run)),
    better="less",
    table="speed",
)


def test_figure_from_outside_is_in_report_tables_page_and_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, WINDOW.key, WINDOW)
    slow = make_report(make_variant("auto", (100.0, 101.0, 102.0)), scaling=())
    fast = make_report(make_variant("auto", (200.0, 201.0, 202.0)), scaling=())
    fast.write(tmp_path / "report.json")
    fast = read_report(tmp_path / "report.json")
    value = median(fast.variants[0].figures["window_s"])
    assert value == pytest.approx(STEPS * GLOBAL_BATCH / 201)
    console = Console(record=True, width=120)
    print_report(fast, console)
    printed = console.export_text()
    assert "window s" in printed
    assert f"{value:.2f}" in printed
    page = render_html(fast)
    assert f'title="{WINDOW.meaning}">window s</th>' in page
    assert f"<td>{value:.2f}</td>" in page
    regression = check_regression(slow, fast, "slow.json")
    assert [c.verdict for c in regression.changes if c.figure == "window_s"] == ["better"]
    print_table(regression_table(regression), console)
    assert "window s" in console.export_text()


@pytest.mark.parametrize(
    ("variant", "values", "edges"),
    [
        ("auto", {}, []),
        (
            "memmap_superbatch",
            {"data_devices": ("cpu", "cpu"), "batch_bytes": 640},
            [Edge("data device 1: cpu", "rank 0: cpu", 320, "rows", True)],
        ),
        (
            "memmap_superbatch",
            {"data_devices": ("cuda:0", "cuda:1"), "root_device": "cuda:0", "batch_bytes": 640},
            [Edge("data device 1: cuda:1", "rank 0: cuda:0", 320, "rows", False)],
        ),
        ("memmap_superbatch", {"data_devices": ("cpu", "cpu"), "is_assembled": False}, []),
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
def test_edges_are_what_moves(variant: str, values: dict[str, Any], edges: list[Edge]) -> None:
    (parsed,) = parse_variants(variant)
    footprint = footprint_of([check_rank(**values)], parsed.loader, GLOBAL_BATCH)
    assert list(footprint.edges) == edges
    assert footprint.moved_bytes == sum(edge.num_bytes for edge in edges if not edge.logical)


def test_collectives_are_edges_of_each_process() -> None:
    footprint = make_variant("ddp").footprint
    assert footprint is not None
    assert [edge.source for edge in footprint.edges] == ["rank 0", "rank 1"]
    assert footprint.moved_bytes == 8000
    assert footprint.state_bytes == 16_000
