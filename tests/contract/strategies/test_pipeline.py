"""memmap_pipeline: schedules, and several pipelines, against one device with the same batches.

Weights are compared as a user would load them: from a checkpoint into the plain module.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch, mean_losses
from tests.support.distributed.reports import Reports
from tests.support.distributed.scenarios.pipeline import CASES, RESUMED, TEST, Staged, Summing, run
from tests.support.models import weights

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`", "ignore:`weights_only` was not set"
)


@dataclass(frozen=True)
class Setup:
    """How many processes run which cases."""

    processes: int
    options: dict[str, Any]
    cases: tuple[str, ...]


FEW = ("plain", "accumulation", "manual", "several_losses", "players", "double", "frozen")
SETUPS = {
    "gpipe": Setup(2, {"schedule": "gpipe"}, tuple(CASES)),
    "interleaved": Setup(
        2, {"schedule": "interleaved", "num_microbatches": 6}, ("plain", "clip_norm", "manual")
    ),
    "1f1b, two pipelines": Setup(
        4, {"schedule": "1f1b", "data_parallel_size": 2, "num_microbatches": 3}, FEW
    ),
}


def load_checkpoint(reports: Reports, case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(reports.out / f"{case}.ckpt", weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("reference")
    return Reports(out, [run(out, resume=True)], Staged)


@pytest.fixture(scope="module", params=SETUPS)
def setup_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def setup(setup_name: str, reference: Reports, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("setup")
    chosen = SETUPS[setup_name]
    ranks = launch(
        "pipeline.run",
        out,
        processes=chosen.processes,
        devices=chosen.processes,
        options=chosen.options,
        cases=chosen.cases,
        others=[str(reference.out / "saved" / "step=3.ckpt")],
        resume=True,
    )
    return Reports(out, ranks, Staged)


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("pipeline.limits", tmp_path_factory.mktemp("limits"), processes=2)


def test_fit_is_as_on_one_device(setup_name: str, setup: Reports, reference: Reports) -> None:
    for case in SETUPS[setup_name].cases:
        assert setup.batches(case) == reference.batches(case), case
        (expected,) = reference.of(case)
        atol = CASES[case].atol
        for rank in setup.ranks:
            assert rank[case]["steps"] == expected["steps"]
            for key in ("val_sum", "val_rows"):
                found = rank[case]["metrics"][key]
                assert found == pytest.approx(expected["metrics"][key], rel=1e-4), key
        start, end = weights(CASES[case].make()), reference.weights(case)
        assert not torch.allclose(end, start.to(end.dtype), rtol=0, atol=10 * atol)
        torch.testing.assert_close(setup.weights(case), end, rtol=0, atol=atol)


def test_losses_of_steps_are_the_mean_over_rows(
    setup_name: str, setup: Reports, reference: Reports
) -> None:
    for case, atol in (("plain", 1e-5), ("double", 1e-12)):
        if case in SETUPS[setup_name].cases:
            (expected,) = reference.of(case)
            wanted = torch.tensor(expected["losses"], dtype=torch.float64)
            torch.testing.assert_close(mean_losses(setup.of(case)), wanted, rtol=0, atol=atol)


def test_each_process_has_only_its_own_stages(setup: Reports) -> None:
    whole = sum(parameter.numel() for parameter in Staged().parameters())
    assert sum(rank["plain"]["local"] for rank in setup.ranks) == whole * len(setup.of("plain"))
    assert all(rank["plain"]["local"] < whole for rank in setup.ranks)


def test_checkpoint_is_that_of_one_device(setup: Reports, reference: Reports) -> None:
    found, expected = load_checkpoint(setup, "plain"), load_checkpoint(reference, "plain")
    assert list(found["state_dict"]) == list(expected["state_dict"])
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        torch.testing.assert_close(ours["state"][index], state, rtol=0, atol=1e-5)


def test_evaluation_is_over_all_rows_once(setup: Reports, reference: Reports) -> None:
    assert setup.batches("evaluated 0") == reference.batches("evaluated 0")
    (expected,) = reference.of("evaluated 0")
    assert expected["metrics"]["test_rows"] == len(TEST)
    for rank in setup.ranks:
        found = rank["evaluated 0"]["metrics"]
        assert found == pytest.approx(expected["metrics"], rel=1e-5)
    reports = setup.of("evaluated 0")
    rows = torch.cat([report["rows"] for report in reports])
    assert rows.sort().values.tolist() == TEST.row.tolist()
    if len(reports) == 1:
        assert rows.tolist() == TEST.row.tolist()
    values = torch.cat([report["y"] for report in reports])[rows.argsort()]
    torch.testing.assert_close(values, expected["y"])
    # All processes of a pipeline have the predictions.
    for rank in setup.ranks:
        assert torch.equal(
            rank["evaluated 0"]["y"], reports[rank["evaluated 0"]["sharding"]["rank"]]["y"]
        )


def test_resume_is_bitwise(setup: Reports) -> None:
    for step in RESUMED:
        name = f"resumed {step}"
        assert setup.batches(name)["train"] == setup.batches("whole")["train"][step:]
        assert torch.equal(setup.weights(name), setup.weights("whole"))


def test_checkpoint_of_one_device_resumes_in_a_pipeline(setup: Reports, reference: Reports) -> None:
    assert setup.batches("other 0")["train"] == reference.batches("whole")["train"][3:]
    end = reference.weights("whole")
    torch.testing.assert_close(setup.weights("other 0"), end, rtol=0, atol=5e-6)


REFUSED = {
    "tied": "ValueError: net.2.weight (stage 1) and net.4.weight (stage 2) are one parameter",
    "outside": "ValueError: no stage has the parameter 'scale' of Outside",
    "three stages": "ValueError: ThreeStages.stages() returns 3 stages for 2 processes",
    "one stage": "ValueError: OneStage.stages() returns 1 stages for 2 processes",
    "no stages": "UnsuitableModuleError: memmap_pipeline: NoStages needs a method stages()",
    "output": "TypeError: under memmap_pipeline the output of the module in training_step",
    "calls outside": "RuntimeError: memmap_pipeline: the module was called outside of a step",
    "lbfgs": "ValueError: LBFGS: it needs the gradients of the whole module on one process",
    "penalty": "ValueError: the loss has a term computed from the parameters themselves",
    "sparse": "ValueError: net.1: EmbeddingBag with sparse=True",
    "swa": "ValueError: StochasticWeightAveraging needs the weights of the whole",
    "ema": "ValueError: EMAWeightAveraging needs the weights of the whole",
    "pruning": "ValueError: ModelPruning needs the weights of the whole",
    "finetuning": "ValueError: Unfreezes needs the weights of the whole",
    "meta": "UnsuitableModuleError: net.4 (Linear): unset",
    "sync_batchnorm": "ValueError: sync_batchnorm=True",
    "sizes": "ValueError: data_parallel_size=3 does not divide the 2 processes",
    "micro-batches": "ValueError: num_microbatches=1: schedule='1f1b' with 2 processes",
    "rounds": "ValueError: num_microbatches=5: schedule='interleaved' with 2 processes",
}


def test_what_is_not_supported_is_refused_on_every_rank(limits: list[dict[str, Any]]) -> None:
    for rank in limits:
        assert rank["report"].keys() == REFUSED.keys()
        for name, report in REFUSED.items():
            assert rank["report"][name].startswith(report), name


def test_running_statistics_are_of_the_data_alone(limits: list[dict[str, Any]]) -> None:
    (buffers,) = (rank["buffers"] for rank in limits if rank["buffers"])
    # Two epochs of seven steps with four micro-batches each, and no row but those of the data.
    assert buffers["4.num_batches_tracked"] == 2 * 7 * 4
    assert buffers["4.running_mean"].abs().max() < 2
    assert buffers["4.running_var"].max() < 1


def test_layers_on_the_meta_device_are_initialised_and_others_keep_their_values(
    limits: list[dict[str, Any]],
) -> None:
    begun = {name: value for rank in limits for name, value in rank["begun"].items()}
    loaded = Staged().state_dict()
    assert begun.keys() == dict(Staged().named_parameters()).keys()
    for name, value in begun.items():
        if name.startswith(("net.0", "net.4")):
            # As nn.Linear draws them.
            assert 0 < value.abs().max() <= begun[name.replace("bias", "weight")].shape[1] ** -0.5
        else:
            assert torch.equal(value, loaded[name])


def test_smaller_batches_need_no_schedule_and_outputs_are_not_kept(tmp_path: Path) -> None:
    first, last = launch("pipeline.economy", tmp_path, processes=2)
    # Two epochs of seven steps, of 10, 7 and 6 rows, and one call more to find the shapes.
    assert first["calls"] == 2 * 7 * 5 + 1
    # Not every torch calls the loss for that, too.
    assert last["losses"] - 2 * 7 * 5 in (0, 1)
    # Each has its backward pass before the next one.
    assert last["alive"] <= 1


def test_large_float16_gradients_of_two_pipelines_stay_finite(tmp_path: Path) -> None:
    for rank in launch("pipeline.steep", tmp_path, processes=2):
        assert all(weight.isfinite().all() for weight in rank["weights"])


def test_two_pipelines_have_the_buffers_of_the_first(tmp_path: Path) -> None:
    ranks = launch("pipeline.summing", tmp_path, processes=2)
    found, resumed = (Reports(tmp_path, ranks, Summing).weights(n) for n in ("whole", "resumed"))
    assert torch.equal(found, resumed)
