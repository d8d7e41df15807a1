"""With manual optimization, a batch counts once an optimizer has stepped on its gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.contract.resume import runs
from tests.contract.resume.runs import assert_continues, make_data
from tests.support.models import Regression

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`"),
]

EPOCHS, EPOCH_STEPS = 3, 10


class StopError(Exception):
    pass


class Accumulating(Regression):
    """Accumulates the gradients of four batches.

    Args:
        saved: Where it saves a checkpoint after each batch.
        stop: The batch of this run, from 1 on, in which it fails.
    """

    def __init__(self, saved: Path | None = None, stop: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.saved = saved
        self.stop = stop

    def num_batches(self) -> int:
        return len(self.seen.get("train", []))

    def is_last(self, batch_idx: int) -> bool:
        return batch_idx % 4 == 3 or batch_idx == EPOCH_STEPS - 1

    def learn(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.num_batches() == self.stop - 1:
            raise StopError
        self.manual_backward(self.step(batch, "train") / 4)
        if self.is_last(batch_idx):
            self.learn()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.saved is not None:
            name = f"{self.num_batches():02} {self.trainer.global_step:02}.ckpt"
            self.trainer.save_checkpoint(self.saved / name)


class AtBatchEnd(Accumulating):
    """Steps after the batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.step(batch, "train") / 4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Saved before its step.
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.is_last(batch_idx):
            self.learn()


class AcrossEpochs(Accumulating):
    """Its groups go on from one epoch to the next: the third and eighth group begin in two."""

    def is_last(self, batch_idx: int) -> bool:
        return (self.trainer.current_epoch * EPOCH_STEPS + batch_idx) % 4 == 3


class Raw(Accumulating):
    """Steps an optimizer that Lightning doesn't wrap."""

    def learn(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.step()
        optimizer.zero_grad()


class Alternating(Accumulating):
    """Two optimizers, one of which steps in every batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.step(batch, "train"))
        optimizer: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        optimizer.step()
        for each in self.optimizers():  # type: ignore[union-attr]
            each.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[0].parameters(), lr=0.05),
            torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9),
        ]


class WithoutOptimizer(Accumulating):
    """Updates its parameters itself."""

    def learn(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    def is_last(self, batch_idx: int) -> bool:
        return True

    def configure_optimizers(self) -> Any:
        return None


class Collecting(Accumulating):
    """Takes no step in the first epoch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.trainer.current_epoch > 0:
            super().training_step(batch, batch_idx)
        else:
            self.step(batch, "train")

    def on_train_epoch_end(self) -> None:
        if self.saved is not None:
            self.trainer.save_checkpoint(self.saved / f"epoch {self.trainer.current_epoch}.ckpt")


def fit(
    path: Path, module: Any, checkpoint: Path | None = None, epochs: int = EPOCHS, **options: Any
) -> Any:
    return runs.fit(module, make_data(path, EPOCH_STEPS), checkpoint, max_epochs=epochs, **options)


def num_learned(kind: type[Accumulating], num_done: int) -> int:
    """The batches up to the last step of an optimizer."""
    if kind is AcrossEpochs:
        return num_done - num_done % 4
    if kind in (Alternating, WithoutOptimizer):
        return num_done
    if kind is AtBatchEnd:
        # Saved before the step of this batch.
        return num_learned(Accumulating, num_done - 1) if num_done else 0
    epochs, batches = divmod(num_done, EPOCH_STEPS)
    return epochs * EPOCH_STEPS + batches - batches % 4


@pytest.mark.parametrize(
    "kind", [Accumulating, AtBatchEnd, AcrossEpochs, Raw, Alternating, WithoutOptimizer]
)
def test_resume_begins_after_the_last_batch_that_an_optimizer_stepped_on(
    tmp_path: Path, kind: Any
) -> None:
    (tmp_path / "saved").mkdir()
    whole = fit(tmp_path, kind(tmp_path / "saved"))
    checkpoints = sorted((tmp_path / "saved").iterdir())
    assert len(checkpoints) == EPOCHS * EPOCH_STEPS
    for checkpoint in checkpoints[2::3]:
        num_done, num_steps = map(int, checkpoint.stem.split())
        resumed = fit(tmp_path, kind(), checkpoint)
        assert_continues(whole, resumed, num_learned(kind, num_done))
        assert torch.load(checkpoint, weights_only=True)["global_step"] == num_steps


@pytest.mark.parametrize("kind", [Accumulating, AcrossEpochs])
def test_fit_that_max_steps_or_an_epoch_ended_goes_on_with_its_group(
    tmp_path: Path, kind: Any
) -> None:
    whole = fit(tmp_path, kind())
    ends: list[tuple[dict[str, Any], int]] = [
        ({"epochs": 1}, 10),
        ({"epochs": 2}, 20),
        ({"epochs": -1, "max_steps": 2}, 8),
        ({"epochs": -1, "max_steps": 3}, num_learned(kind, 12)),
    ]
    for end, num_done in ends:
        saved = ModelCheckpoint(tmp_path / str(end))
        fit(tmp_path, kind(), callbacks=[saved], **end)
        checkpoint = Path(saved.best_model_path)
        assert_continues(whole, fit(tmp_path, kind(), checkpoint), num_learned(kind, num_done))
        if "max_steps" not in end:
            # Nothing follows, not even for gradients that wait.
            assert not fit(tmp_path, kind(), checkpoint, **end).seen


@pytest.mark.parametrize("stop", [1, 3, 5, 12, 21])
def test_batch_that_fails_is_done_again_with_its_group(tmp_path: Path, stop: int) -> None:
    for kind in (Accumulating, AcrossEpochs):
        whole = fit(tmp_path, kind())
        path = tmp_path / kind.__name__
        callbacks = [OnExceptionCheckpoint(path, "stopped")]
        with pytest.raises(StopError):
            fit(tmp_path, kind(stop=stop), callbacks=callbacks)
        resumed = fit(tmp_path, kind(), path / "stopped.ckpt")
        assert_continues(whole, resumed, num_learned(kind, stop - 1))


def test_epoch_without_a_step_counts_once_it_is_over(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    whole = fit(tmp_path, Collecting(tmp_path / "saved"))
    for epoch in (0, 1):
        resumed = fit(tmp_path, Collecting(), tmp_path / "saved" / f"epoch {epoch}.ckpt")
        assert_continues(whole, resumed, (epoch + 1) * EPOCH_STEPS)


def test_last_group_of_an_epoch_that_was_resumed_inside_is_resumed_again(tmp_path: Path) -> None:
    """Batch 9 of an epoch waits for batch 3 of the next: saved twice before any step."""

    class Leaking(Accumulating):
        def is_last(self, batch_idx: int) -> bool:
            return batch_idx % 4 == 3 and batch_idx < 8

    whole = fit(tmp_path, Leaking())
    checkpoint = None
    for name in ("once", "again"):
        module = Leaking()
        path = tmp_path / f"{name}.ckpt"

        def save(module: Any = module, path: Path = path) -> None:
            if module.trainer.current_epoch == 0:
                module.trainer.save_checkpoint(path)

        module.on_train_epoch_end = save  # type: ignore[method-assign]
        fit(tmp_path, module, checkpoint)
        checkpoint = path
        assert_continues(whole, fit(tmp_path, Leaking(), checkpoint), 8)
