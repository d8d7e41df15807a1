"""What every strategy of this pack must do for Lightning: the same checks on each of `CONTRACTS`.

Strategies of one process run here; strategies of several in `test_contract_in_processes`. Wherever
a result has a right value, it is the one of Lightning's own strategy on one device with the same
global batches.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from lightning_memmap import open_store, register
from lightning_memmap.callbacks import PredictionTable
from lightning_memmap.strategies import STRATEGIES
from tests.contract.strategies.cases import (
    CASES,
    CONTRACTS,
    DEVICES,
    REFERENCE,
    TEST,
    TRAIN,
    VAL,
    Case,
    contracts_in,
    make_run,
)
from tests.support.daily import slice_of_today
from tests.support.datasets import in_dataset_order
from tests.support.models import (
    ACCELERATOR_VARIABLE,
    IS_SIMULATED,
    Points,
    Regression,
    Scheduled,
    TwoOptimizers,
    make_trainer,
    weights,
)
from tests.support.rows import joined
from tests.support.traces import changed_by_fit
from tests.support.versions import weights_only

#: Gradients that are computed in several calls are rounded otherwise, and bf16 keeps 8 bits. Seen:
#: 0.003 where weights move by up to 0.35, seven steps of Adam with 0.05 each.
BF16_IN_CALLS = {"rtol": 0.0, "atol": 0.01}

every_strategy = pytest.mark.parametrize("name", contracts_in("one"))
#: Steps that are made ahead are a matter of the loader, which these do not change: with them and
#: without, the same is computed of a step.
OF_THE_STEP = (
    *("clip_norm", "clip_value", "float64", "bfloat16", "bfloat16_weights", "no_inference_mode"),
    *("two_optimizers", "scheduler", "plateau", "best_checkpoint"),
)

#: A way to compile for which there is nothing on a CPU.
GRAPHS = pytest.param(
    {"mode": "reduce-overhead"},
    marks=pytest.mark.skipif(
        os.environ.get(ACCELERATOR_VARIABLE) != "gpu", reason="needs a CUDA device"
    ),
)

#: memmap_dp does not support modules that step their optimizers themselves.
BY_HAND = ("manual", "two_optimizers", "several_losses", "players")


def fit(
    name: str, path: Path, module: Regression | None = None, **options: Any
) -> tuple[Regression, L.Trainer]:
    trainer, data = make_run(name, path, **options)
    module = module or Regression()
    trainer.fit(module, datamodule=data)
    return module, trainer


def fit_case(name: str, path: Path, case: Case) -> tuple[Regression, L.Trainer]:
    module = case.make()
    # Beside those of the rows.
    module.net[0].register_forward_hook(lambda _, args, output: module.dtypes.add(output.dtype))
    callbacks = [*case.callbacks(path / name)]
    return fit(name, path, module, callbacks=callbacks, **case.trainer_options(name))


@pytest.fixture(scope="module")
def reference_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Regression, L.Trainer]]:
    """Fits a case on one device, once for all strategies."""
    directory = tmp_path_factory.mktemp("reference")

    @functools.cache
    def fit_once(case: str) -> tuple[Regression, L.Trainer]:
        return fit_case(REFERENCE, directory / case, CASES[case])

    return fit_once


def seen_steps(name: str, module: Regression, stage: str) -> list[list[int]]:
    """The rows of each step; where several calls saw them, put together in dataset order."""
    seen = module.seen.get(stage, [])
    calls = 1 if name == REFERENCE else CONTRACTS[name].calls_per_step
    if calls == 1:
        return seen
    assert len(seen) % calls == 0
    steps = [seen[start : start + calls] for start in range(0, len(seen), calls)]
    assert all(all(step) for step in steps)
    return [sorted(joined(step)) for step in steps]


def test_contracts_cover_every_strategy() -> None:
    assert {contract.strategy for contract in CONTRACTS.values()} == {n for n, *_ in STRATEGIES}


def test_registering_again_changes_nothing() -> None:
    before = dict(StrategyRegistry)
    register()
    assert dict(StrategyRegistry) == before


@pytest.mark.parametrize("name", CONTRACTS)
class TestRegistration:
    def test_name_selects_the_strategy(self, name: str, tmp_path: Path) -> None:
        contract = CONTRACTS[name]
        trainer = make_trainer(
            tmp_path, strategy=contract.strategy, devices=DEVICES, accelerator="cpu"
        )
        assert type(trainer.strategy) is contract.make_class()

    def test_object_is_used_as_it_is(self, name: str, tmp_path: Path) -> None:
        strategy = CONTRACTS[name].make_class()()
        trainer = make_trainer(tmp_path, strategy=strategy, devices=DEVICES, accelerator="cpu")
        assert trainer.strategy is strategy


@every_strategy
def test_fit_leaves_nothing_on_module_plugin_and_trainer(tmp_path: Path, name: str) -> None:
    left = {}
    for key in (REFERENCE, name):
        trainer, data = make_run(key, tmp_path, plugins=[Precision()], max_epochs=1)
        left[key] = changed_by_fit(trainer, Regression(), data)
    assert not left[name] - left[REFERENCE]


@every_strategy
class TestStages:
    @pytest.mark.parametrize(("stage", "points"), [("validate", VAL), ("test", TEST)])
    def test_evaluation_is_over_all_rows_once(
        self, name: str, tmp_path: Path, stage: str, points: Points
    ) -> None:
        trainer, data = make_run(name, tmp_path)
        module = Regression()
        (metrics,) = getattr(trainer, stage)(module, datamodule=data, verbose=False)
        ((key, value),) = metrics.items()
        assert value == pytest.approx(mean_loss(Regression(), points), rel=1e-5)
        assert joined(seen_steps(name, module, key.removesuffix("_loss"))) == points.row.tolist()

    def test_predictions_are_in_dataset_order_for_callbacks_too(
        self, name: str, tmp_path: Path
    ) -> None:
        class Writer(BasePredictionWriter):
            rows: list[int]

            def write_on_batch_end(
                self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any,
                batch_idx: int, dataloader_idx: int,
            ) -> None:  # fmt: skip
                assert torch.equal(batch["row"], prediction["row"])
                assert [index + 200 for index in indices] == batch["row"].tolist()
                self.rows += prediction["row"].tolist()

        writer = Writer("batch")
        writer.rows = []
        callbacks = [writer, PredictionTable(tmp_path / "table")]
        trainer, data = make_run(name, tmp_path, callbacks=callbacks)
        predictions: Any = trainer.predict(Regression(), datamodule=data)
        assert writer.rows == TEST.row.tolist()
        returned = {key: torch.cat([batch[key] for batch in predictions]) for key in ("row", "y")}
        for found in (returned, in_dataset_order(open_store(tmp_path / "table"))):
            assert found["row"].tolist() == TEST.row.tolist()
            torch.testing.assert_close(found["y"], Regression().net(TEST.x).detach())


def mean_loss(module: Regression, points: Points) -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(module.net(points.x), points.y).item()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in contracts_in("one")
        for case in CASES
        if not (name.endswith("+prefetch") and case in OF_THE_STEP)
        and not (name == "memmap_dp" and case in BY_HAND)
    ],
)
def test_fit_of_a_case_is_as_on_one_device(
    name: str,
    tmp_path: Path,
    case: str,
    reference_of: Callable[[str], tuple[Regression, L.Trainer]],
) -> None:
    found, trainer = fit_case(name, tmp_path, CASES[case])
    expected, reference = reference_of(case)
    assert trainer.global_step == reference.global_step > 0
    assert trainer.current_epoch == reference.current_epoch
    for parameter, start in zip(found.parameters(), CASES[case].make().parameters(), strict=True):
        assert not torch.equal(parameter, start.to(parameter.dtype))
    is_rounded = case.startswith("bfloat16") and CONTRACTS[name].calls_per_step > 1
    torch.testing.assert_close(
        weights(found), weights(expected), **(BF16_IN_CALLS if is_rounded else {})
    )
    assert found.dtypes == expected.dtypes
    assert best_of(trainer) == best_of(reference)
    assert found.seen.keys() == expected.seen.keys()
    for stage, steps in expected.seen.items():
        assert [*map(sorted, seen_steps(name, found, stage))] == [*map(sorted, steps)], stage


def best_of(trainer: L.Trainer) -> str:
    """The name of the checkpoint that a metric chose, which any strategy can load."""
    return Path(getattr(trainer.checkpoint_callback, "best_model_path", "")).name


@pytest.mark.parametrize("case", ["accumulation", "clip_norm", "clip_value", "bfloat16"])
def test_option_of_a_case_has_an_effect(
    tmp_path: Path, case: str, reference_of: Callable[[str], tuple[Regression, L.Trainer]]
) -> None:
    with_option, trainer = reference_of(case)
    without, _ = fit(REFERENCE, tmp_path, CASES[case].make(), max_epochs=trainer.max_epochs)
    assert not torch.allclose(weights(with_option), weights(without), rtol=1e-4)


@every_strategy
class TestTraining:
    def test_limits_hold_in_each_stage(self, name: str, tmp_path: Path) -> None:
        trainer, data = make_run(
            name,
            tmp_path,
            limit_train_batches=3,
            limit_val_batches=2,
            limit_test_batches=1,
            limit_predict_batches=0.5,
            num_sanity_val_steps=0,
        )
        module = Regression()
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
        predictions = trainer.predict(module, datamodule=data)
        assert {stage: len(seen_steps(name, module, stage)) for stage in module.seen} == {
            "train": 3, "val": 2, "test": 1
        }  # fmt: skip
        # Of three steps: 10 rows, and two that share the other 15.
        assert predictions is not None
        assert [len(batch["row"]) for batch in predictions] == [10]

    @pytest.mark.skipif(IS_SIMULATED, reason="nothing is compiled for simulated GPUs")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")
    @pytest.mark.parametrize("options", [{"backend": "aot_eager"}, GRAPHS], ids=str)
    def test_compiled_module_is_as_one_that_is_not(
        self, name: str, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        plain, _ = fit(name, tmp_path, Quiet())
        module: Any = Quiet()
        trainer, data = make_run(name, tmp_path)
        is_divided = name == "memmap_dp" and torch.cuda.device_count() > 1
        if "mode" in options and is_divided:
            with pytest.raises(ValueError, match=r"CUDA graphs.* 2 devices"):
                trainer.fit(torch.compile(module, **options), datamodule=data)
            return
        trainer.fit(torch.compile(module, **options), datamodule=data)
        torch._dynamo.reset()
        torch.testing.assert_close(weights(module), weights(plain))


class Quiet(Regression):
    """Steps that compute and do nothing else, which is what a compiler is given."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        nn.functional.mse_loss(self.net(batch["x"]), batch["y"])


@every_strategy
class TestCallbacks:
    def test_evaluation_with_checkpoint_path_loads_it(self, name: str, tmp_path: Path) -> None:
        trainer, data = make_run(name, tmp_path, max_epochs=2)
        module = Regression()
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        fresh, data = make_run(name, tmp_path)
        (metrics,) = fresh.test(
            Regression(), datamodule=data, ckpt_path=tmp_path / "end.ckpt", verbose=False,
            **weights_only(True),
        )  # fmt: skip
        assert metrics["test_loss"] == pytest.approx(mean_loss(module, TEST), rel=1e-5)

    def test_transfer_hooks_get_plain_batches_and_may_change_them(
        self, name: str, tmp_path: Path
    ) -> None:
        calls = []

        class Hooked(Regression):
            def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                calls.append("before")
                assert type(batch) is dict
                assert all(type(leaf) is Tensor for leaf in batch.values())
                return {**batch, "x": batch["x"] * 2}

            def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
                calls.append("transfer")
                return super().transfer_batch_to_device(batch, device, index)

            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                calls.append("after")
                assert type(batch) is dict
                return {**batch, "row": batch["row"] + 1000}

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                rows = batch["row"].cpu() - 1000
                torch.testing.assert_close(batch["x"].cpu(), 2 * TRAIN.x[rows])
                return super().training_step(batch, batch_idx)

        module, _ = fit(name, tmp_path, Hooked(), num_sanity_val_steps=0)
        assert sorted(joined(module.seen["train"])) == list(range(1000, 1063))
        assert calls == ["before", "transfer", "after"] * sum(
            len(seen) for seen in module.seen.values()
        )

    def test_metric_of_training_is_the_mean_over_rows(self, name: str, tmp_path: Path) -> None:
        class Logging(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.log(
                    "mean_row",
                    batch["row"].float().mean(),
                    on_step=False,
                    on_epoch=True,
                    batch_size=len(batch["row"]),
                )
                return super().training_step(batch, batch_idx)

        _, trainer = fit(name, tmp_path, Logging())
        assert trainer.callback_metrics["mean_row"].item() == pytest.approx(31)


class SaveEverywhere(L.Callback):
    """Saves a checkpoint at every point where a run may stop for good: after each optimizer step,
    validation and epoch. (Gradients that are still being gathered are in no checkpoint.)"""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.global_step = 0
        #: The checkpoints, each with the number of batches that it is saved after.
        self.saved: dict[Path, int] = {}

    def save(self, trainer: L.Trainer, when: str) -> None:
        path = self.directory / f"{len(self.saved):03} {when} {trainer.global_step}.ckpt"
        self.saved[path] = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        trainer.save_checkpoint(path)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self.global_step:
            self.save(trainer, "step")
        self.global_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer, "epoch")


#: How runs that are resumed are set up.
RESUMED: dict[str, tuple[Callable[[], Regression], dict[str, Any]]] = {
    "plain": (Scheduled, {}),
    "accumulation": (Regression, {"accumulate_grad_batches": 3}),
    "optimizers": (TwoOptimizers, {}),
    "validation": (Regression, {"val_check_interval": 3}),
    "both": (Regression, {"val_check_interval": 3, "accumulate_grad_batches": 3}),
    "limit": (Regression, {"limit_train_batches": 5}),
}
#: Under the first strategy all of them; under others what is a matter of the loader, which makes
#: steps ahead, or of the strategy, which computes them.
RESUMED_UNDER = {
    "memmap_superbatch+prefetch": ("plain", "validation", "limit"),
    "memmap_dp": ("plain", "both"),
    "memmap_model_parallel": ("plain", "optimizers", "both"),
}


class TestResume:
    @pytest.mark.parametrize(
        ("name", "resumed"),
        [
            (name, resumed)
            for name in contracts_in("one")
            for resumed in RESUMED_UNDER.get(name, RESUMED)
        ],
    )
    def test_resume_from_anywhere_ends_with_the_same_weights(
        self, name: str, tmp_path: Path, resumed: str
    ) -> None:
        make, options = RESUMED[resumed]
        options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
        callback = SaveEverywhere(tmp_path / "saved")
        whole, _ = fit(name, tmp_path, make(), callbacks=[callback], **options)
        assert len(callback.saved) > 4
        for checkpoint, num_done in [*callback.saved.items()][slice_of_today(2)]:
            module = make()
            trainer, data = make_run(name, tmp_path, **options)
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, **weights_only(True))
            left = seen_steps(name, whole, "train")[num_done:]
            assert seen_steps(name, module, "train") == left, checkpoint.name
            assert torch.equal(weights(module), weights(whole)), checkpoint.name
            assert trainer.current_epoch == 2
