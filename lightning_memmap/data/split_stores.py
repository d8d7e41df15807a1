"""The stores of a data module's splits: their paths, how they are built and opened, and which of
their rows each split uses.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.splits import SplitName, has_several, name_argument, name_datasets
from lightning_memmap.errors import (
    MemmapError,
    StoreError,
    StoreNotFoundError,
    nearest,
    nearest_file,
    split_in_errors,
    with_article,
)
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.factory import SamplerFactory
from lightning_memmap.sampling.mixture import Mixture
from lightning_memmap.sampling.packed import Packed
from lightning_memmap.sampling.rows import Rows
from lightning_memmap.sampling.selection import Selection
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.build import build
from lightning_memmap.store.build_spec import BuildSpec
from lightning_memmap.store.building import describe_unfinished_build
from lightning_memmap.store.directory import is_store, list_stores
from lightning_memmap.store.growing import BackgroundBuild, open_growing
from lightning_memmap.store.joined import JoinedStore
from lightning_memmap.store.paths import StoreUrl, path_or_url
from lightning_memmap.store.recognition import check_dataset
from lightning_memmap.store.remote.cache import RemoteStore
from lightning_memmap.store.sources.iterable import is_iterable_only


class StoreOrigin(NamedTuple):
    """The dataset and options that a store was built from, and the build that it holds."""

    dataset: Any
    num_shards: int | None
    fingerprint: str | None
    generation: str


@dataclass(frozen=True)
class SplitStores:
    """The stores of the splits of one data module."""

    options: DataOptions
    #: The Trainer's strategy, or None. It may know the member that this process trains.
    strategy: Any
    #: The stores that were built or recognized, so that they need no further check, by split.
    #: Building and opening adds to them.
    known_stores: dict[str, StoreOrigin]
    #: Whether builds and downloads show progress bars.
    show_progress: bool = True

    @property
    def datasets(self) -> dict[str, Any]:
        """All datasets by split. Several datasets of one argument have a split each."""
        arguments = self.options.datasets
        if arguments["train"] is None and self.options.mixed:
            arguments["train"] = dict.fromkeys(self.options.mixed)
        by_split = dict[str, Any]()
        for role, datasets in arguments.items():
            by_split |= name_datasets(role, datasets)
        return by_split

    def parts(self, split: str) -> list[str]:
        """Return the splits whose stores hold the rows of a split; several for a mixture."""
        return [name for name in self.datasets if split in (name, SplitName.parse(name).role)]

    @property
    def directory(self) -> Path | StoreUrl:
        """The directory of the stores, or its URL."""
        text = str(self.options.store_dir)
        if "{member}" not in text:
            return self.options.store_dir
        member = self._member(f"store_dir={text!r}")
        return path_or_url(text.replace("{member}", str(member)))

    def _member(self, reason: str) -> int:
        """Return the number of the member that this process trains.

        Args:
            reason: The argument that needs the member, for the error.
        """
        member: int | None = self.options.member
        if member is None:
            # memmap_independent knows its member.
            member = getattr(self.strategy, "member", None)
        if member is None:
            raise ValueError(
                f"{reason}: the member is unknown: train with strategy='memmap_independent', or set"
                " member=..."
            )
        return member

    def stored_split(self, split: str) -> str:
        """Return the split whose store holds the rows of a split, such as ``train`` for a fold."""
        selection = self.options.selection(split)
        return split if selection is None else selection.stored_split(split)

    def path(self, split: str) -> Path | StoreUrl:
        """Return the path or URL of the store that holds the rows of a split."""
        return self.directory / self.stored_split(split)

    def check_options(self) -> None:
        """Check that the options fit the datasets, either of which may have been set since."""
        self.check_datasets()
        self.options.check_splits(self.datasets)
        windows = self.options.windows
        for dataset in self.datasets.values():
            # A dataset whose rows are cut for certain windows, such as TokenStream.
            if (
                windows is not None
                and (check := getattr(dataset, "check_windows", None)) is not None
            ):
                check(windows)

    def check_datasets(self) -> None:
        """Check that validation rows have one source, and that several training sets are mixed."""
        train = self.options.datasets["train"]
        mixed = self.options.mixed
        subset = f"subset={self.options.subset!r}"
        if self.options.datasets["val"] is not None and self.stored_split("val") != "val":
            raise ValueError(
                f"{subset} with a val_dataset: the held-out rows are the validation rows: remove"
                " val_dataset, or pass it as test_dataset"
            )
        sampler = f"sampler={self.options.sampler!r}"
        names = [*train] if has_several(train) else []
        if unknown := [name for name in mixed if names and name not in names]:
            raise ValueError(
                f"{sampler}: train_dataset has no set {unknown[0]!r}, only {', '.join(names)}"
                f"{nearest(unknown[0], names)}"
            )
        if names and {*names} != {*mixed}:
            shares = dict.fromkeys(names, round(1 / len(names), 2))
            example: SamplerFactory = Mixture(shares)
            if isinstance(maker := self.options.sampler, Packed):
                example = Packed(maker.field, maker.length, shares=shares)
            raise ValueError(
                f"train_dataset has the sets {', '.join(names)}, and {sampler}: set the fraction of"
                f" each with sampler={example!r}, or concatenate them with"
                " torch.utils.data.ConcatDataset. For a dict of batches in each step, pass"
                " Lightning a CombinedLoader over the loaders of several data modules"
            )
        if mixed and train is not None and not names:
            sets = ", ".join(f"{name!r}: ..." for name in mixed)
            raise ValueError(
                f"{sampler}: mixes several training sets, and train_dataset is only one: pass a"
                f" dict, such as train_dataset={{{sets}}}"
            )
        if mixed and self.options.selection("train") is not None:
            raise ValueError(
                f"{subset} with {sampler}: rows of a mixture are selected in each of its sets, and"
                f" none are held out: use subset={{'train/{mixed[0]}': Subset(...)}}, and a"
                " val_dataset"
            )

    def needed_builds(
        self, splits: Iterable[str], background_builds: Iterable[BackgroundBuild]
    ) -> tuple[dict[str, BuildSpec], dict[str, BuildSpec]]:
        """Return the builds that splits need: those before training, and those during training.

        No build is needed if a split has no dataset, if this data module has built its store, or if
        one of the background builds does.
        """
        before = dict[str, BuildSpec]()
        during = dict[str, BuildSpec]()
        stored_splits = dict.fromkeys(map(self.stored_split, splits))
        for part in chain.from_iterable(map(self.parts, stored_splits)):
            if any(build.is_building(part) for build in background_builds):
                continue
            if (spec := self._needed_build(part)) is None:
                continue
            if self.options.build == "first" or is_store(spec.directory.path):
                before[part] = spec
                continue
            if spec.is_iterable_only:
                raise ValueError(
                    f"{name_argument(part)}, {with_article(type(spec.dataset).__name__)}, with"
                    " build='while_training': a stream can't be read in the order of training: use"
                    " build='first', or a map-style dataset"
                )
            during[part] = spec
        return before, during

    def _needed_build(self, split: str) -> BuildSpec | None:
        options = self.options
        dataset = self.datasets[split]
        # At a URL, `open` finds the store or raises.
        if dataset is None or isinstance(self.directory, StoreUrl):
            return None
        path = self.directory / split
        with suppress(MemmapError):
            store = open_store(path)
            if self._is_known(split, store):
                if not is_iterable_only(dataset):
                    # It may have been changed in place.
                    self._check(split, store)
                return None
        role, name = SplitName.parse(split)
        if name and is_store(Path(self.directory) / role):
            raise StoreError(
                f"store_dir: {self.directory / role} is the store of a single {role}_dataset, so"
                " the stores of several can't be written there: choose another store_dir, or delete"
                " this store"
            )
        if not length_hint(dataset, 1):
            raise ValueError(
                f"{name_argument(split)}: the dataset is empty: pass None, or a dataset with rows"
            )
        # An existing store keeps its shards: its rows are striped again if num_shards differs.
        is_kept = not options.overwrite and is_store(path)
        with split_in_errors(split):
            return BuildSpec(
                dataset,
                path,
                None if is_kept else options.num_shards,
                options.num_workers,
                options.fingerprint_of(split),
                options.declared,
                self.show_progress,
                "store_dir",
            )

    def build(self, specs: Mapping[str, BuildSpec]) -> None:
        """Build the stores of some splits, or recognize stores that exist."""
        for split, spec in specs.items():
            with split_in_errors(split):
                # Before rows of any split are read, because their datasets may share a cache.
                if spec.fingerprint is None:
                    spec.fix_identity()
        for split, spec in specs.items():
            with split_in_errors(split):
                store = build(spec, overwrite=self.options.overwrite)
            self.known_stores[split] = self._origin(split, store)

    def open(self, splits: Iterable[str]) -> dict[str, Store]:
        """Open the stores of some splits. Splits without rows are missing in the result."""
        opened = dict[str, Store]()
        for split in splits:
            stores = dict[str, Store]()
            for part in self.parts(split):
                if (store := self._open(part)) is not None:
                    stores[part] = store
            if (joined := self.joined(split, stores)) is not None:
                opened[split] = joined
                continue
            for argument, name in self.options.by_split():
                if name == split:
                    raise ValueError(
                        f"{argument}[{split!r}]: this split has no rows: pass"
                        f" {name_argument(split)}, or remove {split!r} from {argument}"
                    )
        return opened

    def joined(self, split: str, stores: Mapping[str, Store]) -> Store | None:
        """Return the store of a split, made of several for a mixture; None if one is missing."""
        parts = self.parts(split)
        if not {*parts} <= stores.keys():
            return None
        if parts == [split]:
            return stores[split]
        named = {SplitName.parse(part).name: stores[part] for part in parts}
        return JoinedStore(Path(str(self.path(split))), named)

    def _open(self, split: str) -> Store | None:
        """Open a store, and check that it belongs to its dataset."""
        path = self.path(split)
        split = self.stored_split(split)
        dataset = self.datasets[split]
        meanwhile = self.options.build == "while_training"
        if meanwhile and isinstance(path, Path) and (growing := open_growing(path)) is not None:
            self.known_stores[split] = self._origin(split, growing)
            return growing
        try:
            store = (
                RemoteStore(path, in_background=meanwhile, progress=self.show_progress)
                if isinstance(path, StoreUrl)
                else open_store(path)
            )
        except StoreNotFoundError:
            if dataset is None and "/" in split:
                raise self.missing(split) from None
            if dataset is None:
                # At a URL, searching would take longer than opening a store.
                names = list_stores(path) if isinstance(path, Path) else []
                if names:
                    raise ValueError(
                        f"{split}_dataset=None, and {path} contains the stores of several datasets:"
                        f" name them in order with {split}_dataset={dict.fromkeys(names)}"
                    ) from None
                # Not an error before its loader is requested: a Trainer keeps a data module, and
                # sets it up for stages that use other loaders.
                return None
            if isinstance(path, StoreUrl):
                raise
            raise StoreNotFoundError(
                f"no store at {path}: call prepare_data() before setup(): it builds the store from"
                f" {name_argument(split)}. A subclass that overrides it must call"
                " super().prepare_data()"
            ) from None
        if dataset is not None and not self._is_known(split, store):
            self._check(split, store)
        return store

    def _check(self, split: str, store: Store) -> None:
        """Check that a store may hold the rows of its dataset."""
        fingerprint = self.options.fingerprint_of(split)
        num_workers = self.options.num_workers
        check_dataset(store, self.datasets[split], fingerprint, num_workers=num_workers)

    def split_by_part(self, split: str, store: Store) -> list[tuple[str, Store]]:
        """Return the stores that a split's store consists of, with their splits."""
        stores = store.parts if isinstance(store, JoinedStore) else [store]
        return [*zip(self.parts(split), stores, strict=True)]

    def rows(self, split: str, store: Store) -> Rows:
        """Return the rows of its store that a split uses."""
        subsets = [self._subset(part, stored) for part, stored in self.split_by_part(split, store)]
        return store.chosen(subsets) if isinstance(store, JoinedStore) else store.rows(*subsets)

    def _subset(self, split: str, store: Store) -> Integers | None:
        selection = self.options.selection(split)
        if selection is None:
            return None
        try:
            fold = self._fold(selection)
        except ValueError:
            if store.pending is None:
                # An error that every fold would raise is more useful.
                self._select(selection, split, 0, store)
            raise
        return self._select(selection, split, fold, store)

    def _select(self, selection: Selection, split: str, fold: int, store: Store) -> Integers:
        """Return the rows of one fold or part of a selection."""
        try:
            return selection.subset(split, fold, store)
        except ValueError as error:
            if (windows := self.options.windows) is None:
                raise
            raise ValueError(
                f"{error}. With Windows over {', '.join(map(repr, windows.fields))},"
                f" subset={self.options.subset!r} selects whole series, each with all its windows"
            ) from error

    def _fold(self, selection: Selection) -> int:
        """Return the fold or part of a selection that this process uses; 0 if there is only one."""
        count = selection.num_members
        if count is None:
            return 0
        reason = f"subset={self.options.subset!r}"
        member = self._member(reason)
        if self.options.member is not None:
            if member >= count:
                raise ValueError(f"member={member} with {reason}: choose 0 to {count - 1}")
        elif (num_members := self.strategy.num_members) % count:
            raise ValueError(
                f"{reason} with {num_members} members: some folds would be trained less often than"
                f" others: use {count} members or a multiple of it, with devices=... or"
                f" IndependentStrategy(num_members={count})"
            )
        return member % count

    def missing(self, split: str) -> StoreNotFoundError:
        """Return the error for a loader of a split that has no rows."""
        stored = self.parts(self.stored_split(split))[0]
        path = self.directory / stored
        if isinstance(path, StoreUrl):
            try:
                open_store(path)
            except StoreNotFoundError as error:  # It distinguishes a missing bucket from a store.
                return error
        elif self.datasets[stored] is None and not is_store(path):
            unfinished = describe_unfinished_build(path)
            return StoreNotFoundError(
                f"{name_argument(stored)}=None and no store at {path}"
                f"{f' ({unfinished})' if unfinished else ''}: pass the dataset, or a store_dir that"
                f" contains a store named {stored!r}{nearest_file(path)}"
            )
        return StoreNotFoundError(
            f"the {split} split is not set up: call setup() first. A subclass that overrides it"
            " must call super().setup(stage)"
        )

    def _is_known(self, split: str, store: Store) -> bool:
        """Return whether a store holds the last known build of the same dataset object."""
        known = self.known_stores.get(split)
        origin = self._origin(split, store)
        return known is not None and known.dataset is origin.dataset and known[1:] == origin[1:]

    def _origin(self, split: str, store: Store) -> StoreOrigin:
        """Return the dataset and options that a split's store depends on, and its build."""
        return StoreOrigin(
            self.datasets[split],
            self.options.num_shards,
            self.options.fingerprint_of(split),
            store.manifest.generation,
        )
