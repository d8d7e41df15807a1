"""The data module: Lightning's hooks, each of which delegates to the module that does the work."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap._compat.loops import (
    forget_validation_position,
    is_restoring,
    renew_train_loader_at_start,
)
from lightning_memmap._compat.tensors import empty_caches
from lightning_memmap.data.convert.loader_source import (
    TRANSFER_HOOKS,
    LoadersModule,
    LoaderSource,
    check_source,
    chosen_options,
    make_training_sets,
)
from lightning_memmap.data.loaders import make_loader
from lightning_memmap.data.options import (
    OPTIONS,
    DataOptions,
    OptionAttributes,
    reject_loader_options,
)
from lightning_memmap.data.resume import Resume, renew_where_epochs_differ
from lightning_memmap.data.set_up import (
    Planner,
    SetUp,
    name_stored_validation,
    print_placement,
    warn_of_slow_reads,
)
from lightning_memmap.data.split_stores import SplitStores, StoreOrigin
from lightning_memmap.data.splits import ROLES, ROLES_OF_STAGE, has_several, name_datasets
from lightning_memmap.errors import nearest
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.placement.plan import Placement
from lightning_memmap.placement.topology import DataTopology, find_data_parallel_rank, find_topology
from lightning_memmap.process_group import leave_group_at_exit
from lightning_memmap.ranks import check_ranks_match
from lightning_memmap.sampling.factory import SamplerFactory
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import SkippedSteps
from lightning_memmap.sampling.selection import Selection, Subset
from lightning_memmap.schema.forms import Windows
from lightning_memmap.store import Store
from lightning_memmap.store.growing import BackgroundBuild
from lightning_memmap.store.paths import StoreUrl

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any] | Iterable[Any]
else:
    # jsonargparse would check the arguments of a dataset in a config against a subscripted class,
    # whatever subclass of it the config names.
    AnyDataset = Dataset

#: One dataset or several, in a list or by name; None for one that is stored already.
Datasets: TypeAlias = AnyDataset | list[AnyDataset | None] | dict[str, AnyDataset | None] | None
#: A loader, or one for each of several datasets.
Loader: TypeAlias = SuperBatchLoader | BatchLoader
Loaders: TypeAlias = Loader | list[Loader] | dict[str, Loader]


class MemmapDataModule(OptionAttributes, L.LightningDataModule):
    """Stores datasets once, keeps their rows on the data devices, and serves the training steps.

    A batch has the structure of the dataset's samples, as ``default_collate`` would build it, with
    tensors of shape (B, *shape of a sample*) and the dtype of the samples. Batches are on the
    device that trains. Under strategies of one process, such as ``memmap_superbatch``, every
    device holds a part of the rows; under strategies with several processes, each process holds a
    part on its own device. The rows of every global batch are the same under all of them.

    Args:
        train_dataset: The dataset to train on, map-style or iterable; see
            `lightning_memmap.store.build_store`. With None, the existing store of the split is
            used. A generator is read once, by the process that builds the store. It needs a
            ``fingerprint`` if the store already exists or if there are several processes. A dict of
            datasets by name, all with the same fields, is mixed by ``sampler=Mixture(...)``.
        val_dataset: The dataset to validate on. Both the dataset and its store may be missing. A
            list of datasets, or a dict of datasets by name, gets one loader for each. The index of
            the loader is the ``dataloader_idx``.
        test_dataset: The dataset or datasets to test on.
        predict_dataset: The dataset or datasets to predict on.
        store_dir: Directory that contains one store per split: ``train``, and ``val`` or, for
            several datasets, ``val/0`` or ``val/NAME``. ``{member}`` in it is replaced by the
            number of the member, and ``~`` by your home directory. With a URL such as
            ``s3://bucket/stores`` the stores must already exist. Each process downloads its shards
            into the cache of `lightning_memmap.store.open_store`.
        batch_size: Rows per data device and step, as under DDP.
        transform: Batch transform for training: a callable or module that maps a batch to a batch.
            It runs on each data device, without gradients. A parameter named ``random`` receives a
            `lightning_memmap.transforms.RowRandom`, and one named ``generator`` a seeded
            ``torch.Generator``. In `lightning_memmap.transforms.OnSuperBatch` it runs on
            the assembled rows instead.
        eval_transform: Batch transform for validation, test and prediction.
        shuffle: Whether to permute the training rows in each epoch.
        drop_last: Whether to drop an incomplete last training step. Evaluation never drops a row.
        seed: Seed of the row order and of random transforms.
        num_shards: Number of shards that the rows are divided into. The global batches are equal
            for every number of data devices that divides it. By default the number of the store.
            New stores have 24 shards below 20,000 rows, and 192 from there on. Stores with another
            number are used as they are: their rows are striped again.
        residency: Location of the shards: ``auto``, ``device``, ``host``, ``mmap`` or, for data
            larger than memory, ``stream``; see `lightning_memmap.placement`.
        memory_fraction: Fraction of a device's free memory at set-up that shards may use. It also
            limits the host memory, divided by the processes of the machine, that ``host`` shards
            and the blocks of ``stream`` may use. Leave enough for the model, its gradients and its
            activations.
        num_workers: Number of processes that read the datasets, to store them or to compare them
            with their stores; 0 reads them in this process. Reading stores needs no workers.
        overwrite: Whether to replace stores of other datasets.
        fingerprint: Your own identity of the datasets, such as a version or a hash: one string, or
            a dict of strings by split. It then decides alone whether a store belongs to its
            dataset; see `lightning_memmap.store.build_store`.
        subset: The rows of the stores to use, without copying any: from `lightning_memmap.
            sampling`, a `Subset` of the training rows, or a dict of `Subset` by split; or
            `RandomSplit` or `KFold`, which hold out rows of the training store for validation.
        member: The fold or part to use, counted from 0. It also replaces ``{member}``. By default
            the member that this process trains under ``memmap_independent``, modulo the number of
            folds or parts. It is rejected without any of these.
        shuffle_block: Number of rows of a shard that are shuffled together. ``shuffle_block *
            num_shards`` rows are mixed with each other, and with no other rows of their epoch. By
            default all rows are mixed. ``residency="stream"`` reads this number of rows of each
            shard at once; by default it is chosen so that all shards together read 512 MiB. The
            order of rows depends on this number, but not on the residency, the machine or the
            number of devices. Resume a run with the number that it started with. It applies to the
            samplers of this package too. It is rejected with ``shuffle=False``, except under
            ``stream``.
        sampler: Creates the order of the training rows instead of ``shuffle``, such as
            `lightning_memmap.sampling.Weighted`: a `lightning_memmap.sampling.SamplerFactory`, or a
            function of the `lightning_memmap.sampling.Pool` of rows and the seed that returns a
            `lightning_memmap.sampling.Sampler`.
        variable: The names of fields and lists whose rows may differ in length, or a dict with the
            number of leading dimensions that may, such as ``{"matrix": 2}``. Only needed if the
            rows that a build reads first don't show it. Names in ``layout`` and ``windows`` count.
        nullable: The names of fields and containers that may be None. Only needed if the rows that
            a build reads first don't show it.
        layout: How batches hold rows that differ in length, by name of the field or list:
            ``"pad"``, the default of fields, ``"jagged"``, ``"list"``, the default of lists of
            records, or a `lightning_memmap.schema.Layout` such as ``Pad(value=-1, multiple=8)``; in
            a config ``{value: -1, multiple: 8}``. The store does not depend on it.
        decode: A `lightning_memmap.schema.Decode`, or a dict of its arguments, for each field that
            holds the bytes of image files: batches hold the images. The store does not depend on
            it.
        windows: A `lightning_memmap.schema.Windows`: fields that are cut into windows, each of
            which is a row of an epoch. The store does not depend on it.
        with_row_numbers: Whether to add the rows of a batch in their dataset, int64 of shape (B,):
            under the key ``row_number`` if samples are dicts or TensorDicts, and else as the last
            item. For a subset too they are rows of the whole dataset.
        skip_steps: Training steps to skip, such as after a loss spike: a range, or a list of
            numbers. They are global batches, counted from 0 over all epochs as if none were
            skipped: step ``s`` is step ``s % S`` of epoch ``s // S``, if an epoch has ``S`` steps
            with the present batch size and devices. With ``accumulate_grad_batches`` an optimizer
            step has several of them. All other steps keep their rows. Checkpoints store the skipped
            rows, and a resumed run skips the same rows, on other numbers of devices too.
        build: ``"first"`` builds the stores before training. ``"while_training"`` starts training
            at once: in the first epoch, ``num_workers`` processes read the rows in the order in
            which they are needed, and store them. From stores at a URL, the shards are downloaded
            in that order. The rows of each batch are the same.
        prefetch: Number of steps to prefetch, under any strategy: their fetches, transforms and
            copies run on side streams of the devices. By default 2 if batches are on a GPU, and 0
            on a CPU.
        eval_batch_size: Rows per data device and step of validation, test and prediction: a number,
            or a dict of numbers by split. By default ``batch_size``.
        weight: The items that the loss of ``training_step`` is a mean over, if they aren't rows:
            tokens, for instance. The losses of processes, replicas and micro-batches are weighted
            by their number of items. Pass the name of a field that contains the number of each
            row, or whose values are the items if rows differ in length; the number in each step is
            then known without communication. Or pass a function of the training batch, as the
            loader returns it, that returns the number of each row as a tensor of shape (B,) on the
            batch's device, at least 0 and finite (not checked on a GPU); processes then add up one
            number in each step. By default, items are rows, and with
            `lightning_memmap.sampling.Packed` all tokens but the first of each document. A strategy
            of this package is required if there are several processes or micro-batches; under a
            Fabric, multiply losses by `loss_scale`.
        datamodule: Another data module, whose loaders state the datasets, batch sizes, samplers and
            ``drop_last``: see `from_datamodule`.

    The arguments are attributes too. A new value of ``batch_size``, ``prefetch``, the transforms or
    the order takes effect with the next loader, and any other at the next `setup`.

    Raises:
        TypeError: A transform or the sampler is not callable, a count or the seed is not an
            integer, or a fingerprint is not a string.
        ValueError: An argument is out of range, or two of them exclude each other.

    Examples:
        >>> import tempfile, torch
        >>> rows = torch.utils.data.TensorDataset(torch.arange(48.0).view(48, 1))
        >>> data = MemmapDataModule(rows, store_dir=tempfile.mkdtemp(), batch_size=8)
        >>> data.prepare_data()
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader()))[0].shape
        torch.Size([8, 1])
    """

    @reject_loader_options
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
        variable: list[str] | dict[str, int] | None = None,
        nullable: list[str] | None = None,
        layout: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        windows: Windows | None = None,
        with_row_numbers: bool = False,
        skip_steps: range | list[int] | None = None,
        build: str = "first",
        prefetch: int | None = None,
        eval_batch_size: int | dict[str, int] | None = None,
        weight: Callable[[Any], Any] | str | None = None,
        datamodule: L.LightningDataModule | None = None,
    ) -> None:
        arguments = locals()
        super().__init__()
        self.options = DataOptions(**{name: arguments[name] for name in OPTIONS})
        self._set_up: SetUp | None = None
        self._known_stores = dict[str, StoreOrigin]()
        self._has_warned = False
        self._train_loader: SuperBatchLoader | None = None
        #: The state that was loaded from a checkpoint, until the next training loader uses it.
        self._resume: Resume | None = None
        #: The steps that the run has skipped, as far as a training loader knows them.
        self._skipped = SkippedSteps()
        self._background_builds: list[BackgroundBuild] = []
        #: The data module whose loaders are read, if any.
        self._source: LoaderSource | None = None
        #: The data modules of several training loaders, by key; empty if there is only one.
        self._training_sets: dict[Any, MemmapDataModule] = {}
        self._fabric: L.Fabric | None = None
        if datamodule is not None:
            check_source(datamodule, MemmapDataModule)
            self._source = LoaderSource(datamodule, chosen_options(self.options, _DEFAULTS))
            self._source.adopt_hooks(self)
        SplitStores(self.options, None, self._known_stores).check_datasets()

    # Constructors

    def with_options(self, **changes: Any) -> "MemmapDataModule":
        """Create a data module of the same class with other options or datasets.

        Args:
            changes: Arguments of this class by name.

        Returns:
            The new data module, which is not set up. This one is unchanged.

        Raises:
            TypeError: A name is not an option, or a transform or the sampler is not callable.
            ValueError: An option is out of range, or two of them exclude each other.
        """
        for name in changes:
            if name not in OPTIONS:
                raise TypeError(f"{name}: not an option of a data module{nearest(name, OPTIONS)}")
        other = copy.copy(self)
        other.options = replace(self.options, **changes)
        other._known_stores = {**self._known_stores}
        other._background_builds = []
        if self._source is not None:
            other._source = self._source.choosing(changes)
            other._training_sets = {}
        return other

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
        """Create a data module, with the defaults of Lightning's method of this name.

        Args:
            train_dataset: The dataset to train on.
            val_dataset: The dataset or datasets to validate on.
            test_dataset: The dataset or datasets to test on.
            predict_dataset: The dataset or datasets to predict on.
            batch_size: Rows per data device and step.
            num_workers: Number of processes that write a store.
            datamodule_kwargs: Other arguments of this class. ``store_dir`` is required.

        Returns:
            The data module.

        Raises:
            TypeError: ``store_dir`` is missing, or there are several datasets to train on.
        """
        if "store_dir" not in datamodule_kwargs:
            raise TypeError(
                "from_datasets: store_dir is missing: pass store_dir=..., the directory to store"
                " the datasets in"
            )
        datasets: Any = train_dataset, val_dataset, test_dataset, predict_dataset
        return cls(*datasets, batch_size=batch_size, num_workers=num_workers, **datamodule_kwargs)

    @classmethod
    def from_datamodule(
        cls, datamodule: L.LightningDataModule, *, store_dir: str | Path, **options: Any
    ) -> "MemmapDataModule":
        """Create a data module that stores and serves the rows of an existing one.

        When Lightning calls a hook of the new data module, the same hook of the existing one is
        called on the same ranks. Only ``setup`` also runs earlier, on the process that builds the
        stores. The loaders that it then returns are not iterated over: their datasets, batch sizes,
        samplers and ``drop_last`` become options. Each of several training loaders gets its
        own data module. Arguments that differ from their defaults replace the values of the
        loaders, and so do attributes that are set before the loaders are read.

        The new data module has the transfer hooks, the state and all other attributes of the
        existing one.

        Args:
            datamodule: The existing data module.
            store_dir: Directory of the stores, as for this class.
            options: Other arguments of this class.

        Returns:
            The data module. Its options have their values after `setup` or `prepare_data`.

        Raises:
            TypeError: ``datamodule`` is not a ``LightningDataModule``, or is a `MemmapDataModule`;
                at set-up, a method returns something other than a ``DataLoader``.
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
        """Create a data module that stores and serves the rows of existing loaders.

        Args:
            train: A ``DataLoader``, several in a list or dict, or a ``CombinedLoader``.
            val: The loader or loaders to validate on.
            test: The loader or loaders to test on.
            predict: The loader or loaders to predict on.
            store_dir: Directory of the stores, as for this class.
            options: Other arguments of this class.

        Returns:
            The data module.

        Raises:
            TypeError: A value is not a ``DataLoader``.
            ValueError: No loader is passed, or one cannot be carried over; see `from_datamodule`.
        """
        loaders = {"train": train, "val": val, "test": test, "predict": predict}
        if all(loader is None for loader in loaders.values()):
            raise ValueError("train=None: pass at least one loader to from_loaders")
        data = cls(datamodule=LoadersModule(**loaders), store_dir=store_dir, **options)
        data._read_loaders(None)
        return data

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments, without anything that `setup` has made."""
        # The hooks are bound to the source, which a copy of this data module copies too.
        adopted = () if self._source is None else TRANSFER_HOOKS
        return {
            **{name: value for name, value in vars(self).items() if name not in adopted},
            "trainer": None if self._running is None else self.trainer,
            "_set_up": None,
            "_train_loader": None,
            "_background_builds": [],
            "_fabric": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the arguments, and adopt the hooks of the source."""
        vars(self).update(state)
        if self._source is not None:
            self._source.adopt_hooks(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemmapDataModule":
        """Copy this data module, but share its datasets, which are only read."""
        memo.update((id(dataset), dataset) for dataset in self._split_stores.datasets.values())
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(copied.__getstate__(), memo))
        return copied

    # Attributes

    @override
    def _set_option(self, name: str, value: Any) -> None:
        super()._set_option(name, value)
        if self._source is not None:
            self._source.choose(name)

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in the source, for modules that use its attributes."""
        source = vars(self).get("_source")
        if source is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(source.datamodule, name)

    @override
    def __str__(self) -> str:
        """Return the class, and the rows of each split that is set up."""
        rows = {split: split_rows.pool.num_rows for split, split_rows in self._rows.items()}
        return f"{type(self).__name__}(rows={rows})"

    @property
    def datasets(self) -> dict[str, Any]:
        """The value of each of the four dataset arguments, by ``train``, ``val`` and so on."""
        return self.options.datasets

    @property
    def stores(self) -> Mapping[str, Store]:
        """The open stores by split; empty before `setup`."""
        return {} if self._set_up is None else self._set_up.stores

    @property
    def store_directory(self) -> Path | StoreUrl:
        """The directory of the stores, or its URL."""
        return self._split_stores.directory

    @property
    def placement(self) -> Placement | None:
        """The location of each shard; None before `setup`."""
        return None if self._set_up is None else self._set_up.placement

    @property
    def order(self) -> Sampler | None:
        """The order of the training rows; None before they are set up."""
        return None if self._set_up is None else self._set_up.order

    def store_path(self, split: str) -> Path | StoreUrl:
        """Return the path or URL of the store that holds the rows of a split."""
        return self._split_stores.path(split)

    def open_train_store(self) -> Store:
        """Open the store of the training rows without a set-up. A mixture is one store."""
        self.read_training_loaders()
        stores = self._split_stores
        if not (opened := stores.open(["train"])):
            raise stores.missing("train")
        return opened["train"]

    def make_train_order(self, store: Store, topology: DataTopology | None = None) -> Sampler:
        """Return the order of the training rows; ``overfit_batches`` does not apply."""
        planner = Planner(self._split_stores, topology or find_topology(None))
        return planner.plan_split("train", store).order

    def use_fabric(self, fabric: L.Fabric) -> None:
        """Place the rows on the devices of a Fabric, without a Trainer.

        After the next `setup`, each process of the Fabric serves its own rows on its own device:
        the loaders return batches there, prefetched as under a Trainer. Without a Trainer or a
        Fabric, batches are on the CPU. All processes must call it.

        Args:
            fabric: The Fabric, already launched.
        """
        self._fabric = fabric

    def loss_scale(self) -> float | Tensor:
        """Return the factor of the loss of the last training batch, for a loop under a Fabric.

        A Fabric averages gradients over processes evenly. If each process multiplies its mean loss
        by the factor, the result is the gradient of the mean over all rows of the step, or over
        what ``weight`` counts. Accumulated batches are not weighted against each other. All
        processes must call it, because those with a function as ``weight`` add up one number.

        Returns:
            The factor, 1.0 with one process. If ``weight`` is a function, a tensor without
            dimensions on the device of the batch.

        Raises:
            ValueError: The training loader has not returned a batch, or a Trainer uses it, whose
                strategy weights losses itself.
        """
        step = None if self._train_loader is None else self._train_loader.delivered.last
        if self.trainer is not None or step is None:
            raise ValueError(
                "loss_scale: call it after the training loader has returned a batch, in a loop"
                " without a Trainer"
            )
        assert self._train_loader is not None
        self._train_loader.delivered.reminder = ""
        size = find_data_parallel_rank(self._strategy)[1]
        if size == 1 or self._fabric is None:
            return 1.0
        total: Any = None
        if step.total is None:
            total = self._fabric.all_reduce(step.local.clone(), reduce_op="sum")
            # Processes of one data-parallel rank have the same rows.
            total = total * size / self._fabric.world_size
        scale: float | Tensor = step.scale(size, total)
        return scale

    @property
    def _split_stores(self) -> SplitStores:
        return SplitStores(
            self.effective_options, self._strategy, self._known_stores, not self._is_quiet
        )

    @property
    def _planner(self) -> Planner:
        # Lightning turns shuffling off only in a DataLoader.
        is_overfitting = getattr(self.trainer, "overfit_batches", 0) > 0
        return Planner(self._split_stores, find_topology(self._strategy), is_overfitting)

    @property
    def _rows(self) -> Mapping[str, SplitRows]:
        """The rows of each split; empty before `setup` and after `teardown`."""
        set_up = self._set_up
        return {} if set_up is None or set_up.is_released else set_up.rows

    @property
    def _strategy(self) -> Any:
        runner = self.trainer or self._fabric
        return None if runner is None else runner.strategy

    @property
    def _running(self) -> TrainerFn | None:
        """The stage that the Trainer runs; None without a Trainer or between its runs."""
        if self.trainer is None or self.trainer.state.status is not TrainerStatus.RUNNING:
            return None
        return self.trainer.state.fn

    @property
    def _is_quiet(self) -> bool:
        """Whether the Trainer shows no progress bar, so that nothing else is printed either."""
        if self.trainer is None:
            return False
        bar: Any = self.trainer.progress_bar_callback
        return bar is None or getattr(bar, "is_disabled", False)

    # Building and set-up

    def prepare_data(self) -> None:
        """Build the stores of the splits that the Trainer runs, unless they exist.

        One process per node calls it.

        Raises:
            TypeError: A dataset has no length.
            ValueError: A dataset is empty, or ``store_dir`` contains ``{member}`` and the member
                is unknown.
            SchemaError: A sample cannot be stored, or does not fit the first one.
            DatasetError: A dataset raised an error, is random, or is not the one that was stored.
            StoreError: A store is damaged, or its directory is not writable or contains something
                else.
            OSError: The disk is full, or the files cannot be written.
        """
        if self._source is not None:
            self._source.datamodule.trainer = self.trainer
            self._source.datamodule.prepare_data()
            self._read_loaders(None, in_advance=True)
        for training_set in self._training_sets.values():
            training_set.prepare_data()
        stores = self._split_stores
        stores.check_options()
        specs, growing = stores.needed_builds(self._splits(), self._background_builds)
        if growing:
            build = BackgroundBuild(growing, self.num_workers, self._planner.find_first_step_rows)
            self._background_builds.append(build)
        stores.build(specs)

    def setup(self, stage: str | None = None) -> None:
        """Open the stores, plan the placement, and load the shards of this process.

        All ranks must call it: they compare everything that must be equal on all of them. The
        placement is printed, unless it is the one that was printed last.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. With None, the splits
                that the Trainer runs are set up, or all splits without a running Trainer.

        Raises:
            StoreNotFoundError: The store of a dataset was not built.
            StoreError: A store is damaged, or does not support the residency.
            DatasetError: A store was built from another dataset.
            PlacementError: The shards do not fit, or there are fewer rows than data devices.
            ValueError: A data device does not exist, or the member that folds, parts or
                ``{member}`` need is unknown or out of range.
            RankMismatchError: Another rank failed, or has other stores, another seed, batch size,
                shuffle, shuffle_block, drop_last or number of data devices.
        """
        leave_group_at_exit()
        set_up = None
        error = None
        try:
            self._reset()
            set_up = self._set_up = self._set_up_stage(stage)
        except Exception as caught:
            error = caught
        runner = self.trainer or self._fabric
        if runner is not None and runner.world_size > 1:
            check_ranks_match({} if set_up is None else set_up.rank_invariants, error)
        elif error is not None:
            raise error
        if (stage or self._running or "fit") == "fit":
            for training_set in self._training_sets.values():
                training_set.setup("fit")

    def _reset(self) -> None:
        """Free the rows of the last set-up, and forget the state of the last fit."""
        # Not teardown(), because a subclass may have overridden it.
        if self._set_up is not None:
            self._set_up.free_rows()
        # They belong to a fit that ended before it requested its loader.
        self._resume = None
        self._skipped = SkippedSteps()

    def _set_up_stage(self, stage: str | None) -> SetUp:
        """Open the stores of a stage, place their shards, and load the shards of this process."""
        if stage is not None and stage not in ROLES_OF_STAGE:
            raise ValueError(f"stage={stage!r}: choose one of {', '.join(ROLES_OF_STAGE)}, or None")
        self._read_loaders(stage)
        planner = self._planner
        planner.stores.check_options()
        opened = planner.stores.open(self._splits(stage))
        is_omitted = self.datasets["val"] is None and self.datasets["train"] is not None
        if "val" in opened and is_omitted and planner.stores.stored_split("val") == "val":
            name_stored_validation(opened["val"])
        placement = planner.place(opened)
        # While a store is being built, its rows are read from its files, wherever they will live.
        if all(store.pending is None for store in opened.values()):
            self._report(placement)
        return SetUp.load(planner, opened, placement)

    def _report(self, placement: Placement) -> None:
        if not self._is_quiet:
            print_placement(placement)
        if not self._has_warned:
            self._has_warned = warn_of_slow_reads(placement, self.residency)

    def _splits(self, stage: str | None = None) -> list[str]:
        """Return the splits of a stage; by default those that the Trainer runs, or all."""
        if stage is None and self._running is not None:
            stage = self._running.value
        roles = ROLES if stage is None else ROLES_OF_STAGE[stage]
        if (source := self._source) is not None:
            roles = tuple(role for role in roles if source.has(role))
        splits = list[str]()
        for role in roles:
            # The training sets of a mixture are one split.
            splits += ["train"] if role == "train" else name_datasets(role, self.datasets[role])
        return splits

    def teardown(self, stage: str | None = None) -> None:
        """Free the shards of all splits. Loaders over them raise an error from then on.

        The memory is returned to the devices and to the host. torch's allocators keep what they
        cached after Lightning has emptied their caches, which it does before this call.

        Args:
            stage: Not used.
        """
        self._end_builds()
        if self._set_up is not None:
            self._set_up.free_rows()
            empty_caches(self._set_up.placement.topology.data_devices)
        for training_set in self._training_sets.values():
            training_set.teardown(stage)
        if self._source is not None:
            self._source.datamodule.teardown(stage)  # type: ignore[arg-type]  # As we were called.

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Stop background builds; the next run continues them."""
        for training_set in self._training_sets.values():
            training_set.on_exception(exception)
        self._end_builds()
        if self._source is not None:
            self._source.datamodule.on_exception(exception)

    def _end_builds(self) -> None:
        while self._background_builds:
            self._background_builds.pop().stop()

    # Reading the loaders of an existing data module

    def _read_loaders(self, stage: str | None, *, in_advance: bool = False) -> None:
        """Read the loaders of the source for a stage."""
        if (source := self._source) is not None:
            stage = stage or self._running
            self._use(source.read(self.options, stage, self.trainer, in_advance=in_advance))

    def _use(self, options: DataOptions) -> None:
        """Use options that were read from the source, here and for each of several loaders."""
        assert self._source is not None
        self.options = options
        sets = self._source.options_of_sets()
        self._training_sets = make_training_sets(self, sets, self._training_sets)

    def read_training_loaders(self) -> None:
        """Read the training loaders of the source, unless any of its loaders were read before."""
        if self._source is not None and not self._source.is_read:
            self._read_loaders("fit")

    def _read_again(self, role: str) -> None:
        """Read the loaders of a split again if the Trainer reloads them in later epochs."""
        trainer: Any = self.trainer
        if self._source is not None and trainer and trainer.reload_dataloaders_every_n_epochs:
            self._use(self._source.read_again(self.options, role))

    # Loaders

    def train_dataloader(self) -> Any:
        """Return the loader of the training rows, in their order.

        Without a Trainer, this and the other loaders are `lightning_memmap.loading.BatchLoader`.

        Returns:
            A loader of assembled batches, or of super-batches if the strategy wants the batches of
            the data devices separately. Under ``overfit_batches`` the rows are in dataset order.
            If several loaders were read, their replacements, combined in the same way.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or its store does not exist.
            ValueError: No step is complete under ``drop_last``, the rows cannot be read in the
                sampler's order, or the checkpoint cannot be resumed in this order.
        """
        self._read_again("train")
        if self._source is not None and (tree := self._source.training_sets) is not None:
            sets = self._training_sets.items()
            return tree.combine({key: data.train_dataloader() for key, data in sets})
        trainer = self.trainer
        if trainer is not None and is_restoring(trainer):
            # Until it has restored its counters, it only uses the length of the loader.
            trainer = None
        if trainer is not None:
            (self._resume or Resume()).settle(trainer)
        returned = self._loader("train")
        loader = returned.loader if isinstance(returned, BatchLoader) else returned
        self._train_loader = loader
        if hasattr(self._strategy, "add_training_loader"):
            self._strategy.add_training_loader(loader)
        weight = self.effective_options.weight
        is_in_loop = self.trainer is None and find_data_parallel_rank(self._strategy)[1] > 1
        if weight is not None and is_in_loop:
            loader.delivered.reminder = (
                f"weight={weight!r} had no effect in the first epoch: multiply the loss of each"
                " batch by data.loss_scale()"
            )
        if trainer is not None:
            self._restore(loader, trainer)
        self._skipped = loader.skipped
        return returned

    def _restore(self, loader: SuperBatchLoader, trainer: L.Trainer) -> None:
        """Start a training loader in the Trainer's epoch, or where the checkpoint was saved."""
        loader.set_epoch(trainer.current_epoch)
        if self._resume is not None and self._resume.train is not None:
            loader.load_state_dict(self._resume.train.as_dict())
        self._resume = None
        renew_where_epochs_differ(loader, trainer)

    def val_dataloader(self) -> Loaders:
        """Return the loader of the validation rows, in dataset order.

        Returns:
            A loader as from `train_dataloader`; for several datasets a list or dict of loaders,
            like the datasets. An empty list if the split does not exist, unless the Trainer
            validates.

        Raises:
            StoreNotFoundError: The Trainer validates, and the split does not exist.
        """
        is_missing = self._rows.keys().isdisjoint(name_datasets("val", self.datasets["val"]))
        if is_missing and self._running is not TrainerFn.VALIDATING:
            # Lightning would warn that an empty list may be a mistake.
            message = "Total length of `list` across ranks is zero"
            warnings.filterwarnings("ignore", message=message)
            return []
        if self.trainer is not None and self._running is TrainerFn.FITTING:
            forget_validation_position(self.trainer)
        return self._loaders("val")

    def test_dataloader(self) -> Loaders:
        """Return the loader of the test rows, in dataset order.

        Returns:
            A loader, or several, as from `val_dataloader`.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or its store does not exist.
        """
        return self._loaders("test")

    def predict_dataloader(self) -> Loaders:
        """Return the loader of the rows to predict on, in dataset order.

        Returns:
            A loader, or several, as from `val_dataloader`.

        Raises:
            StoreNotFoundError: `setup` was not called for this split, or its store does not exist.
        """
        return self._loaders("predict")

    def _loaders(self, role: str) -> Loaders:
        """Return the loader of each dataset to evaluate on, in a list or dict like the datasets."""
        self._read_again(role)
        datasets = self.datasets[role]
        by_split = {split: self._loader(split) for split in name_datasets(role, datasets)}
        loaders: Loaders = list(by_split.values())
        if not has_several(datasets):
            loaders = by_split[role]
        elif isinstance(datasets, Mapping):
            loaders = dict(zip(map(str, datasets), by_split.values(), strict=True))
        return loaders if self._source is None else self._source.combine_like_source(role, loaders)

    def _loader(self, split: str) -> Loader:
        if split not in self._rows:
            raise self._split_stores.missing(split)
        assert self._set_up is not None
        return make_loader(
            split,
            self._set_up,
            self._split_stores,
            self.trainer,
            self._strategy,
            skipped=self._skipped,
            renew_rows=partial(self._renew_rows, split),
        )

    def _renew_rows(self, split: str) -> SplitRows | None:
        """Return the rows of a split for the next epoch, from a new set-up if builds have ended."""
        set_up = self._set_up
        # Only the first split may renew them: another one may run inside a training epoch.
        if set_up is not None and not set_up.is_released and split == next(iter(set_up.stores)):
            self._set_up = set_up.renewed()
            if self._set_up is not set_up:
                self._report(self._set_up.placement)
        return self._rows.get(split)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training loader, which is the same on every rank.

        Returns:
            ``train``, the state of the loader; ``stores``, what identifies the contents of its
            stores; ``is_validating``; and, once the Trainer has received a batch, ``fit``, its
            counters at the last batch that the weights were trained on. After `load_state_dict`,
            the loaded state until a fit resumes from it. Empty before there is a training loader.
        """
        resume = self._resume or Resume()
        if self._resume is None and (loader := self._train_loader) is not None:
            is_validating = None if self.trainer is None else self.trainer.validating
            stores = None if self._set_up is None else self._set_up.train_stores
            resume = Resume(*loader.trained_state(), is_validating, stores)
        state = resume.as_dict()
        if self._source is not None and (state_of_source := self._source.datamodule.state_dict()):
            state["datamodule"] = state_of_source
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the next fit from a saved state. Outside of a fit, the state is only checked.

        Args:
            state_dict: The return value of `state_dict`.

        Raises:
            ValueError: The checkpoint belongs to another fold or part, so its weights were trained
                on rows that this one holds out; or it is not a return value of `state_dict`.
        """
        resume = Resume.read(state_dict)
        if self._source is not None and "datamodule" in state_dict:
            self._source.datamodule.load_state_dict(state_dict["datamodule"])
        if self._training_sets:  # The Trainer itself stores the state of combined loaders.
            return
        if self.trainer is not None and self.trainer.state.fn is TrainerFn.FITTING:
            if "train" not in self._rows:
                raise self._split_stores.missing("train")
            assert self._set_up is not None
            resume.check_rows(self._rows["train"].pool.identity["subset"])
            resume.check_stores(self._set_up.train_stores)
            self._resume = resume
            renew_train_loader_at_start(self.trainer)


#: The default of each option.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(MemmapDataModule.__init__).parameters.items()
    if name in OPTIONS and parameter.default is not parameter.empty
}
