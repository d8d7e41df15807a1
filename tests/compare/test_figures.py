"""Figures over processes and repeats; and a figure that comes from outside."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from lightning_memmap.compare.figures import FIGURES, STEP_PARTS, Figure
from lightning_memmap.compare.report import figure_table, parity_table, print_report
from lightning_memmap.compare.run_files import RankRecord
from tests.compare.reports import (
    DATA,
    ENVIRONMENT,
    MIB,
    figures,
    make_report,
    make_variant,
    timed_rank,
)


def test_rates_of_data_parallel_processes_add_up() -> None:
    found = figures([timed_rank(0, 2, 500.0), timed_rank(1, 2, 490.0)])
    assert found["samples_per_s"] == [pytest.approx(990.0)]
    assert found["first_batch_s"] == [1.5]
    step_s = sum(found[f"{part}_s"][0] for part in STEP_PARTS)
    assert step_s == pytest.approx(32 / 500 / 4 + 32 / 490 / 4)
    # Loading and transfer.
    assert found["data_stall"][0] == pytest.approx(2 / len(STEP_PARTS))


def test_processes_that_share_their_rows_count_once() -> None:
    ranks = [
        timed_rank(rank, 2, rate, data_rank=0, num_shares=1)
        for rank, rate in enumerate((500.0, 400.0))
    ]
    assert figures(ranks)["samples_per_s"] == [pytest.approx(400.0)]


def test_each_process_counts_once_however_many_saw_it() -> None:
    found = figures(
        [
            # Rank 0 has started rank 1, and sees it and its worker too.
            timed_rank(0, 2, processes={"100": [7, MIB], "101": [99, 2], "200": [1, 3]}),
            timed_rank(1, 2, processes={"101": [5, 2], "200": [1, 3]}),
        ]
    )
    assert found["private_bytes"][0] in (7 + 5 + 1, 7 + 99 + 1)
    assert found["shared_bytes"] == [MIB]


def test_peaks_of_processes_on_one_device_add_up() -> None:
    def run(*sizes: int) -> list[RankRecord]:
        return [timed_rank(rank, 2, peaks={"cuda:0": size}) for rank, size in enumerate(sizes)]

    found = figures(run(10, 5), run(3, 4))
    assert found["device_peak_bytes"] == [15, 7]


def test_share_beyond_the_upper_bound_is_called_noise() -> None:
    def notes(share: float, load: float = 0.5) -> str:
        variant = make_variant("memmap_dp")
        variant.figures["no_load_share"] = [share, share]
        environment = {**ENVIRONMENT, "load_before": load}
        table = figure_table(make_report(variant, environment=environment), "speed")
        return " ".join(note.plain for note in table.notes)

    assert "memmap_dp: 202% of its upper bound" in notes(2.02)
    assert "differences of 102% are noise" in notes(2.02)
    assert not notes(1.04)
    assert "a load of 7.0 on 2 cores" in notes(1.0, 7.0)


def test_differences_between_runs_of_a_variant_are_called_noise() -> None:
    variants = [make_variant("auto", (1000.0, 1500.0)), make_variant("memmap_dp")]
    table = figure_table(make_report(*variants), "speed")
    assert ["differ by up to 50%" in note.plain for note in table.notes] == [True]


@pytest.mark.parametrize("is_random", [False, True])
def test_random_transform_is_noted_once_for_all_variants(is_random: bool) -> None:
    variants = [make_variant(name) for name in ("auto", "memmap_dp")]
    data = {**DATA, "transform_is_random": is_random}
    notes = [note.plain for note in parity_table(make_report(*variants, data=data)).notes]
    assert sum("eval_transform" in note for note in notes) == is_random


WINDOW = Figure(
    "window_s",
    "window",
    "speed",
    "{:.2f} s".format,
    lambda ranks: max(sum(sum(step.values()) for step in rank.steps) for rank in ranks),
    "all measured steps together",
)


def test_figure_from_outside_is_in_report_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, WINDOW.key, WINDOW)
    report = make_report(make_variant("auto", (200.0,) * 3))
    report.write(tmp_path / "report.json")
    (variant,) = json.loads((tmp_path / "report.json").read_text())["variants"]
    assert variant["figures"]["window_s"] == pytest.approx([1.6] * 3)
    console = Console(record=True, width=120)
    print_report(report, console)
    printed = console.export_text()
    assert "window" in printed
    assert "1.60 s" in printed


def test_tables_fit_eighty_columns() -> None:
    names = ("memmap_superbatch+ideal", "auto+workers2", "memmap_superbatch")
    variants = [make_variant(name, (12_345.0, 12_456.0)) for name in names]
    for variant in variants:
        variant.figures["no_load_share"] = [0.97, 1.0]
    console = Console(record=True, width=80)
    print_report(make_report(*variants), console)
    printed = console.export_text()
    assert "memmap_superbatch+ideal" in printed
    assert "12,345..12,456" in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
