"""Training from stores whose rows are still to come: ``build="while_training"``."""

from typing import Any

import lightning as L
from typing_extensions import override


class _ShowStored(L.Callback):
    """Shows in the Trainer's progress bar, and nowhere else, how much of the rows is there."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        store = getattr(trainer.datamodule, "stores", {}).get("train")  # type: ignore[attr-defined]
        if store is not None and store.supply is not None:
            trainer.progress_bar_metrics["stored"] = store.supply.share

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.progress_bar_metrics.pop("stored", None)


def show_stored(trainer: Any) -> None:
    """Show in the progress bar how much of the training rows is there."""
    if not any(isinstance(each, _ShowStored) for each in trainer.callbacks):
        trainer.callbacks.append(_ShowStored())
