"""Predictions: bytes that follow from what a strategy keeps and sends, and what is recommended."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.compare import advise
from lightning_memmap.compare.advise.lightning import LIGHTNING_COSTS
from lightning_memmap.compare.advise.predict import predict, recommend, workload_of
from lightning_memmap.compare.report.report import read_report
from lightning_memmap.compare.run.variants import LIGHTNING_STRATEGIES
from lightning_memmap.costs import Cluster, Workload
from lightning_memmap.store import build_store
from lightning_memmap.strategies import STRATEGIES
from tests.images import HEIGHT, WIDTH, EncodedImages
from tests.unit.compare.reports import make_report, make_variant

GB = 10**9
#: A model of 7 billion parameters, in float32 with Adam, 1 GB of activations a row.
LARGE = Workload(
    parameter_bytes=28 * GB, gradient_bytes=28 * GB, optimizer_bytes=56 * GB,
    activation_bytes_per_row=GB, batch_bytes_per_row=4096, dataset_bytes=100 * GB,
    compute_s_per_row=0.1, fixed_s=0.001,
)  # fmt: skip
#: One that fits anywhere.
SMALL = Workload(
    parameter_bytes=GB // 10, gradient_bytes=GB // 10, optimizer_bytes=GB // 5,
    activation_bytes_per_row=10**6, batch_bytes_per_row=150_000, dataset_bytes=200 * GB,
    compute_s_per_row=0.001, fixed_s=0.0,
)  # fmt: skip
NODE = Cluster(devices=8, nodes=1, memory_bytes=80 * GB, bandwidth=400e9, node_bandwidth=12e9,
               latency_s=2e-5)  # fmt: skip


def by_name(work: Workload, cluster: Cluster, rows: int = 4) -> dict[str, Any]:
    return {found.strategy: found for found in predict(work, cluster, rows)}


def test_every_strategy_states_its_own_costs() -> None:
    for name, strategy, _ in STRATEGIES:
        assert "costs" in vars(strategy), (
            f"{name}: {strategy.__name__} inherits its costs, or has none"
        )
    assert set(LIGHTNING_COSTS) == set(LIGHTNING_STRATEGIES)
    assert set(by_name(SMALL, NODE)) == {name for name, *_ in STRATEGIES} | set(LIGHTNING_COSTS)


def test_pipeline_has_two_micro_batches_for_each_stage() -> None:
    costs = by_name(LARGE, NODE)["memmap_pipeline"].costs
    assert "16 micro-batches" in costs.note
    # 32 rows of 0.1 s over 8 stages, each idle for 7 of 16 micro-batches more.
    assert costs.step_s == pytest.approx(0.001 + 32 * 0.1 / 8 * (1 + 7 / 16))
    # Its own eighth of the activations, for 8 of 16 micro-batches.
    assert costs.activation_bytes == 32 * GB / 16
    # Activations move between stages, and how large they are there is not known.
    assert costs.moved_bytes is None
    assert by_name(LARGE, replace(NODE, devices=1))["memmap_pipeline"].costs.moved_bytes == 0


def test_layers_on_several_devices_are_given_the_rows_of_all() -> None:
    found = by_name(LARGE, NODE)
    layers, rows = found["memmap_model_parallel"].costs, found["memmap_superbatch"].costs
    assert layers.moved_bytes == rows.moved_bytes > 0
    assert layers.state_bytes == rows.state_bytes // 8


def test_model_that_does_not_shard_itself_has_no_model_parallel() -> None:
    sharded = by_name(LARGE, NODE)["model_parallel"].costs
    assert sharded.state_bytes == 14 * GB
    assert not sharded.obstacle
    plain = by_name(replace(LARGE, configures_itself=False), NODE)["model_parallel"].costs
    assert plain.obstacle == "unsharded"


def test_large_model_fits_only_where_its_state_is_sharded() -> None:
    found = by_name(LARGE, NODE)
    assert not found["auto"].fits
    assert not found["ddp"].fits
    assert found["fsdp"].fits
    assert found["fsdp"].costs.state_bytes == 14 * GB
    assert found["fsdp"].costs.activation_bytes == pytest.approx(4 * GB, rel=1e-4)
    # 72 of 80 GB may be planned for, and 18 are needed: an eighth of the dataset fits beside them.
    assert found["fsdp"].resident_share == 1.0
    chosen, reason = recommend(list(found.values()))
    assert chosen is not None
    assert chosen.costs.needed_bytes < 72 * GB
    assert "ddp" in reason


def test_bytes_that_move_are_those_of_the_papers() -> None:
    found = by_name(LARGE, NODE)
    # All-reduce: 2 (n - 1) / n of the gradients. Sharded: two gathers and a scatter.
    assert found["ddp"].costs.moved_bytes == 2 * 28 * GB * 7 // 8
    assert found["fsdp"].costs.moved_bytes == 3 * 28 * GB * 7 // 8
    assert found["memmap_superbatch"].costs.moved_bytes == 32 * 4096 * 7 // 8
    assert found["auto"].costs.moved_bytes == 0


def test_ddp_keeps_a_second_copy_of_the_gradients() -> None:
    found = by_name(LARGE, NODE)["ddp"].costs
    assert (found.state_bytes, found.buffer_bytes) == (112 * GB, 28 * GB)


def test_data_that_devices_cannot_hold_is_told() -> None:
    found = by_name(SMALL, NODE)
    # 8 x (72 GB - 0.4 GB - activations) hold 200 GB; one device holds about a third of them.
    assert found["memmap_superbatch"].resident_share == 1.0
    assert 0.3 < found["auto"].resident_share < 0.36


def test_small_model_is_computed_on_all_devices() -> None:
    found = by_name(SMALL, NODE, rows=64)
    chosen, reason = recommend(list(found.values()))
    assert chosen is not None
    assert chosen.samples_per_s > 4 * found["auto"].samples_per_s
    assert "samples/s" in reason


def test_one_device_is_recommended_where_more_win_nothing() -> None:
    one = replace(NODE, devices=1)
    chosen, reason = recommend(predict(SMALL, one, 64))
    assert chosen is not None
    assert chosen.strategy == "auto"
    assert "simpler" in reason or "fastest" in reason


def test_devices_that_share_their_cores_win_nothing() -> None:
    shared = replace(NODE, devices=2, parallel_devices=1)
    found = by_name(SMALL, shared, 64)
    assert found["ddp"].samples_per_s <= found["auto"].samples_per_s


def test_several_nodes_rule_out_what_is_one_process() -> None:
    found = by_name(LARGE, replace(NODE, nodes=64))
    assert found["memmap_superbatch"].costs.obstacle
    assert not found["fsdp"].costs.obstacle
    assert found["fsdp"].rows_per_step == 4 * 8 * 64
    # The slow links between nodes are what a step waits for.
    assert found["ddp"].costs.step_s > by_name(LARGE, NODE)["ddp"].costs.step_s


def test_nothing_that_fits_names_the_ways_out() -> None:
    tiny = replace(NODE, memory_bytes=GB)
    chosen, reason = recommend(predict(LARGE, tiny, 4))
    assert chosen is None
    assert "activation checkpointing" in reason


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: predict(SMALL, NODE, 0), "rows_per_device=0"),
        (lambda: replace(NODE, devices=0), "devices=0"),
        (lambda: replace(SMALL, fixed_s=-1.0), "fixed_s=-1.0"),
    ],
)
def test_impossible_numbers_are_refused(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        function()


TRACE = {
    "time_s": [0.0, 1.0],
    "parameters": [4000.0] * 2,
    "gradients": [0.0, 4000.0],
    "optimizer": [8000.0] * 2,
    "data": [2048.0] * 2,
    "activations": [100.0, 3200.0],
}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    variants = (make_variant("auto", trace=TRACE), make_variant("ddp", trace=TRACE))
    make_report(*variants).write(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_workload_is_read_off_the_variant_auto(report: Path) -> None:
    work = workload_of(read_report(report))
    assert (work.parameter_bytes, work.gradient_bytes, work.optimizer_bytes) == (4000, 4000, 8000)
    assert work.activation_bytes_per_row == 100
    assert work.batch_bytes_per_row == 64
    # 32 rows at 1,050 a second, of six equal parts: forward and backward are two.
    assert work.compute_s_per_row == pytest.approx(1 / 1050 / 3, rel=0.01)


def test_report_without_auto_is_read_from_the_superbatch(report: Path, tmp_path: Path) -> None:
    names = ("auto+workers0", "memmap_superbatch", "ddp")
    other = make_report(*(make_variant(name, trace=TRACE) for name in names))
    assert workload_of(other) == workload_of(read_report(report))
    other.write(tmp_path / "other.json")
    assert advise(["--report", str(tmp_path / "other.json")]) == 0


def test_report_of_several_devices_alone_names_the_commands_that_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_report(make_variant("auto+workers0"), make_variant("ddp")).write(tmp_path / "report.json")
    assert advise(["--report", str(tmp_path / "report.json")]) == 2
    told = capsys.readouterr().err
    assert "neither auto nor memmap_superbatch has finished" in told
    assert "lightning-memmap advise --config digits.yaml" in told
    assert told.count("\n") == 1


def test_answer_for_this_machine_is_compared_with_what_was_measured(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(["--report", str(report)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed[printed.index("Predicted / measured") :].splitlines()]
    ratios = {row[0]: row[1:] for row in rows if row and row[0] in ("auto", "ddp")}
    # State and what moves are exact; time is not asserted.
    assert ratios["auto"][:4] == ["1.00", "1.00", "both", "none"]
    assert ratios["ddp"][0] == "1.00"
    assert ratios["ddp"][2] == "1.00"
    # What is not known is not shown as none.
    (pipeline,) = re.findall(r"^memmap_pipeline .*$", printed, re.MULTILINE)
    assert "unknown" in pipeline
    assert " 0 B" not in pipeline
    # All that ran agree and were as fast; what was measured stands beside what is predicted.
    assert "Measured here, of 2 variants that agree" in printed


def test_answer_for_another_machine_and_model(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--devices", "8", "--nodes", "64", "--memory", "80GB", "--parameters", "7e9",
                 "--activation_bytes_per_row", "1GB", "--dataset", "2TB", "--flops", "4e14",
                 "--rows_per_device", "4", "--json", str(tmp_path / "advice.json")]  # fmt: skip
    assert advise(["--report", str(report), *arguments]) == 0
    answer = json.loads((tmp_path / "advice.json").read_text())
    assert answer["workload"]["parameter_bytes"] == 28 * GB
    assert answer["workload"]["dataset_bytes"] == 2 * 10**12
    assert answer["cluster"]["nodes"] == 64
    found = {prediction["strategy"]: prediction for prediction in answer["predictions"]}
    assert not found["ddp"]["fits"]
    assert found[answer["recommended"]]["fits"]
    assert "Predicted / measured" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--report"),
        (["--report", "nowhere.json"], "nowhere"),
        (["--config", "no.yaml"], "no.yaml"),
    ],
)
def test_question_without_a_measurement_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument",
    [
        *(f"--{name}={value}" for name in ("devices", "nodes", "rows_per_device")
          for value in ("0", "-1")),
        *(f"--{name}={value}" for name in ("flops", "parameters")
          for value in ("0", "-1", ".nan", ".inf")),
        *(f"--latency_s={value}" for value in ("-1", ".nan", ".inf")),
        *(f"--{name}={value}" for name in ("memory", "bandwidth", "node_bandwidth")
          for value in ("0", "-1GB", "nan", "", "9" * 400)),
        *(f"--dataset={value}" for value in ("-1", "nan", "")),
    ],
    ids=lambda argument: argument[:30],
)  # fmt: skip
def test_impossible_options_are_refused(
    report: Path, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    assert advise(["--report", str(report), argument]) == 2
    printed, told = capsys.readouterr()
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert printed == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory", "much"),
        ("--node_bandwidth", "0"),
        ("--dataset", "-1"),
        ("--activation_bytes_per_row", "some"),
        ("--json", "{tmp}"),
        ("--json", "{tmp}/file/answer.json"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, str],
) -> None:
    (tmp_path / "file").touch()
    name, value = arguments
    monkeypatch.setattr("lightning_memmap.compare.advise_command._report", pytest.fail)
    assert advise(["--config", "any.yaml", name, value.format(tmp=tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    if name != "--json":
        assert name.removeprefix("--") in told


def test_encoded_images_of_the_comparison_are_compared_with_decoded_ones(
    report: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    values = json.loads(report.read_text())
    for names in (["train"], ["train/a", "train/b"]):
        path = tmp_path / str(len(names))
        for name in names:
            build_store(EncodedImages(12), path / name, progress=False)
        values["data"]["store_path"] = str(path / "train")
        report.write_text(json.dumps(values))
        assert advise(["--report", str(report)]) == 0
        told = capsys.readouterr().out
        assert told.count(f"decoded, RGB {HEIGHT} x {WIDTH}") == 2 * len(names)
    (path / "train/a/manifest.json").write_text("damaged")
    assert advise(["--report", str(report)]) == 0
    assert "decoded" not in capsys.readouterr().out


def test_answer_is_drawn_on_a_page(report: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "advice.html"
    assert advise(["--report", str(report), "--html", str(path), "--devices", "8"]) == 0
    page = path.read_text(encoding="utf-8")
    for name, *_ in STRATEGIES:
        assert f">{name}<" in page
    bars = [float(share) for share in re.findall(r'class="bar" style="width: ([0-9.]+)%', page)]
    # What it needs, the data on devices, and the time of a step.
    assert len(bars) == 3 * page.count("<tr><td")
    assert all(0 <= bar <= 100 for bar in bars)
    assert max(bars) == 100
    assert not re.search(r"<script|(src|href)=|@import|url\(", page)


def test_answer_is_written_into_a_folder_that_is_made(report: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "answer.json"
    assert advise(["--report", str(report), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["recommended"]


@pytest.mark.parametrize("rate", [-1000.0, 0.0])
def test_report_of_an_impossible_rate_is_refused(
    report: Path, capsys: pytest.CaptureFixture[str], rate: float
) -> None:
    values = json.loads(report.read_text())
    values["variants"][1]["figures"]["samples_per_s"] = [rate]
    report.write_text(json.dumps(values))
    assert advise(["--report", str(report)]) == 2
    words = "$.variants[1].figures" if rate < 0 else "0.0 samples/s for 'ddp'"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("section", ["data", "settings", "environment"])
def test_report_that_lacks_what_is_needed_is_refused(
    report: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    values = json.loads(report.read_text())
    report.write_text(json.dumps(values | {section: {}}))
    assert advise(["--report", str(report)]) == 2
    assert "run the comparison again" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["forward_s", "threads"])
def test_report_without_a_figure_that_is_needed_is_refused(
    report: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    values = json.loads(report.read_text())
    del values["variants"][0]["figures"][key]
    report.write_text(json.dumps(values))
    assert advise(["--report", str(report)]) == 2
    assert f"the report lacks {key} of 'auto': run the comparison again" in capsys.readouterr().err


def test_report_without_the_variant_auto_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_report(make_variant("ddp")).write(tmp_path / "report.json")
    assert advise(["--report", str(tmp_path / "report.json")]) == 2
    assert "--variants auto" in capsys.readouterr().err
