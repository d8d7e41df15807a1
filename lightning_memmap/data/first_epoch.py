"""Shows the progress of ``build="while_training"`` in the first epoch."""

from typing import Any

import lightning as L
from typing_extensions import override


class _ShowStored(L.Callback):
    """Shows in the Trainer's progress bar which fraction of the training rows is stored."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        store = getattr(trainer.datamodule, "stores", {}).get("train")  # type: ignore[attr-defined]
        if store is not None and store.pending is not None:
            trainer.progress_bar_metrics["stored"] = store.pending.progress

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.progress_bar_metrics.pop("stored", None)


def show_stored(trainer: Any) -> None:
    """Show in the progress bar which fraction of the training rows is stored."""
    if not any(isinstance(callback, _ShowStored) for callback in trainer.callbacks):
        trainer.callbacks.append(_ShowStored())
