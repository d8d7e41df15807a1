"""FSDP2 of modules of several units: shards are shards, and training is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.distributed.harness import launch, sorted_steps
from tests.support.distributed.scenarios.fsdp2 import (
    WIDTH,
    Deep,
    Late,
    Momentum,
    Normed,
    fit,
    make_data,
)
from tests.support.models import TwoOptimizers, make_trainer
from tests.support.versions import weights_only

#: float32 sums in another order, over ten steps that move weights by about 0.1.
ATOL = 2e-6

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class Runs:
    """What the processes reported, and the files that they wrote."""

    def __init__(self, out: Path, ranks: list[dict[str, Any]]) -> None:
        self.out = out
        self.ranks = ranks

    def reports(self, case: str) -> list[Any]:
        return [rank[case] for rank in self.ranks]

    def state(self, case: str) -> dict[str, torch.Tensor]:
        path = self.out / f"{case}.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]  # type: ignore[no-any-return]

    def steps(self, case: str) -> list[list[int]]:
        return sorted_steps([report["seen"]["train"] for report in self.reports(case)])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("one")
    module = fit(out, "plain", processes=1)
    plain = {"seen": {"train": [*module.seen["train"]]}}
    fit(out, "tied", lambda: Deep(tied=True), processes=1)
    fit(out, "bf16-mixed", processes=1, trainer_options={"precision": "bf16-mixed"})
    fit(out, "clipped", processes=1, trainer_options={"gradient_clip_val": 0.1})
    fit(out, "second Trainer", lambda: module, processes=1)
    for make in (Momentum, TwoOptimizers):
        fit(out, make.__name__, make, processes=1)
    return Runs(out, [{"plain": plain}])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("two")
    return Runs(out, launch("fsdp2.two", out, processes=2))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, two: Runs) -> Runs:
    out = tmp_path_factory.mktemp("four")
    folder = str(two.out / "folders" / "step=4.ckpt")
    return Runs(out, launch("fsdp2.four", out, processes=4, folder=folder))


def assert_as(found: dict[str, Any], expected: dict[str, Any], atol: float = ATOL) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


def test_each_process_has_a_shard_of_the_module(two: Runs, four: Runs) -> None:
    for runs, case in ((two, "blocks"), (four, "hybrid")):
        sizes = [report["sizes"] for report in runs.reports(case)]
        # Of four processes two make a copy. The last layer has one row, which one process has.
        assert sum(size["local"] for size in sizes) == sizes[0]["whole"] * len(sizes) // 2
        assert max(size["local"] for size in sizes) <= sizes[0]["whole"] / 2 + WIDTH + 1


def test_units_are_those_asked_for(two: Runs) -> None:
    for case, names in (
        ("blocks", ["FSDPDeep", "FSDPBlock", "FSDPBlock", "FSDPBlock", "Linear"]),
        ("by size", ["FSDPDeep", "FSDPBlock", "FSDPBlock", "FSDPBlock", "Linear"]),
        ("root", ["FSDPDeep", "Block", "Block", "Block", "Linear"]),
        # The outermost has what two blocks share.
        ("tied", ["FSDPDeep", "Block", "Block", "FSDPBlock", "Linear"]),
    ):
        assert two.reports(case)[0]["class"] == names, case


@pytest.mark.parametrize(
    "case",
    ["blocks", "by size", "root", "resharded", "recomputed", "meta", "init_module", "configured",
     "unlike", "saved", "resumed"],
)  # fmt: skip
def test_training_is_that_of_one_process(two: Runs, one: Runs, case: str) -> None:
    if case != "saved":
        assert_as(two.state(case), one.state("plain"))
    steps = one.steps("plain")
    assert two.steps(case) == (steps[4:] if case == "resumed" else steps)


def test_another_trainer_goes_on_with_the_module(two: Runs, one: Runs) -> None:
    # Twenty steps.
    assert_as(two.state("second Trainer"), one.state("second Trainer"), atol=2 * ATOL)


def test_shared_parameters_stay_shared(two: Runs, one: Runs) -> None:
    assert_as(two.state("tied"), one.state("tied"))
    assert not torch.equal(one.state("tied")["net.0.weight"], one.state("plain")["net.0.weight"])


def test_recomputed_units_run_twice(two: Runs) -> None:
    steps = len(two.steps("blocks"))
    assert two.reports("blocks")[0]["calls"] == [steps] * 3
    assert two.reports("recomputed")[0]["calls"] == [2 * steps] * 3
    assert all(
        torch.equal(value, two.state("blocks")[name])
        for name, value in two.state("recomputed").items()
    )


def test_meta_device_begins_as_eager(two: Runs) -> None:
    for case in ("meta", "init_module", "configured"):
        for name, value in two.state("blocks").items():
            assert torch.equal(two.state(case)[name], value), (case, name)
        assert two.reports(case)[0]["losses"] == two.reports("blocks")[0]["losses"]


def test_mixed_precision_casts_units_and_batches(two: Runs, one: Runs) -> None:
    half, single = torch.bfloat16, torch.float32
    for case, weight, table, step in (
        ("blocks", single, single, (single, single, single)),
        ("bf16-mixed", half, single, (half, half, single)),
        ("bf16-true", half, half, (half, half, half)),
    ):
        for report in two.reports(case):
            assert report["dtypes"] == [{(weight, table)}] * 3, case
            found = tuple(report["step"][name] for name in ("x", "y", "loss"))
            assert found == step, case
            assert report["step"]["row"] == torch.int64
    # 8 bits of gradients, of weights that move by about 0.1.
    assert_as(two.state("bf16-mixed"), one.state("bf16-mixed"), atol=5e-3)
    assert not torch.allclose(
        two.state("bf16-mixed")["net.0.weight"], one.state("plain")["net.0.weight"], rtol=0,
        atol=1e-5,
    )  # fmt: skip
    assert two.state("bf16-true")["net.0.weight"].dtype == half


def test_mixed_precision_leaves_running_statistics(two: Runs) -> None:
    for buffers in two.reports("normed"):
        assert buffers == {
            "net.1.running_mean": torch.float32,
            "net.1.running_var": torch.float32,
            "net.1.num_batches_tracked": torch.int64,
        }
    module = Normed.load_from_checkpoint(two.out / "normed.ckpt", **weights_only(True))
    assert not torch.equal(module.net[1].running_mean, Normed().net[1].running_mean)


@pytest.mark.parametrize("make", [Momentum, TwoOptimizers])
def test_states_of_several_optimizers_resume_here_and_on_one_process(
    two: Runs, one: Runs, tmp_path: Path, make: Any
) -> None:
    name = make.__name__
    whole = two.state(name)
    assert_as(whole, one.state(name))
    for key, value in two.state(f"{name} resumed").items():
        assert torch.equal(value, whole[key])
    fit(tmp_path, "alone", make, 1, checkpoint=two.out / name / "step=4.ckpt")
    assert_as(Runs(tmp_path, []).state("alone"), whole)


def test_sharded_checkpoint_becomes_plain_weights(two: Runs, tmp_path: Path) -> None:
    assert two.reports("is folder") == [True, True]
    folder = two.out / "folders" / "step=4.ckpt"
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    weights = torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"]
    assert weights.keys() == Deep().state_dict().keys()
    assert not torch.equal(weights["net.0.weight"], Deep().net[0].weight)


@pytest.mark.parametrize(
    ("strategy", "name", "make"),
    [
        ("memmap_superbatch", "folders", Deep),
        ("memmap_superbatch", "late folders", Late),
        ("memmap_dp", "folders", Deep),
    ],
)
def test_folder_resumes_in_one_process(
    two: Runs, tmp_path: Path, strategy: str, name: str, make: Any
) -> None:
    def train(checkpoint: Path | None) -> dict[str, Any]:
        options = {"strategy": strategy, "devices": 2, "max_epochs": 2, "limit_val_batches": 0}
        trainer = make_trainer(tmp_path, **options)
        module = make()
        trainer.fit(module, make_data(tmp_path, 2), ckpt_path=checkpoint, **weights_only(False))
        return {key: value.cpu() for key, value in module.state_dict().items()}

    assert_as(train(two.out / name / "step=4.ckpt"), train(None))


def test_folder_resumes_before_the_first_gradient_of_a_parameter(two: Runs) -> None:
    whole, resumed = two.state("late"), two.state("late resumed")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert not torch.equal(whole["late.bias"], torch.tensor([0.1]))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_buffers_are_those_of_the_first_process(two: Runs, kind: str) -> None:
    resumed = two.state(f"counted from {kind}")
    # A resumed process begins with those of the checkpoint.
    for name, value in two.state("counted, file").items():
        assert torch.equal(resumed[name], value), name
    assert two.reports("counted") == [resumed["rows"].item()] * 2


def test_missing_weights_are_an_error_unless_loading_is_not_strict(two: Runs) -> None:
    for found in two.reports("missing"):
        assert 'Missing key(s) in state_dict: "net.2.weight"' in found["True"]
        assert found["False"] == ""


def test_metrics_are_no_units_under_manual_optimization(two: Runs, one: Runs) -> None:
    assert_as(two.state("measured"), one.state("Momentum"))
    assert len(set(two.reports("measured"))) == 1


def test_copies_of_shards_are_one_process(four: Runs, one: Runs) -> None:
    assert_as(four.state("hybrid"), one.state("clipped"))
    assert not torch.allclose(
        one.state("clipped")["net.0.weight"], one.state("plain")["net.0.weight"], rtol=1e-3
    )
    assert four.steps("hybrid") == one.steps("plain")
    assert four.reports("sampler") == [{"num_replicas": 4, "rank": rank} for rank in range(4)]


def test_parameters_kept_in_groups_are_one_process(four: Runs, one: Runs) -> None:
    assert_as(four.state("grouped"), one.state("plain"))
    assert four.steps("grouped") == one.steps("plain")


def test_sharded_checkpoint_resumes_on_more_processes(four: Runs, one: Runs) -> None:
    assert_as(four.state("resumed"), one.state("plain"))
    assert four.steps("resumed") == one.steps("plain")[4:]


def test_modules_that_cannot_be_sharded_are_refused(two: Runs) -> None:
    for errors in two.reports("errors"):
        for case, *words in (
            ("class", "wrap_classes=['Block', 'Decoder']", "is a Decoder", "Block, LayerNorm"),
            ("recompute", "activation_checkpointing=True", "wrap_classes"),
            ("own parameter", "scale: under manual optimization", "submodule"),
            ("tied", "blocks.0.up.weight", "manual optimization", "submodule"),
            ("mesh", "was sharded over", "new module"),
            ("meta", "MultiheadAttention", "reset_parameters"),
            ("sparse", "net.0: Embedding with sparse=True", "sparse=False"),
            ("swa", "StochasticWeightAveraging needs", "memmap_superbatch_ddp"),
            ("ema", "EMAWeightAveraging needs", "memmap_superbatch_ddp"),
            ("pruning", "ModelPruning needs", "memmap_superbatch_ddp"),
            # torch has these layers for GPUs alone.
            ("sync_batchnorm", "SyncBatchNorm expected input tensor to be on GPU"),
            ("lbfgs", "LBFGS", "AdamW"),
            ("penalty", "a term computed from the parameters", "weight_decay"),
        ):
            for word in words:
                assert word in errors[case]
