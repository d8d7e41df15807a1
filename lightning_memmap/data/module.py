"""The data module: Lightning's hooks, each delegated to the layer that does the work."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap._compat.loops import is_restoring, renew_train_loader_at_start
from lightning_memmap._compat.progress import TrainerProgress
from lightning_memmap._compat.tensors import empty_caches
from lightning_memmap.data.convert import (
    TRANSFER_HOOKS,
    GivenLoaders,
    LoaderSource,
    check_source,
    chosen_options,
)
from lightning_memmap.data.first_epoch import show_stored
from lightning_memmap.data.options import (
    OPTIONS,
    DataOptions,
    Option,
    OptionAttributes,
    without_loader_options,
)
from lightning_memmap.data.resume import Resume, renew_where_epochs_differ
from lightning_memmap.data.set_up import Planner, SetUp
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.data.splits import SPLITS, has_several, named_datasets
from lightning_memmap.errors import nearest
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.variable_batch import FormedCollate
from lightning_memmap.placement.plan import Placement, Residency, placement_table
from lightning_memmap.placement.topology import DataTopology, free_bytes, topology_of
from lightning_memmap.process_group import leave_group_at_exit
from lightning_memmap.ranks import check_ranks_match
from lightning_memmap.sampling.factory import SamplerFactory
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import SkippedSteps, steps_to_skip
from lightning_memmap.sampling.selection import Selection, Subset
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.store.growing import BackgroundBuild
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.samples import first_sample
from lightning_memmap.store.sources.stream import is_read_once, is_stream, samples_of

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any] | Iterable[Any]
else:
    # With a subscripted class, jsonargparse would check the arguments of a dataset in a config
    # against that class, whatever subclass of it the config names.
    AnyDataset = Dataset

#: One dataset or several, in a list or by name; None for one that is stored already.
Datasets: TypeAlias = AnyDataset | list[AnyDataset | None] | dict[str, AnyDataset | None] | None
#: A loader, or one for each of several datasets.
Loader: TypeAlias = SuperBatchLoader | BatchLoader
Loaders: TypeAlias = Loader | list[Loader] | dict[str, Loader]

_SPLITS_OF_STAGE = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
#: By split, where its shards are by the table that this process has printed last.
_printed: dict[str, tuple[Any, ...]] = {}
#: The stores of omitted validation sets that this process has named.
_named = set[str]()


class MemmapDataModule(OptionAttributes, L.LightningDataModule):
    """Stores datasets once, keeps them resident on the data devices, and serves super-batches.

    A batch has the structure of the dataset's samples, as ``default_collate`` would give it. Under
    strategies of one process, such as ``memmap_superbatch``, all its devices hold shards. Under
    those of several processes, each process holds the shards of its own devices. The rows of each
    global batch are the same.

    Args:
        train_dataset: Dataset to train on, map-style or iterable; see
            `lightning_memmap.store.build_store`. If a dataset is None, the store of its split is
            used as it is. A generator is read once, by the process that builds its store; if the
            store exists already, or there are several processes, it needs a ``fingerprint``. A dict
            of datasets by name, all with the same fields, is mixed by ``sampler=Mixture(...)``.
        val_dataset: To validate on. Both it and its store may be missing. A list of datasets, or a
            dict of them by name, gets a loader for each, whose index is the ``dataloader_idx``.
        test_dataset: To test on, one or several.
        predict_dataset: To predict on, one or several.
        store_dir: Directory with one store per split in it: ``train``, and ``val`` or, of several
            datasets, ``val/0`` or ``val/NAME``. ``{member}`` in it stands for the number of the
            member, and ``~`` for your home directory. At a URL such as ``s3://bucket/stores`` the
            stores must be there already; each process fetches its shards into the cache of
            `lightning_memmap.store.open_store`.
        batch_size: Rows per data device and step, as under DDP.
        transform: Batch transform for training: a callable or module, run on each data device
            without gradients. With a parameter named ``generator`` it is given a seeded one.
            In `lightning_memmap.transforms.OnSuperBatch` it runs on the assembled rows instead.
        eval_transform: The same for validation, test and prediction.
        shuffle: Permute the training rows again in each epoch.
        drop_last: Drop an incomplete last training step. Evaluation never drops a row.
        seed: Seed of the row order and of random transforms.
        num_shards: Shards that the rows are divided into. Any number of data devices that divides
            this number gives the same global batches. By default as many as the stores have, and
            new ones have 24 for fewer than 20,000 rows, and 192 from there on. Stores that have
            another number are used as they are: their rows are striped again.
        residency: Where shards live: ``auto``, ``device``, ``host``, ``mmap`` or, for data larger
            than memory, ``stream``; see `lightning_memmap.placement`.
        memory_fraction: Share of a device's free memory at set-up that shards may take, and of the
            host's, divided by the processes of the machine, for those of ``host`` and the blocks of
            ``stream``. The model, its gradients and its activations need the rest.
        num_workers: Processes that read the datasets, to store them or to compare them with their
            stores; with 0, this one does. None are used for reading stores.
        overwrite: Replace stores of other datasets.
        fingerprint: The identity of the datasets in your own words, such as a version or a hash:
            one string, or one by name of the split. It then decides alone whether a store is of its
            dataset; see `lightning_memmap.store.build_store`.
        subset: Which rows of the stores are used, without copying any: of `lightning_memmap.
            sampling`, a `Subset` of the training rows, or a dict of such by split; or `RandomSplit`
            or `KFold`, which hold rows of the training store out to validate on.
        member: Which fold or part, counted from 0. By default that of the member that this process
            trains under ``memmap_independent``, modulo the number of folds or parts. It is also
            what stands for ``{member}``. Without any of these it is refused.
        shuffle_block: Rows of a shard that are shuffled together: ``shuffle_block * num_shards``
            rows are mixed with each other, and with no other rows of their epoch. By default all
            rows are mixed. ``residency="stream"`` reads this number of rows of each shard at once,
            by default as many as make 512 MiB over all shards. The order of rows depends on this
            number, but not on the residency, the machine or the number of devices. A run is resumed
            with the number that it started with. The samplers of this package work in such blocks
            too. Refused with ``shuffle=False``, except under ``stream``.
        sampler: Makes the order of the training rows, instead of ``shuffle``, such as
            `lightning_memmap.sampling.Weighted`: a `lightning_memmap.sampling.SamplerFactory`, or a
            function of the `lightning_memmap.sampling.Pool` of rows and the seed that returns a
            `lightning_memmap.sampling.Sampler`.
        variable: How batches give fields whose rows differ in length, by field name: ``"pad"``, the
            default, ``"jagged"``, ``"list"``, or a `lightning_memmap.schema.Form` such as
            ``Pad(value=-1, multiple=8)``; in a config ``{form: pad, value: -1, multiple: 8}``.
            ``"decode"`` is for bytes that are images: see `lightning_memmap.schema.Decode`.
            Fields must be named here where the first rows that are read do not show that they
            differ. The store does not depend on the form. Lists of records and what may be None are
            named here too, with ``"list"`` and ``"nullable"``; see `lightning_memmap.schema.forms`.
        with_row_numbers: Give every batch the numbers of its rows in their dataset, int64 of shape
            (B,): under the key ``row_number`` if samples are dicts or TensorDicts, and otherwise
            last. For a subset too they are rows of the whole dataset.
        skip_steps: Training steps to leave out, as after a loss spike: a range, or a list of
            numbers. They are global batches, counted from 0 over all epochs as if none was left
            out: step ``s`` is step ``s % S`` of epoch ``s // S``, if an epoch has ``S`` steps with
            the present batch size and devices. With ``accumulate_grad_batches`` an optimizer step
            is several of them. All other steps have the rows that they would have had. Checkpoints
            keep what was left out, and a resumed run leaves the same rows out, on other device
            counts too.
        build: ``"first"``: stores are built before training. ``"while_training"``: training starts
            at once. In the first epoch, ``num_workers`` processes read the rows in the order in
            which they are needed, and store them; of stores at a URL, the shards are fetched in
            that order. The rows of each batch are the same.
        prefetch: Steps that are prefetched while one is computed, under any strategy: their
            fetches, transforms and copies run on side streams of the devices. By default 2 where
            batches are on a GPU, and 0 on a CPU.
        eval_batch_size: Rows per data device and step of validation, test and prediction: a number,
            or numbers by split. By default ``batch_size``.
        datamodule: Another data module, whose loaders have the datasets, batch sizes, samplers and
            ``drop_last``: see `from_datamodule`.

    The arguments are attributes too. Setting one takes effect at the next
    `setup`, or for ``batch_size``, ``prefetch``, the transforms and the order, with the next
    loader.

    Raises:
        TypeError: A transform or the sampler cannot be called, a count or the seed is not an
            integer, or a fingerprint is not a string.
        ValueError: An argument is out of range, or two of them exclude each other.
    """

    @without_loader_options
    def __init__(
        self,
        train_dataset: AnyDataset | dict[str, AnyDataset | None] | None = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        *,
        store_dir: str | Path,
        batch_size: int = 32,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        num_shards: int | None = None,
        residency: str = "auto",
        memory_fraction: float = 0.7,
        num_workers: int = 0,
        overwrite: bool = False,
        fingerprint: str | dict[str, str] | None = None,
        subset: Selection | dict[str, Subset] | None = None,
        member: int | None = None,
        shuffle_block: int | None = None,
        sampler: SamplerFactory | Callable[[Pool, int], Sampler] | None = None,
        variable: dict[str, Any] | None = None,
        with_row_numbers: bool = False,
        skip_steps: range | list[int] | None = None,
        build: str = "first",
        prefetch: int | None = None,
        eval_batch_size: int | dict[str, int] | None = None,
        datamodule: L.LightningDataModule | None = None,
    ) -> None:
        given = locals()
        super().__init__()
        self.options = DataOptions(**{name: given[name] for name in OPTIONS})
        self._set_up: SetUp | None = None
        #: By split, what this data module has stored or recognised: see `SplitStores`.
        self._built: dict[str, tuple[Any, ...]] = {}
        self._has_warned = False
        self._train_loader: SuperBatchLoader | None = None
        self._resume: Resume | None = None
        #: What the run leaves out, as far as a training loader knows it.
        self._skipped = SkippedSteps()
        self._builds: list[BackgroundBuild] = []
        #: Where options are read from, and by name the data modules of several training sets.
        self._source: LoaderSource | None = None
        self._sets: dict[Any, MemmapDataModule] = {}
        self._fabric: L.Fabric | None = None
        if datamodule is not None:
            check_source(datamodule, MemmapDataModule)
            self._source = LoaderSource(datamodule, chosen_options(self.options, _DEFAULTS))
            self._source.adopt_hooks(self)
        SplitStores(self.options, None, self._built).check_datasets()

    def with_options(self, **changes: Any) -> "MemmapDataModule":
        """A data module of the same class with other options or datasets, and not set up.

        Args:
            changes: Arguments by name.

        Returns:
            The new data module; this one is unchanged.

        Raises:
            TypeError: There is no such option, or a transform or the sampler cannot be called.
            ValueError: An option is out of range, or two of them exclude each other.
        """
        for name in changes:
            if name not in vars(self.options):
                raise TypeError(
                    f"{name}: it is no option of a data module{nearest(name, vars(self.options))}"
                )
        other = copy.copy(self)
        other.options = replace(self.options, **changes)
        other._built, other._builds = dict(self._built), []
        if self._source is not None:
            other._source, other._sets = self._source.choosing(changes), {}
        return other

    @override
    def _set_option(self, name: str, value: Any) -> None:
        super()._set_option(name, value)
        if self._source is not None:
            self._source.choose(name)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the data module that this one reads, for modules that use it."""
        source = vars(self).get("_source")
        if source is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(source.datamodule, name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse class attributes that would silently take the place of arguments."""
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            hides = isinstance(getattr(MemmapDataModule, name, None), Option)
            if hides and not isinstance(value, property):
                raise TypeError(
                    f"class {cls.__name__} has an attribute {name!r}, which is an argument of"
                    f" MemmapDataModule: give it to super().__init__({name}=...) instead"
                )

    @classmethod
    @override
    def from_datasets(
        cls,
        train_dataset: AnyDataset | Iterable[AnyDataset] | None = None,
        val_dataset: AnyDataset | Iterable[AnyDataset] | None = None,
        test_dataset: AnyDataset | Iterable[AnyDataset] | None = None,
        predict_dataset: AnyDataset | Iterable[AnyDataset] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> "MemmapDataModule":
        """Make a data module, with the defaults that Lightning's method of this name has.

        Args:
            train_dataset: Dataset to train on.
            val_dataset: To validate on, one or several.
            test_dataset: To test on, one or several.
            predict_dataset: To predict on, one or several.
            batch_size: Rows per data device and step.
            num_workers: Processes that write a store.
            datamodule_kwargs: The other arguments of this class, of which ``store_dir`` must be
                given.

        Raises:
            TypeError: ``store_dir`` is missing, or several datasets are given to train on.
        """
        if "store_dir" not in datamodule_kwargs:
            raise TypeError(
                "from_datasets: store_dir is missing: give store_dir=..., the directory that the"
                " datasets are stored in"
            )
        datasets: Any = train_dataset, val_dataset, test_dataset, predict_dataset
        return cls(*datasets, batch_size=batch_size, num_workers=num_workers, **datamodule_kwargs)

    @classmethod
    def from_datamodule(
        cls, datamodule: L.LightningDataModule, *, store_dir: str | Path, **options: Any
    ) -> "MemmapDataModule":
        """Make a data module that stores and serves the rows of an existing one.

        Its hooks are called when Lightning calls those of the new one, on the same ranks, except
        that ``setup`` runs on the process that builds the stores before it runs on others. The
        loaders that it then returns are not iterated over: datasets, batch sizes, samplers and
        ``drop_last`` become options, and several training loaders a data module each. Arguments
        that differ from their defaults take the place of what the loaders say, and so do attributes
        that are set before the loaders are read.

        Transfer hooks, the state and other attributes of ``datamodule`` are those of the new one.

        Args:
            datamodule: The existing data module.
            store_dir: As for this class.
            options: The other arguments of this class.

        Returns:
            The data module. Its options have their values from `setup` on, or `prepare_data`.

        Raises:
            TypeError: It is not a ``LightningDataModule``, or already a `MemmapDataModule`; at
                set-up, a method returns something that is not a ``DataLoader``.
            ValueError: At set-up, a loader has a ``collate_fn``, a batch sampler, a sampler or
                another property that cannot be carried over; the error names it.
        """
        return cls(datamodule=datamodule, store_dir=store_dir, **options)

    @classmethod
    def from_loaders(
        cls,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        store_dir: str | Path,
        **options: Any,
    ) -> "MemmapDataModule":
        """Make a data module that stores and serves the rows of existing loaders.

        Args:
            train: A ``DataLoader``, several in a list or dict, or a ``CombinedLoader``.
            val: To validate on, one or several.
            test: To test on, one or several.
            predict: To predict on, one or several.
            store_dir: As for this class.
            options: The other arguments of this class.

        Returns:
            The data module.

        Raises:
            TypeError: Something is not a ``DataLoader``.
            ValueError: No loader is passed, or one cannot be carried over; see `from_datamodule`.
        """
        loaders = {"train": train, "val": val, "test": test, "predict": predict}
        if all(each is None for each in loaders.values()):
            raise ValueError("train=None: pass at least one loader to from_loaders")
        made = cls(datamodule=GivenLoaders(**loaders), store_dir=store_dir, **options)
        made._read_loaders(None)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The arguments, and nothing that `setup` has made: a copy must be set up again."""
        # Bound to the data module that is read, of which a copy may have another.
        adopted = () if self._source is None else TRANSFER_HOOKS
        return {
            **{name: value for name, value in vars(self).items() if name not in adopted},
            "trainer": None if self._running is None else self.trainer,
            "_set_up": None,
            "_train_loader": None,
            "_builds": [],
            "_fabric": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the arguments, and the hooks of the data module that is read."""
        vars(self).update(state)
        if self._source is not None:
            self._source.adopt_hooks(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemmapDataModule":
        """A data module of the same arguments, which shares the datasets: they are only read."""
        memo.update((id(dataset), dataset) for dataset in self._split_stores.datasets.values())
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(copied.__getstate__(), memo))
        return copied

    @override
    def __str__(self) -> str:
        """The rows of each split that is set up."""
        rows = {split: each.pool.num_rows for split, each in self._rows.items()}
        return f"{type(self).__name__}(rows={rows})"

    @property
    def _split_stores(self) -> SplitStores:
        # A subclass may have made a property of an option.
        made = [name for name in OPTIONS if isinstance(getattr(type(self), name), property)]
        given = {name: getattr(self, name) for name in made}
        options = replace(self.options, **given) if given else self.options
        return SplitStores(options, self._strategy, self._built, not self._is_quiet)

    @property
    def datasets(self) -> dict[str, Any]:
        """What is given for each of the four arguments."""
        return self.options.datasets

    @property
    def stores(self) -> Mapping[str, Store]:
        """The open stores by split; none before `setup`."""
        return {} if self._set_up is None else self._set_up.stores

    @property
    def store_directory(self) -> Path | StoreUrl:
        """The directory of the stores, or its URL."""
        return self._split_stores.directory

    @property
    def placement(self) -> Placement | None:
        """Where the shards live; None before `setup`."""
        return None if self._set_up is None else self._set_up.placement

    @property
    def order(self) -> Sampler | None:
        """The order of the training rows; None before they are set up."""
        return None if self._set_up is None else self._set_up.order

    @property
    def _rows(self) -> Mapping[str, SplitRows]:
        """The rows of each split; none before `setup` and after `teardown`."""
        made = self._set_up
        return {} if made is None or made.is_released else made.rows

    def _rows_of(self, split: str) -> SplitRows:
        if (rows := self._rows.get(split)) is None:
            raise self._split_stores.missing(split)
        return rows

    @property
    def _planner(self) -> Planner:
        return Planner(self._split_stores, topology_of(self._strategy), self._is_overfitting)

    def use_fabric(self, fabric: L.Fabric) -> None:
        """Place the rows on the devices of a Fabric, without a Trainer.

        From the next `setup` on, each of its processes has its own rows on its own device, and the
        loaders return batches there, prefetched as under a Trainer. Without it, they are on the
        CPU.

        Args:
            fabric: The Fabric, once it is launched.
        """
        self._fabric = fabric

    def prepare_data(self) -> None:
        """Build the stores of the stage's splits, or find them built.

        One process per node calls it.

        Raises:
            TypeError: A dataset has no length.
            ValueError: A dataset is empty, or ``store_dir`` has ``{member}`` in it and the member
                is not known.
            SchemaError: A sample cannot be stored, or does not fit the first one.
            DatasetError: A dataset raised an error, is random, or is not the one that was stored.
            StoreError: A store is damaged, or its directory cannot be written or holds something
                else.
            OSError: The disk is full, or the files cannot be written.
        """
        if self._source is not None:
            self._source.prepare_data(self.trainer)
            self._read_loaders(None, in_advance=True)
        for training_set in self._sets.values():
            training_set.prepare_data()
        stores = self._split_stores
        stores.check()
        splits = dict.fromkeys(map(stores.stored_split, self._splits()))
        parts = [part for split in splits for part in stores.parts(split)]
        for build in self._builds:
            parts = [part for part in parts if not build.is_building(part)]
        asked = {part: each for part in parts if (each := stores.asked(part)) is not None}
        growing = {part: each for part, each in asked.items() if stores.grows(part, each)}
        if growing:
            planner = self._planner
            self._builds.append(
                BackgroundBuild(growing, self.num_workers, planner.first_rows, planner.step_rows)
            )
        stores.build({part: each for part, each in asked.items() if part not in growing})

    def setup(self, stage: str | None = None) -> None:
        """Open the stores, plan the placement, and make the shards resident.

        The placement is printed where it is not what was printed last.

        All ranks call it, and compare what must be the same on all of them.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. With None, the splits of
                what the Trainer runs are set up, and all splits where it runs nothing.

        Raises:
            StoreNotFoundError: A dataset is given, and its store was not built.
            StoreError: A store is damaged, or cannot have the residency that is asked for.
            DatasetError: A store was built from another dataset than the one given.
            PlacementError: The shards do not fit, or there are fewer rows than data devices.
            ValueError: A data device does not exist, or the member, which folds, parts or
                ``{member}`` need, is not known or out of range.
            RankMismatchError: Another rank failed, or has other stores, another seed, batch size,
                shuffle, shuffle_block, drop_last or number of data devices.
        """
        leave_group_at_exit()
        made, error = None, None
        try:
            made = self._set_up = self._make(stage)
        except Exception as caught:
            error = caught
        runner = self.trainer or self._fabric
        if runner is not None and runner.world_size > 1:
            check_ranks_match({} if made is None else made.must_match, error)
        elif error is not None:
            raise error
        if (stage or self._running or "fit") == "fit":
            for each in self._sets.values():
                each.setup("fit")

    def _make(self, stage: str | None) -> SetUp:
        # Not by teardown(), which a subclass may have overridden.
        self._release()
        # Of a fit that ended before it asked for its loader: the next one may begin at the start.
        self._resume, self._skipped = None, SkippedSteps()
        if stage is not None and stage not in _SPLITS_OF_STAGE:
            raise ValueError(
                f"stage={stage!r}: choose one of {', '.join(_SPLITS_OF_STAGE)}, or None"
            )
        self._read_loaders(stage)
        planner = self._planner
        planner.stores.check()
        opened = planner.stores.open(self._splits(stage))
        self._name_old_validation(planner.stores, opened)
        placement = planner.place(opened)
        # Until all rows are there, they are read from their files, wherever they will live.
        if all(store.supply is None for store in opened.values()):
            self._print_placement(placement)
        return planner.load(opened, placement)

    def _read_loaders(self, stage: str | None, *, in_advance: bool = False) -> None:
        """Read the loaders of the data module that this one converts."""
        if (source := self._source) is None:
            return
        if stage is None:
            stage = self._running
        self.options = source.read(
            self.options, _SPLITS_OF_STAGE, stage, self.trainer, in_advance=in_advance
        )
        self._make_sets(source)

    def read_training_loaders(self) -> None:
        """Read the loaders of a fit, where loaders are converted and none was read."""
        if self._source is not None and not self._source.is_read:
            self._read_loaders("fit")

    def _read_again(self, kind: str) -> None:
        """Read the loaders of a split again where the Trainer asks for new ones in later epochs."""
        trainer: Any = self.trainer
        if self._source is not None and trainer and trainer.reload_dataloaders_every_n_epochs:
            self.options = self._source.read_again(self.options, kind)
            self._make_sets(self._source)

    def _make_sets(self, source: LoaderSource) -> None:
        """Make the data modules of several training sets, or give them their options."""
        options = source.options_of_sets()
        self._sets = {key: self._made_set(key, each) for key, each in options.items()}
        for each in self._sets.values():
            each.trainer = self.trainer
            each._fabric = self._fabric

    def _made_set(self, key: Any, options: dict[str, Any]) -> "MemmapDataModule":
        """Return the data module of one of several training sets."""
        if (made := self._sets.get(key)) is None:
            directory = self.options.store_dir / f"train-{key}"
            evaluated = dict.fromkeys(("val_dataset", "test_dataset", "predict_dataset"))
            made = self.with_options(store_dir=directory, **evaluated, eval_batch_size=None)
            made._source = None
        made.options = replace(made.options, **options)
        return made

    def _name_old_validation(self, stores: SplitStores, opened: Mapping[str, Store]) -> None:
        """Say, once, that a dataset is validated on the store that an earlier run has left."""
        is_omitted = self.datasets["val"] is None and self.datasets["train"] is not None
        if "val" not in opened or not is_omitted or stores.stored_split("val") != "val":
            return
        path, num_rows = opened["val"].location, opened["val"].num_rows
        if path not in _named:
            _named.add(path)
            rank_zero_info(
                f"val_dataset=None: validating on the {num_rows:,} rows stored at {path}"
            )

    def train_sampler(self, store: Store, topology: DataTopology | None = None) -> Sampler:
        """The order of the training rows, except under ``overfit_batches``."""
        planner = Planner(self._split_stores, topology or topology_of(None))
        return planner.shards("train", store).order

    @property
    def _is_overfitting(self) -> bool:
        """Whether a Trainer turns shuffling off, which Lightning does in a ``DataLoader`` alone."""
        return getattr(self.trainer, "overfit_batches", 0) > 0

    def teardown(self, stage: str | None = None) -> None:
        """Free the shards of all splits. Loaders over them give no more batches.

        The memory goes back to the devices and to the host, beyond what torch's allocators keep
        for later: Lightning empties their caches before it calls this.

        Args:
            stage: Not used.
        """
        self._release()
        self._end_builds()
        if self._set_up is not None:
            empty_caches(self._set_up.placement.topology.data_devices)
        for each in self._sets.values():
            each.teardown(stage)
        if self._source is not None:
            self._source.datamodule.teardown(stage)  # type: ignore[arg-type]  # As we were called.

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the builds that go on while training: the next run goes on with their rows."""
        for each in self._sets.values():
            each.on_exception(exception)
        self._end_builds()
        if self._source is not None:
            self._source.datamodule.on_exception(exception)

    def _end_builds(self) -> None:
        while self._builds:
            self._builds.pop().stop()

    def _release(self) -> None:
        if self._set_up is not None:
            self._set_up.release()

    def train_dataloader(self) -> Any:
        """The training rows in the order of `train_sampler`.

        Without a Trainer, this and the other loaders are `lightning_memmap.loading.BatchLoader`.

        Returns:
            A loader of assembled batches, or of super-batches where the strategy leaves the batches
            of the data devices apart. Under ``overfit_batches`` the rows come in dataset order.
            Where several loaders were converted, loaders that are combined in the same way.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or there is no store.
            ValueError: No step would have its full size under ``drop_last``, the rows cannot be
                read in the sampler's order, or the checkpoint cannot be resumed in this order.
        """
        self._read_again("train")
        if self._source is not None and (tree := self._source.training_sets) is not None:
            return tree.combine({key: each.train_dataloader() for key, each in self._sets.items()})
        # Before the Trainer has restored its counters, only the length of the loader is asked for.
        is_early = self.trainer is not None and is_restoring(self.trainer)
        if self.trainer is not None and not is_early:
            (self._resume or Resume()).settle(self.trainer)
        given = self._loader("train")
        loader = self._train_loader = given.loader if isinstance(given, BatchLoader) else given
        if hasattr(self._strategy, "add_training_loader"):
            self._strategy.add_training_loader(loader)
        if self.trainer is not None and not is_early:
            loader.set_epoch(self.trainer.current_epoch)
            if self._resume is not None and self._resume.train is not None:
                loader.load_state_dict(self._resume.train.as_dict())
            self._resume = None
            renew_where_epochs_differ(loader, self.trainer)
        self._skipped = loader.skipped
        return given

    def state_dict(self) -> dict[str, Any]:
        """Where the training loader stands, the same on every rank.

        Returns:
            ``train``, the state of the loader; ``stores``, the contents of its stores;
            ``is_validating``; and once the Trainer has been
            passed a batch, ``fit``, its counts up to the last batch that its weights were trained
            on. What was loaded, until a fit goes on from there. Empty where no training loader was
            made.
        """
        theirs = {} if self._source is None else self._source.datamodule.state_dict()
        own = self._own_state()
        return {**own, "datamodule": theirs} if theirs else own

    def _own_state(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume.as_dict()
        if (loader := self._train_loader) is None:
            return {}
        is_validating = None if self.trainer is None else self.trainer.validating
        stores = None if self._set_up is None else self._set_up.train_stores
        return Resume(*loader.stands_at(), is_validating, stores).as_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next fit go on where the training loader stood.

        Outside of a fit, the state is only checked.

        Args:
            state_dict: What `state_dict` has returned.

        Raises:
            ValueError: The checkpoint is of another fold or part: its weights have learned from
                rows that this one holds out. Or it is not what `state_dict` has returned.
        """
        found = Resume.read(state_dict)
        if self._source is not None and "datamodule" in state_dict:
            self._source.datamodule.load_state_dict(state_dict["datamodule"])
        if self._sets:  # The Trainer itself keeps where combined loaders stand.
            return
        if self.trainer is not None and self.trainer.state.fn is TrainerFn.FITTING:
            found.check_rows(self._rows_of("train").pool.identity["subset"])
            assert self._set_up is not None
            found.check_stores(self._set_up.train_stores)
            self._resume = found
            renew_train_loader_at_start(self.trainer)

    def val_dataloader(self) -> Loaders:
        """The validation rows in dataset order.

        Returns:
            A loader as from `train_dataloader`; of several datasets, one each, in a list or by name
            as the datasets are given. An empty list where there is no such split, unless the
            Trainer validates.

        Raises:
            StoreNotFoundError: The Trainer validates, and there is no such split.
        """
        is_missing = not any(split.partition("/")[0] == "val" for split in self._rows)
        if is_missing and self._running is not TrainerFn.VALIDATING:
            # Lightning would ask whether no loader was meant.
            message = "Total length of `list` across ranks is zero"
            warnings.filterwarnings("ignore", message=message)
            return []
        if self.trainer is not None and self._running is TrainerFn.FITTING:
            # The Trainer would skip as many batches as were done before the checkpoint, whose
            # metrics it does not restore.
            self.trainer.fit_loop.epoch_loop.val_loop.restarting = False
        return self._loaders("val")

    def test_dataloader(self) -> Loaders:
        """The test rows in dataset order, in loaders as from `val_dataloader`.

        Returns:
            A loader as from `train_dataloader`.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or there is no store.
        """
        return self._loaders("test")

    def predict_dataloader(self) -> Loaders:
        """The rows to predict on in dataset order, in which the predictions come back.

        Returns:
            Loaders as from `val_dataloader`.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or there is no store.
        """
        return self._loaders("predict")

    def _loaders(self, kind: str) -> Loaders:
        """A loader for each dataset to evaluate on, in the form in which they are given."""
        self._read_again(kind)
        given = self.datasets[kind]
        loaders = {split: self._loader(split) for split in named_datasets(kind, given)}
        found: Loaders = list(loaders.values())
        if not has_several(given):
            found = loaders[kind]
        elif isinstance(given, Mapping):
            found = {split.partition("/")[2]: loader for split, loader in loaders.items()}
        return found if self._source is None else self._source.combine(kind, found)

    @property
    def _is_quiet(self) -> bool:
        """Whether a Trainer shows no progress bar, and so nothing else is to be printed either."""
        if self.trainer is None:
            return False
        bar: Any = self.trainer.progress_bar_callback
        return bar is None or getattr(bar, "is_disabled", False)

    def _print_placement(self, placement: Placement) -> None:
        found = {
            split: (
                plan.order.shuffle_block if plan.is_streamed else None,
                *plan.held(placement.topology, split),
            )
            for split, plan in placement.splits.items()
        }
        # Nothing is printed of splits that lie as the last table shows them, such as the next fold.
        if not self._is_quiet:
            if found.items() - _printed.items():
                rank_zero_only(Console().print)(placement_table(placement))
            _printed.update(found)
        # And once, that the mapped shards do not fit into memory.
        free = free_bytes(torch.device("cpu"))
        mapped = sum(
            held.num_bytes for held in placement.held() if held.residency is Residency.MMAP
        )
        if mapped > free and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"residency={self.residency!r}: {format_bytes(mapped)} of shards are read from the"
                f" file mapping, and {format_bytes(free)} of memory are available: rows will come"
                " from the disk one by one, and slowly. residency='stream' reads them in long"
                " pieces, shuffled within a block (shuffle_block)",
                stacklevel=2,
            )

    @property
    def _running(self) -> TrainerFn | None:
        """What the Trainer runs; None without one, and before and after its runs."""
        if self.trainer is None or self.trainer.state.status is not TrainerStatus.RUNNING:
            return None
        return self.trainer.state.fn

    def _splits(self, stage: str | None = None) -> list[str]:
        """The splits of a stage; by default what the Trainer runs, or all if it runs nothing."""
        if stage is None and self._running is not None:
            stage = self._running.value
        kinds = SPLITS if stage is None else _SPLITS_OF_STAGE[stage]
        if (source := self._source) is not None:
            kinds = tuple(kind for kind in kinds if source.has(kind))
        # Several training sets are one split.
        named = ({k: None} if k == "train" else named_datasets(k, self.datasets[k]) for k in kinds)
        return [split for each in named for split in each]

    @property
    def _strategy(self) -> Any:
        runner = self.trainer or self._fabric
        return None if runner is None else runner.strategy

    def open_train_store(self) -> Store:
        """Open the store of the training rows, without a set-up. Several sets are one store."""
        self.read_training_loaders()
        stores = self._split_stores
        if not (opened := stores.open(["train"])):
            raise stores.missing("train")
        return opened["train"]

    def store_path(self, split: str) -> Path | StoreUrl:
        """Where the store is that has the rows of a split."""
        return self._split_stores.path(split)

    def _loader(self, split: str) -> SuperBatchLoader | BatchLoader:
        rows, made = self._rows_of(split), self._set_up
        assert made is not None
        order, options = made.placement.splits[split].order, dict[str, Any]()
        if split == "train":
            order = made.order_with(self._split_stores.options)
            progress = None if self.trainer is None else TrainerProgress(self.trainer)
            options = {"drop_last": self.drop_last, "progress": progress}
            if self._is_overfitting and self.sampler is not None:
                rank_zero_warn(
                    "overfit_batches: the rows come in dataset order, and sampler= is ignored;"
                    " to train on some rows in the sampler's order, pass limit_train_batches"
                    " or subset= instead"
                )
            if not self._is_overfitting:
                steps = steps_to_skip(self.skip_steps)
                options |= {"skip_steps": steps, "skipped": self._skipped}
        loader = SuperBatchLoader(
            rows,
            made.placement.topology,
            order,
            self._split_stores.options.batch_size_of(split),
            collate=self._collate(split),
            transform=self.transform if split == "train" else self.eval_transform,
            seed=self.seed,
            prefetch=self.prefetch,
            **options,
        )
        if any(store.supply is not None for store in self.stores.values()):
            loader.renewed = partial(self._renewed, split)
            if split == "train" and self.trainer is not None:
                show_stored(self.trainer)
        if self.trainer is None:
            return BatchLoader(
                loader, made.placement.topology.assemble_on or loader.data_devices[0]
            )
        if not self._is_overfitting:
            loader.dataset = loader.batch_sizes
        return loader.placed(made.placement.topology)

    def _renewed(self, split: str) -> SplitRows | None:
        """The rows of a split for the next epoch: stores that were being built may be whole now."""
        made = self._set_up
        # Not while a training epoch goes on.
        if made is not None and not made.is_released and split == next(iter(made.stores)):
            self._set_up = found = made.renewed()
            if found is not made:
                self._print_placement(found.placement)
        return self._rows.get(split)

    def _collate(self, split: str) -> Collate:
        assert self._set_up is not None
        # The forms of the set-up, as the rows were set up for them.
        stores, options = self._split_stores, self._set_up.options
        stored = stores.parts(stores.stored_split(split))[0]
        schema, dataset = self.stores[split].schema, stores.datasets[stored]
        sample = None
        if not schema.has_classes or dataset is None or is_read_once(dataset):
            pass
        elif is_stream(dataset):
            sample = next(samples_of(dataset))
        else:
            sample = first_sample(dataset, self.num_workers)
        return FormedCollate(schema, options.forms, sample, options.with_row_numbers)


#: The default of each option.
_DEFAULTS = {
    name: each.default
    for name, each in inspect.signature(MemmapDataModule.__init__).parameters.items()
    if name in OPTIONS and each.default is not each.empty
}
