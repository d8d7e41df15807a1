"""What every strategy of several processes must do for Lightning: one run of each kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_memmap.callbacks import PredictionTable
from tests.contract.strategies.cases import CASES, Case, cases_in_several, make_run
from tests.support.models import Regression, Scheduled
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
            self._name, self.out, **case.options, callbacks=[*case.callbacks(self.out)]
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
