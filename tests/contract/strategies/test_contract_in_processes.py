"""What every strategy of several processes must do for Lightning: the same checks on each name.

The right values are those of Lightning's own strategy on one device with the same global batches.
Weights are compared as a user would load them: from a checkpoint into the plain module. The names
and the cases are in `tests.contract.strategies.cases`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_memmap import open_store
from lightning_memmap.callbacks import PredictionTable
from tests.contract.strategies.cases import (
    CASES,
    DEVICES,
    REFERENCE,
    TEST,
    Case,
    cases_in_several,
    contracts_in,
    make_run,
)
from tests.support.datasets import in_dataset_order
from tests.support.models import Regression, Scheduled, weights
from tests.support.processes import launch
from tests.support.reports import Reports
from tests.support.versions import weights_only

#: Optimizer steps after which a run of two epochs is resumed: inside the first epoch, before the
#: uneven step that ends it, at its end, and inside the second.
RESUMED = (3, 6, 7, 10)


class Evaluated(Regression):
    """Regression whose losses are metrics, which count each row over all processes.

    Lightning's own mean of a logged loss is wrong where processes have differing numbers of rows:
    it rounds their mean down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict({"val": MeanMetric(), "test": MeanMetric()})

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        errors = (self(batch["x"]) - batch["y"]).square()
        self.means[stage].update(errors)
        self.log(f"{stage}_loss", self.means[stage])
        return errors.mean()


class Runs:
    """Makes Trainers and data, and reports the results of a run.

    Args:
        out: Directory of the stores and checkpoints.
        name: A key of `CONTRACTS`, or the reference.
    """

    def __init__(self, out: Path, name: str) -> None:
        self.out = out
        self._name = name

    def fit(self, case: Case, save: str, checkpoint: Path | None = None) -> dict[str, Any]:
        """Fit, and save the weights as a checkpoint ``<save>.ckpt``."""
        trainer, data = make_run(
            self._name,
            self.out,
            **case.trainer_options(self._name),
            callbacks=[*case.callbacks(self.out)],
        )
        module = case.make()
        found = set()
        module.net[0].register_forward_hook(lambda _, args, output: found.add(output.dtype))
        trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint and True))
        # What a callback decided by a metric must not differ between processes.
        best: Any = getattr(trainer.checkpoint_callback, "best_model_path", "")
        trainer.save_checkpoint(self.out / f"{save}.ckpt")
        return {
            "seen": module.seen,
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "best": Path(best).name,
            "val_loss": float(trainer.callback_metrics.get("val_loss", 0)),
            "dtypes": found,
            "sharding": trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1},
        }


def run(
    out: Path,
    name: str,
    others: str | None = None,
    cases: Sequence[str] | None = None,
    resumed: Sequence[int] = RESUMED,
) -> dict[str, Any]:
    """Everything that a strategy must support.

    Args:
        out: Directory of the stores and checkpoints.
        name: A key of `CONTRACTS`, or the reference.
        others: Directory of the reference, from whose checkpoint a run is resumed.
        cases: Which fits; all that the strategy must support by default.
        resumed: After which steps a run is resumed.
    """
    runs = Runs(out, name)
    found: dict[str, Any] = {
        case: runs.fit(CASES[case], case) for case in cases or cases_in_several(name)
    }
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Case(
        Scheduled, {"max_epochs": 2, "enable_checkpointing": True}, callbacks=lambda _: [saver]
    )
    rest = Case(Scheduled, {"max_epochs": 2})
    found["whole"] = runs.fit(whole, "whole")
    for step in resumed:
        checkpoint = out / "saved" / f"step={step}.ckpt"
        found[f"resumed {step}"] = runs.fit(rest, f"resumed {step}", checkpoint)
    if others is not None:
        checkpoint = Path(others) / "saved" / "step=3.ckpt"
        found["taken over"] = runs.fit(rest, "taken over", checkpoint)
    trainer, data = make_run(name, out)
    module = Evaluated()
    (validated,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.test(
        module, data, ckpt_path=out / "plain.ckpt", **weights_only(True), verbose=False
    )
    trainer.callbacks.append(PredictionTable(out / "table"))
    predictions = trainer.predict(Regression(), data) or []
    found["evaluation"] = {
        "metrics": {**validated, **tested},
        "seen": module.seen,
        "predicted": {
            key: torch.cat([batch[key] for batch in predictions]) for key in ("row", "y")
        },
        "sharding": trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1},
    }
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("reference")
    return Reports(out, [run(out, REFERENCE, resumed=())], Regression)


@pytest.fixture(scope="module", params=contracts_in("several"))
def strategy(
    request: pytest.FixtureRequest, reference: Reports, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    out = tmp_path_factory.mktemp(request.param)
    ranks = launch(run, out, processes=DEVICES, name=request.param, others=str(reference.out))
    return Reports(out, ranks, Regression)


def test_fits_are_as_on_one_device(strategy: Reports, reference: Reports) -> None:
    cases = [name for name in CASES if name in strategy.ranks[0]]
    assert len(cases) >= 5
    for case in cases:
        check_fit(strategy, reference, case)


def check_fit(strategy: Reports, reference: Reports, case: str) -> None:
    assert strategy.batches(case) == reference.batches(case), case
    (expected,) = reference.of(case)
    for found in (rank[case] for rank in strategy.ranks):
        for key in ("steps", "epoch", "best"):
            assert found[key] == expected[key], (case, key)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=10 * CASES[case].atol)
    # By the processes that have the first layer.
    assert set().union(*(rank[case]["dtypes"] for rank in strategy.ranks)) == expected["dtypes"]
    start = weights(CASES[case].make())
    end = reference.weights(case)
    assert not torch.allclose(end.float(), start, rtol=0, atol=10 * CASES[case].atol)
    torch.testing.assert_close(strategy.weights(case), end, rtol=0, atol=CASES[case].atol)


def test_evaluation_is_over_all_rows_once(strategy: Reports, reference: Reports) -> None:
    assert strategy.batches("evaluation") == reference.batches("evaluation")
    (expected,) = reference.of("evaluation")
    assert set(expected["metrics"]) == {"val_loss", "test_loss"}
    for rank in strategy.ranks:
        assert rank["evaluation"]["metrics"] == pytest.approx(expected["metrics"], abs=5e-5)


def test_predictions_are_of_each_row_once(strategy: Reports, reference: Reports) -> None:
    predicted = [report["predicted"] for report in strategy.of("evaluation")]
    rows = torch.cat([own["row"] for own in predicted])
    assert rows.sort().values.tolist() == TEST.row.tolist()
    (expected,) = reference.of("evaluation")
    values = torch.cat([own["y"] for own in predicted])[rows.argsort()]
    torch.testing.assert_close(values, expected["predicted"]["y"])
    table = in_dataset_order(open_store(strategy.out / "table"))
    assert table["row"].tolist() == TEST.row.tolist()
    torch.testing.assert_close(table["y"], expected["predicted"]["y"])


@pytest.mark.parametrize("step", RESUMED)
def test_resume_is_bitwise(strategy: Reports, step: int) -> None:
    rest = {**strategy.batches("whole"), "train": strategy.batches("whole")["train"][step:]}
    found = strategy.batches(f"resumed {step}")
    assert found["train"] == rest["train"]
    assert torch.equal(strategy.weights(f"resumed {step}"), strategy.weights("whole"))


def test_checkpoint_of_one_process_resumes_in_several(
    strategy: Reports, reference: Reports
) -> None:
    assert strategy.batches("taken over")["train"] == reference.batches("whole")["train"][3:]
    end = reference.weights("whole")
    torch.testing.assert_close(strategy.weights("taken over"), end, rtol=0, atol=5e-6)


def test_checkpoint_of_several_processes_resumes_in_one(
    strategy: Reports, reference: Reports, tmp_path: Path
) -> None:
    checkpoint = strategy.out / "saved" / "step=3.ckpt"
    case = Case(Scheduled, {"max_epochs": 2})
    found = Reports(
        tmp_path, [{"back": Runs(tmp_path, REFERENCE).fit(case, "back", checkpoint)}], Regression
    )
    assert found.batches("back")["train"] == reference.batches("whole")["train"][3:]
    torch.testing.assert_close(found.weights("back"), reference.weights("whole"), rtol=0, atol=5e-6)
