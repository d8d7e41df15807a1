"""Training from stores whose rows are still to come: ``build="while_training"``."""

from collections.abc import Iterable
from operator import length_hint
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_memmap.data.set_up import Planner, SetUp
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.data.splits import argument_of
from lightning_memmap.errors import with_article
from lightning_memmap.store.build import Asked
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.growing import BackgroundBuild
from lightning_memmap.store.sources.stream import is_stream


class FirstEpoch:
    """The builds of a data module that go on while it is used."""

    def __init__(self) -> None:
        self._builds: list[BackgroundBuild] = []

    def begin(self, planner: Planner, splits: Iterable[str]) -> list[str]:
        """Begin to build the stores of splits, whose rows can then be read.

        Returns:
            Splits whose stores are to be built first, or are there.

        Raises:
            ValueError: A dataset is a stream.
            MemmapError: No store can be made of a dataset; see `build_store`.
        """
        stores = planner.stores
        others = [
            split for split in splits if not any(each.is_building(split) for each in self._builds)
        ]
        asked = {split: _asked(stores, split) for split in others if _can_grow(stores, split)}
        if not asked:
            return others
        self._builds.append(BackgroundBuild(asked, stores.options.num_workers, planner.first_rows))
        return [split for split in others if split not in asked]

    def end(self) -> None:
        """End the builds: those that have all rows are finished, others go on in the next run."""
        while self._builds:
            self._builds.pop().stop()


def _can_grow(stores: SplitStores, split: str) -> bool:
    """Whether a store can be built while rows of it are read, and is not there."""
    options, dataset, path = stores.options, stores.datasets[split], stores.directory / split
    if options.build == "first" or dataset is None or not isinstance(path, Path):
        return False
    if is_store(path) or not length_hint(dataset, 1):
        return False
    if is_stream(dataset):
        raise ValueError(
            f"{argument_of(split)}, {with_article(type(dataset).__name__)}, with"
            " build='while_training': its rows come in an order of their own, and training"
            " needs others: give build='first', or a map-style dataset"
        )
    stores.check_place(split)
    return True


def _asked(stores: SplitStores, split: str) -> Asked:
    """What is asked for with the options of a data module."""
    options = stores.options
    return Asked(
        stores.datasets[split],
        Path(stores.directory / split),
        options.num_shards,
        options.num_workers,
        options.fingerprint_of(split),
        options.forms,
        progress=False,
    )


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


def renewed(made: SetUp) -> SetUp:
    """The same set-up, once stores whose rows were to come are whole."""
    coming = {split: store for split, store in made.stores.items() if store.supply is not None}
    whole = {split: found for split, s in coming.items() if (found := s.finished()) is not None}
    if not whole:
        return made
    made.release()
    planner, opened = made.planner, {**made.stores, **whole}
    for split, store in whole.items():
        for part, each in planner.stores.by_part(split, store):
            planner.stores.note(planner.stores.stored_split(part), each)
    return planner.load(opened, planner.place(opened))
