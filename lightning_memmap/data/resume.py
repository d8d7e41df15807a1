"""The state of a data module in a checkpoint, and how a fit resumes from it."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import msgspec
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memmap._compat.loops import renew_train_loader_after_epoch
from lightning_memmap._compat.progress import FitPosition
from lightning_memmap._compat.resuming import settle_counters
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.progress import LoaderState


class Resume(msgspec.Struct, frozen=True):
    """The progress of the training of a data module."""

    #: The state of the training loader.
    train: LoaderState | None = None
    #: The counters of the Trainer.
    fit: FitPosition | None = None
    is_validating: bool | None = None
    #: The contents of the training stores, by part.
    stores: dict[str, dict[str, str]] | None = None

    @classmethod
    def read(cls, state: object) -> "Resume":
        """Check the state of a data module, to which subclasses may have added keys."""
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"state_dict: the state of the data module cannot be loaded: {error}. Pass the dict"
                " that state_dict() has returned"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Return the dict that `read` accepts."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        if self.train is not None:
            state["train"] = self.train.as_dict()
        return {name: value for name, value in state.items() if value is not None}

    def check_rows(self, subset: Mapping[str, Any] | None) -> None:
        """Check that training resumes with the same subset of rows."""
        if self.train is not None and self.train.subset != subset:
            raise ValueError(
                f"the checkpoint was trained on {_subset_text(self.train.subset)}, and this data"
                f" module trains on {_subset_text(subset)}: resume with the member and subset of"
                " the checkpoint"
            )

    def check_stores(self, stores: Mapping[str, Mapping[str, str]]) -> None:
        """Warn if training resumes inside an epoch with other data of the same shape."""
        if self.train is None or not 0 < self.train.position < self.train.num_positions:
            return
        for part, saved in (self.stores or {}).items():
            present = stores.get(part, {})
            if any(present.get(name, value) != value for name, value in saved.items()):
                rank_zero_warn(
                    f"the checkpoint was saved inside epoch {self.train.epoch}, and the rows of the"
                    f" {part} store have changed since: the rest of the epoch uses the new rows."
                    " Restore the old store, or resume from a checkpoint of the end of an epoch"
                )

    def settle(self, trainer: L.Trainer) -> None:
        """Correct the counters that a Trainer has restored, so that they match the loader."""
        saved = None
        if self.train is not None and self.fit is not None:
            saved = self.train.epoch, self.fit
        settle_counters(trainer, saved, self.is_validating)


def renew_where_epochs_differ(loader: SuperBatchLoader, trainer: L.Trainer) -> None:
    """Make the Trainer request a new loader before an epoch of another number of steps."""
    epoch = trainer.current_epoch
    skipping = loader.skipped.epochs(loader.order.num_positions)
    changes = {epoch + 1, *skipping, *(skipped + 1 for skipped in skipping)}
    for later in sorted(changes):
        if later > epoch and loader.num_steps_of(later) != len(loader):
            renew_train_loader_after_epoch(trainer, later - 1)
            return


def _subset_text(saved: Mapping[str, Any] | None) -> str:
    if saved is None:
        return "all rows"
    if isinstance(rows := saved.get("rows"), Mapping):
        return f"{rows.get('length')} rows of digest {rows.get('digest')}"
    return f"the rows {dict(saved)!r}"
