"""The stores of a data module's splits: where they lie, how they are built and opened, and which of
their rows a split has.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from typing import Any

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.splits import argument_of, has_several, named_datasets
from lightning_memmap.errors import (
    MemmapError,
    StoreError,
    StoreNotFoundError,
    naming,
    nearest,
    nearest_file,
    with_article,
)
from lightning_memmap.sampling.rows import Integers, Rows
from lightning_memmap.sampling.selection import Selection
from lightning_memmap.schema.forms import Windows
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.build import Asked, build
from lightning_memmap.store.building import unfinished_build
from lightning_memmap.store.directory import is_store, stores_within
from lightning_memmap.store.growing import open_growing
from lightning_memmap.store.joined import JoinedStore
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.recognition import check_dataset
from lightning_memmap.store.remote.cache import RemoteStore
from lightning_memmap.store.sources.stream import is_stream
from lightning_memmap.store.sources.token_stream import TokenStream


@dataclass(frozen=True)
class SplitStores:
    """The stores of the splits of one data module."""

    options: DataOptions
    #: The Trainer's, which may know the member that this process trains; or None.
    strategy: Any
    #: By split, what this data module has stored or recognised, which `build` adds to.
    built: dict[str, tuple[Any, ...]]
    #: Whether builds and fetches show progress bars.
    progress: bool = True

    @property
    def datasets(self) -> dict[str, Any]:
        """The datasets by split, each of several under a name of its own."""
        given = self.options.datasets
        if given["train"] is None and self.options.mixed:
            given["train"] = dict.fromkeys(self.options.mixed)
        named = (named_datasets(kind, each) for kind, each in given.items())
        return {split: dataset for each in named for split, dataset in each.items()}

    def parts(self, split: str) -> list[str]:
        """The splits whose stores have the rows of a split: several where they are mixed."""
        return [name for name in self.datasets if split in (name, name.partition("/")[0])]

    @property
    def directory(self) -> Path | StoreUrl:
        """The directory of the stores, or its URL."""
        text = str(self.options.store_dir)
        if "{member}" not in text:
            return self.options.store_dir
        return place_of(text.replace("{member}", str(self._member(f"store_dir={text!r}"))))

    def stored_split(self, split: str) -> str:
        """The split whose store has the rows of a split."""
        selection = self.options.selection(split)
        return split if selection is None else selection.stored_split(split)

    def path(self, split: str) -> Path | StoreUrl:
        """Where the store is that has the rows of a split."""
        return self.directory / self.stored_split(split)

    def check(self) -> None:
        """Check that the options fit the datasets: both may have been set since the other was."""
        self.check_datasets()
        self.options.check_splits(self.datasets)
        windows = self.options.forms.get("tokens")
        for dataset in self.datasets.values():
            if isinstance(dataset, TokenStream) and isinstance(windows, Windows):
                dataset.check_windows(windows.length, windows.stride)

    def check_datasets(self) -> None:
        """Check that rows to validate on are given once, and that training sets are mixed."""
        given, mixed, selecting = self.options.datasets, self.options.mixed, self._selecting
        if given["val"] is not None and self.stored_split("val") != "val":
            raise ValueError(
                f"{selecting} with a val_dataset: the rows that are held out are what is"
                " validated on; leave val_dataset out, or give it as test_dataset"
            )
        sampler = f"sampler={self.options.sampler!r}"
        names = [*given["train"]] if has_several(given["train"]) else []
        if unknown := [name for name in mixed if names and name not in names]:
            raise ValueError(
                f"{sampler}: train_dataset has no set {unknown[0]!r}, but {', '.join(names)}"
                f"{nearest(unknown[0], names)}"
            )
        if names and {*names} != {*mixed}:
            raise ValueError(
                f"train_dataset has the sets {', '.join(names)}, and {sampler}: say how often each"
                " of them comes with"
                f" sampler=Mixture({dict.fromkeys(names, round(1 / len(names), 2))}), or join them"
                " with torch.utils.data.ConcatDataset. For a dict of batches in each step, give"
                " Lightning a CombinedLoader over the loaders of several data modules"
            )
        if mixed and given["train"] is not None and not names:
            raise ValueError(
                f"{sampler}: it mixes several training sets, and train_dataset is one: give them by"
                f" name, such as train_dataset={{{', '.join(f'{name!r}: ...' for name in mixed)}}}"
            )
        if mixed and self.options.selection("train") is not None:
            raise ValueError(
                f"{selecting} with {sampler}: of several training sets, rows are selected from each"
                " by itself, and none is held out: give"
                f" subset={{'train/{mixed[0]}': Subset(...)}}, and a val_dataset"
            )

    def asked(self, split: str) -> Asked | None:
        """What is to be built, or recognised, for a split; None where it has no dataset, or its
        store is as this data module has left it."""
        options, dataset = self.options, self.datasets[split]
        # At a URL, `open` finds a store or says that there is none.
        if dataset is None or isinstance(self.directory, StoreUrl):
            return None
        path = self.directory / split
        with suppress(MemmapError):
            store = open_store(path)
            if self._is_its_own(split, store):
                if not is_stream(dataset):
                    # It may have been changed in place.
                    self._check(split, store)
                return None
        self._check_place(split)
        if not length_hint(dataset, 1):
            raise ValueError(
                f"{argument_of(split)}: the dataset is empty, and there is nothing to store:"
                " leave it out"
            )
        # The rows of a store that is there are striped again where they are to be.
        is_kept = not options.overwrite and is_store(path)
        num_shards = None if is_kept else options.num_shards
        fingerprint, forms = options.fingerprint_of(split), options.forms
        with naming(split):
            return Asked(
                dataset,
                path,
                num_shards,
                options.num_workers,
                fingerprint,
                forms,
                self.progress,
                "store_dir",
            )

    def grows(self, split: str, asked: Asked) -> bool:
        """Whether a store is to be built while rows of it are read."""
        if self.options.build == "first" or is_store(asked.directory.path):
            return False
        if asked.is_stream:
            raise ValueError(
                f"{argument_of(split)}, {with_article(type(asked.dataset).__name__)}, with"
                " build='while_training': its rows come in an order of their own, and training"
                " needs others: give build='first', or a map-style dataset"
            )
        return True

    def build(self, asked: Mapping[str, Asked]) -> None:
        """Build the stores of splits, or find them built."""
        for split, each in asked.items():
            with naming(split):
                # Before a row of any is read: they may share a dataset that keeps its rows.
                _ = each.fingerprint or each.identity
        for split, each in asked.items():
            with naming(split):
                store = build(each, overwrite=self.options.overwrite)
            self.built[split] = self._source(split, store)

    def open(self, splits: Iterable[str]) -> dict[str, Store]:
        """Open the stores that have the rows of splits, of which some may have none."""
        opened = dict[str, Store]()
        for split in splits:
            found = {part: self._open(part) for part in self.parts(split)}
            stores = {part: store for part, store in found.items() if store is not None}
            if (joined := self.joined(split, stores)) is not None:
                opened[split] = joined
            elif given := [name for name, each in self.options.by_split() if each == split]:
                raise ValueError(
                    f"{given[0]} for {split!r}: there are no such rows: give {argument_of(split)},"
                    f" or leave {split!r} out of {given[0]}"
                )
        return opened

    def joined(self, split: str, found: Mapping[str, Store]) -> Store | None:
        """The store of a split, which is that of its only part, or several as one; None where one
        of them is not among those found."""
        parts = self.parts(split)
        if not {*parts} <= found.keys():
            return None
        if parts == [split]:
            return found[split]
        named = {part.partition("/")[2]: found[part] for part in parts}
        return JoinedStore(Path(str(self.path(split))), named)

    def _open(self, split: str) -> Store | None:
        """Open a store, and check that it is of its dataset."""
        path = self.path(split)
        split = self.stored_split(split)
        dataset = self.datasets[split]
        meanwhile = self.options.build == "while_training"
        if meanwhile and isinstance(path, Path) and (growing := open_growing(path)) is not None:
            self.built[split] = self._source(split, growing)
            return growing
        try:
            store = (
                RemoteStore(path, meanwhile=meanwhile, progress=self.progress)
                if isinstance(path, StoreUrl)
                else open_store(path)
            )
        except StoreNotFoundError:
            if dataset is None and "/" in split:
                raise self.missing(split) from None
            if dataset is None:
                self._check_no_several(split)
                # An error only where its loader is asked for: a Trainer keeps a data module, and
                # sets it up for stages that have other loaders.
                return None
            if isinstance(path, StoreUrl):
                raise
            raise StoreNotFoundError(
                f"no store at {path}: call prepare_data() before setup(), which builds it from"
                f" {argument_of(split)}; a subclass that overrides it calls super().prepare_data()"
            ) from None
        if dataset is not None and not self._is_its_own(split, store):
            self._check(split, store)
        return store

    def _check(self, split: str, store: Store) -> None:
        """Check that a store may be of its dataset."""
        options, dataset = self.options, self.datasets[split]
        given = options.fingerprint_of(split)
        check_dataset(store, dataset, given, num_workers=options.num_workers)

    def by_part(self, split: str, store: Store) -> list[tuple[str, Store]]:
        """The stores that the opened one of a split consists of, by their splits."""
        stores = store.parts if isinstance(store, JoinedStore) else [store]
        return [*zip(self.parts(split), stores, strict=True)]

    def rows(self, split: str, store: Store) -> Rows:
        """The rows of its store that a split has."""
        subsets = [self._subset(*each) for each in self.by_part(split, store)]
        return store.chosen(subsets) if isinstance(store, JoinedStore) else store.rows(*subsets)

    def _subset(self, split: str, store: Store) -> Integers | None:
        selection = self.options.selection(split)
        if selection is None:
            return None
        try:
            index = self._index(selection)
        except ValueError:
            if store.supply is None:
                self._select(selection, split, 0, store)  # What is wrong with any is said first.
            raise
        return self._select(selection, split, index, store)

    def _select(self, selection: Selection, split: str, index: int, store: Store) -> Integers:
        """Return the rows of a selection."""
        try:
            return selection.subset(split, index, store)
        except ValueError as error:
            fields = [name for name, form in self.options.forms.items() if type(form) is Windows]
            if not fields:
                raise
            raise ValueError(
                f"{error}. With Windows over {', '.join(map(repr, fields))}, {self._selecting}"
                " selects rows of the store, which are series, each with all of its windows"
            ) from error

    def missing(self, split: str) -> StoreNotFoundError:
        """What is said of a split that has no rows."""
        stored = self.parts(self.stored_split(split))[0]
        path = self.directory / stored
        if isinstance(path, StoreUrl):
            try:
                open_store(path)
            except StoreNotFoundError as error:  # It tells a bucket from a store that is missing.
                return error
        elif self.datasets[stored] is None and not is_store(path):
            there = unfinished_build(path)
            return StoreNotFoundError(
                f"{argument_of(stored)}=None and no store at {path}"
                f"{f' ({there})' if there else ''}: give the dataset, or a store_dir that holds a"
                f" store named {stored!r}{nearest_file(path)}"
            )
        return StoreNotFoundError(
            f"the {split} split is not set up: call setup() first; a subclass that overrides it"
            " calls super().setup(stage)"
        )

    def _is_its_own(self, split: str, store: Store) -> bool:
        """Whether the store of a split is there as this data module has last left it."""
        built, source = self.built.get(split), self._source(split, store)
        return built is not None and built[0] is source[0] and built[1:] == source[1:]

    def _source(self, split: str, store: Store) -> tuple[Any, ...]:
        """A dataset, the options that its store depends on, and the build of the store."""
        options = self.options
        given = options.num_shards, options.fingerprint_of(split)
        return self.datasets[split], *given, store.manifest.generation

    @property
    def _selecting(self) -> str:
        """The argument that selects rows, as it was given, for messages."""
        return f"subset={self.options.subset!r}"

    def _index(self, selection: Selection) -> int:
        """Which of the folds or parts of a selection are this process's."""
        count = selection.num_members
        if count is None:
            return 0
        given = self._selecting
        member = self._member(given)
        if self.options.member is not None:
            if member >= count:
                raise ValueError(f"member={member} with {given}: choose 0 to {count - 1}")
        elif (num_members := self.strategy.num_members) % count:
            raise ValueError(
                f"{given} with {num_members} members: some would be trained less often than"
                f" others; use {count} members or a multiple of it, with devices=... or"
                f" IndependentStrategy(num_members={count})"
            )
        return member % count

    def _member(self, given: str) -> int:
        """The member that this process trains."""
        if self.options.member is not None:
            return self.options.member
        member: int | None = getattr(self.strategy, "member", None)
        if member is None:
            raise ValueError(
                f"{given}: which member is it? Train with strategy='memmap_independent', or say"
                " which with member=..."
            )
        return member

    def _check_place(self, split: str) -> None:
        """Check that the stores of several datasets do not go into the store of one."""
        kind, _, name = split.partition("/")
        path = Path(self.directory) / kind
        if name and is_store(path):
            raise StoreError(
                f"{path} is the store of one {kind}_dataset, and the stores of several would lie in"
                " that directory: choose another store_dir, or delete this store"
            )

    def _check_no_several(self, split: str) -> None:
        """Check that the stores of several datasets are not taken for no store."""
        path = self.directory / split
        # At a URL, looking for them would take longer than to open a store.
        if isinstance(path, Path) and (names := stores_within(path)):
            raise ValueError(
                f"{split}_dataset=None, and {path} holds the stores of several datasets: name them"
                f" in their order with {split}_dataset={dict.fromkeys(names)}"
            )
