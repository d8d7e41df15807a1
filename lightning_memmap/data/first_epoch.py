"""Training from stores that are built meanwhile: ``build="while_training"``."""

import logging
from operator import length_hint
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_memmap.data.set_up import SetUp
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.data.splits import argument_of
from lightning_memmap.errors import with_article
from lightning_memmap.store.build import Asked
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.growing import BackgroundBuild, GrowingStore
from lightning_memmap.store.sources.stream import is_stream

_log = logging.getLogger(__name__)


class FirstEpoch:
    """The builds of a data module that go on while it is used, by split."""

    def __init__(self) -> None:
        self._builds: dict[str, BackgroundBuild] = {}

    def begin(self, stores: SplitStores, split: str) -> bool:
        """Begin to build the store of a split, and return as soon as its rows can be read.

        Returns:
            False where it is to be built first, or is there.

        Raises:
            ValueError: The dataset is a stream.
            MemmapError: No store can be made of the dataset; see `build_store`.
        """
        options, dataset = stores.options, stores.datasets[split]
        path = stores.directory / split
        if options.build == "first" or dataset is None or not isinstance(path, Path):
            return False
        if is_store(path) or not length_hint(dataset, 1):
            return False
        if split in self._builds and self._builds[split].is_alive:
            return True
        if is_stream(dataset):
            raise ValueError(
                f"{argument_of(split)}, {with_article(type(dataset).__name__)}, with"
                " build='while_training': its rows come in an order of their own, and training"
                " needs others: give build='first', or a map-style dataset"
            )
        if split.startswith("train/"):
            _log.warning("%s: sets that are mixed are stored first", argument_of(split))
            return False
        stores.check_place(split)
        first = next((each for each in self._builds.values() if each.is_alive), None)
        asked = Asked(
            dataset,
            path,
            options.num_shards,
            options.num_workers,
            options.fingerprint_of(split),
            options.forms,
            progress=False,
        )
        build = BackgroundBuild(asked, after=first)
        if build.is_unfit:
            _log.warning(
                "%s: its files are read piece by piece: it is stored first", argument_of(split)
            )
            return False
        self._builds[split] = build
        return True

    def end(self) -> None:
        """End the builds: those that have all rows are finished, others go on in the next run."""
        while self._builds:
            self._builds.popitem()[1].stop()


class _ShowStored(L.Callback):
    """Shows in the Trainer's progress bar how much of the training rows is stored."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        store = getattr(trainer.datamodule, "stores", {}).get("train")  # type: ignore[attr-defined]
        if isinstance(store, GrowingStore):
            pl_module.log("stored", store.serving.share, prog_bar=True, logger=False, batch_size=1)


def show_stored(trainer: Any) -> None:
    """Show in the progress bar how much of the training rows is stored."""
    if not any(isinstance(each, _ShowStored) for each in trainer.callbacks):
        trainer.callbacks.append(_ShowStored())


def renewed(made: SetUp) -> SetUp:
    """The same set-up, once stores that were being built are whole."""
    growing = {split: s for split, s in made.stores.items() if isinstance(s, GrowingStore)}
    whole = {split: found for split, s in growing.items() if (found := s.finished()) is not None}
    if not whole:
        return made
    made.release()
    planner, opened = made.planner, {**made.stores, **whole}
    for split, store in whole.items():
        planner.stores.note(planner.stores.stored_split(split), store)
    return planner.load(opened, planner.place(opened))
