"""The data module: Lightning's hooks, each handed on to the layer that does the work."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap._compat.loops import (
    TrainerProgress,
    go_on_after,
    renew_train_loader_after_epoch,
    validate_anew,
)
from lightning_memmap.errors import MemmapError, StoreNotFoundError, check_integer
from lightning_memmap.loading import (
    BatchLoader,
    DeviceLoader,
    ResidentSplit,
    SuperBatchLoader,
    load_split,
)
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.loading.transform import check_callable
from lightning_memmap.placement import (
    RESIDENCIES,
    DataTopology,
    Placement,
    Residency,
    Sized,
    SplitPlacement,
    device_budgets,
    format_bytes,
    free_bytes,
    plan_placement,
)
from lightning_memmap.process_group import leave_gloo_at_exit
from lightning_memmap.ranks import check_ranks_match
from lightning_memmap.sampling import RowSubset, Stream, default_window
from lightning_memmap.store import Store, build_store, open_store
from lightning_memmap.store.fingerprint import check_given
from lightning_memmap.store.manifest import check_num_shards
from lightning_memmap.store.probes import first_sample
from lightning_memmap.store.recognition import check_choice
from lightning_memmap.store.recovery import is_store
from lightning_memmap.store.workers import check_num_workers

if TYPE_CHECKING:
    MapDataset: TypeAlias = Dataset[Any]
else:
    # jsonargparse would take the arguments of a dataset in a config for those of a subscripted
    # class, whatever subclass of it the config names.
    MapDataset = Dataset

_SPLITS = ("train", "val", "test", "predict")
_SPLITS_OF_STAGE = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
#: Share of the free host memory that may be page-locked.
_PINNED_FRACTION = 0.5


class MemmapDataModule(L.LightningDataModule):
    """Stores datasets once, keeps them resident on the data devices, and serves super-batches.

    A batch has the structure of the dataset's samples, as ``default_collate`` would give it.
    Under ``memmap_superbatch`` all data devices of the one process hold shards; under any other
    strategy each process holds its own shards on its own device. The rows of each global batch
    are the same.

    Args:
        train_dataset: Map-style dataset to train on. Where a dataset is None, the store of its
            split is used as it is.
        val_dataset: To validate on. May be missing, as may its store.
        test_dataset: To test on.
        predict_dataset: To predict on.
        store_dir: Directory with one store per split in it. ``{member}`` in it stands for the
            number of the member.
        batch_size: Rows per data device and step, as under DDP.
        transform: Batch transform for training: a callable or module, run on each data device
            without gradients. With a parameter named ``generator`` it is given a seeded one.
            In `lightning_memmap.transforms.OnSuperBatch` it runs on the assembled rows instead.
        eval_transform: The same for validation, test and prediction.
        shuffle: Permute the training rows anew each epoch.
        drop_last: Drop an incomplete last training step. Evaluation never drops a row.
        seed: Seed of the row order and of random transforms.
        num_shards: Shards that the rows are dealt to. Any number of data devices that divides it
            gives the same global batches.
        residency: Where shards live: ``auto``, ``device``, ``pinned``, ``mmap`` or, for data larger
            than memory, ``stream``; see `lightning_memmap.placement`.
        memory_fraction: Share of a device's free memory at set-up that shards may take, and of the
            host's for the windows of ``stream``. The model, its gradients and its activations need
            the rest.
        num_workers: Processes that read the datasets, to store them or to compare them with their
            stores; with 0, this one does. None are used for reading stores.
        overwrite: Replace stores of other datasets.
        fingerprint: The identity of the datasets in your own words, such as a version or a hash:
            one string, or one by name of the split. It then decides alone whether a store is of its
            dataset; see `lightning_memmap.store.build_store`.
        check: How a dataset without a fingerprint is compared with its store: ``"probes"``,
            ``"full"`` or ``"off"``; see there.
        num_folds: Train on all rows of the training store but every ``num_folds``-th, and validate
            on those: fold ``f`` is the rows ``i`` with ``i % num_folds == f``. One store serves all
            folds.
        num_parts: Train on every ``num_parts``-th row of the training store alone: part ``m`` is
            the rows ``i`` with ``i % num_parts == m``.
        member: Which fold or part, counted from 0. By default that of the member that this process
            trains under ``memmap_independent``, modulo the number of folds or parts.
        shuffle_window: Rows of a shard that are shuffled together: ``shuffle_window * num_shards``
            rows are mixed with each other, and not with others of their epoch. By default all rows
            are mixed, but under ``residency="stream"``, which reads so many rows of each shard at
            once, as many as make 512 MiB of all shards. The order of rows depends on this number,
            and not on the residency, the machine or the number of devices: a run with one number
            is the same everywhere, and is resumed with that number.

    Raises:
        TypeError: A transform cannot be called.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        train_dataset: MapDataset | None = None,
        val_dataset: MapDataset | None = None,
        test_dataset: MapDataset | None = None,
        predict_dataset: MapDataset | None = None,
        *,
        store_dir: str | Path,
        batch_size: int = 32,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        num_shards: int = 24,
        residency: str = "auto",
        memory_fraction: float = 0.7,
        num_workers: int = 0,
        overwrite: bool = False,
        fingerprint: str | dict[str, str] | None = None,
        check: str = "probes",
        num_folds: int | None = None,
        num_parts: int | None = None,
        member: int | None = None,
        shuffle_window: int | None = None,
    ) -> None:
        super().__init__()
        counts = {"batch_size": batch_size, "seed": seed}
        optional = {
            "num_folds": num_folds,
            "num_parts": num_parts,
            "member": member,
            "shuffle_window": shuffle_window,
        }
        counts.update((name, value) for name, value in optional.items() if value is not None)
        for name, value in counts.items():
            check_integer(name, value)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 row per data device and step")
        check_num_shards(num_shards)
        check_num_workers(num_workers)
        if residency not in RESIDENCIES:
            raise ValueError(f"residency={residency!r}: choose one of {', '.join(RESIDENCIES)}")
        if not 0 < memory_fraction <= 1:
            raise ValueError(f"memory_fraction={memory_fraction}: more than 0 and at most 1")
        if num_folds is not None and num_parts is not None:
            raise ValueError(
                f"num_folds={num_folds} and num_parts={num_parts}: leave one of them out"
            )
        if num_folds is not None and num_folds < 2:
            raise ValueError(f"num_folds={num_folds}: at least 2, one of which is held out")
        if num_parts is not None and num_parts < 1:
            raise ValueError(f"num_parts={num_parts}: at least 1")
        if num_folds is not None and val_dataset is not None:
            raise ValueError(
                f"num_folds={num_folds} with a val_dataset: the fold that is held out is what is"
                " validated on; leave val_dataset out, or give it as test_dataset"
            )
        if member is not None and member < 0:
            raise ValueError(f"member={member}: members are counted from 0")
        if shuffle_window is not None and shuffle_window < 1:
            raise ValueError(f"shuffle_window={shuffle_window}: at least 1 row of a shard")
        if transform is not None:
            check_callable("transform", transform)
        if eval_transform is not None:
            check_callable("eval_transform", eval_transform)
        check_choice(check)
        by_split = (
            fingerprint if isinstance(fingerprint, dict) else dict.fromkeys(_SPLITS, fingerprint)
        )
        for split, given in by_split.items():
            if split not in _SPLITS:
                raise ValueError(
                    f"fingerprint for {split!r}: there is no such split, choose among"
                    f" {', '.join(_SPLITS)}"
                )
            check_given(given)
        self.datasets = dict(
            zip(_SPLITS, (train_dataset, val_dataset, test_dataset, predict_dataset), strict=True)
        )
        self.store_dir = Path(store_dir)
        self.batch_size = batch_size
        self.transform = transform
        self.eval_transform = eval_transform
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.num_shards = num_shards
        self.residency = residency
        self.memory_fraction = memory_fraction
        self.num_workers = num_workers
        self.overwrite = overwrite
        #: By split, what was given; see ``fingerprint``.
        self.fingerprints = by_split
        self.check = check
        self.num_folds = num_folds
        self.num_parts = num_parts
        self.member = member
        self.shuffle_window = shuffle_window
        #: The open stores by split, from `setup` on.
        self.stores: dict[str, Store] = {}
        #: Where the shards live, from `setup` on.
        self.placement: Placement | None = None
        self._printed: dict[str, tuple[DataTopology, SplitPlacement]] = {}
        self._resident: dict[str, ResidentSplit] = {}
        #: By split, the dataset that this data module has stored or recognised, and the content of
        #: the store.
        self._built: dict[str, tuple[Any, str]] = {}
        self._has_warned = False
        self._train_loader: SuperBatchLoader | DeviceLoader | None = None
        self._train_state: dict[str, Any] | None = None
        self._num_trained: int | None = None

    @classmethod
    @override
    def from_datasets(
        cls,
        train_dataset: MapDataset | Iterable[MapDataset] | None = None,
        val_dataset: MapDataset | Iterable[MapDataset] | None = None,
        test_dataset: MapDataset | Iterable[MapDataset] | None = None,
        predict_dataset: MapDataset | Iterable[MapDataset] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> "MemmapDataModule":
        """Make a data module, with the defaults that Lightning's method of this name has.

        Args:
            train_dataset: Map-style dataset to train on.
            val_dataset: To validate on.
            test_dataset: To test on.
            predict_dataset: To predict on.
            batch_size: Rows per data device and step.
            num_workers: Processes that write a store.
            datamodule_kwargs: The other arguments of this class, of which ``store_dir`` must be
                given.

        Raises:
            TypeError: ``store_dir`` is missing, or several datasets are given for one split.
        """
        if "store_dir" not in datamodule_kwargs:
            raise TypeError(
                "from_datasets: store_dir is missing: give store_dir=..., the directory that the"
                " datasets are stored in"
            )
        given = (train_dataset, val_dataset, test_dataset, predict_dataset)
        datasets: dict[str, Any] = {}
        for split, dataset in zip(_SPLITS, given, strict=True):
            if isinstance(dataset, (list, tuple)) and any(isinstance(d, Dataset) for d in dataset):
                raise TypeError(
                    f"{split}_dataset: found {len(dataset)} datasets, and a split has one: join"
                    " them with torch.utils.data.ConcatDataset"
                )
            datasets[f"{split}_dataset"] = dataset
        return cls(**datasets, batch_size=batch_size, num_workers=num_workers, **datamodule_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The arguments, and nothing that `setup` has made: a copy has to be set up by itself.

        It belongs to the Trainer only while that runs: a strategy may send both to a process.
        """
        return {
            **vars(self),
            "trainer": None if self._running is None else self.trainer,
            "stores": {},
            "placement": None,
            "_resident": {},
            "_train_loader": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemmapDataModule":
        """A data module of the same arguments, which shares the datasets: they are only read."""
        memo.update((id(dataset), dataset) for dataset in self.datasets.values())
        copied = copy.copy(self)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(copied), memo))
        return copied

    @override
    def __str__(self) -> str:
        """The rows of each split that is set up, in the form of Lightning's own data modules."""
        lines = []
        for split, name in zip(_SPLITS, ("Train", "Validation", "Test", "Predict"), strict=True):
            resident = self._resident.get(split)
            size = "None" if resident is None else f"size={resident.num_rows}"
            lines.append(f"{{{name} dataloader: {size}}}")
        return "\n".join(lines)

    def prepare_data(self) -> None:
        """Build the stores of the stage's splits, or find them built. One process per node."""
        for split in dict.fromkeys(map(self._stored_split, self._splits())):
            dataset = self.datasets[split]
            if dataset is None or self._finds_its_own(split):
                continue
            store = build_store(
                dataset,
                self._directory() / split,
                num_shards=self.num_shards,
                num_workers=self.num_workers,
                # What this data module has built itself is not built again by the next stage.
                overwrite=self.overwrite and split not in self._built,
                fingerprint=self.fingerprints.get(split),
                check=self.check,
            )
            self._built[split] = dataset, store.manifest.content

    def _finds_its_own(self, split: str) -> bool:
        """Whether the store of a split is there as this data module has last left it."""
        try:
            return self._is_its_own(split, open_store(self._directory() / split))
        except MemmapError:
            return False

    def _is_its_own(self, split: str, store: Store) -> bool:
        dataset, content = self._built.get(split, (None, ""))
        return dataset is self.datasets[split] and content == store.manifest.content

    def setup(self, stage: str | None = None) -> None:
        """Open the stores, plan the placement, and make the shards resident.

        The placement is printed where it is not what was printed last.

        All ranks call it, and compare what must be the same on all of them.

        Raises:
            StoreNotFoundError: A dataset is given, and its store was not built.
            DatasetError: A store was built from another dataset than the one given.
            PlacementError: The shards do not fit.
            RankMismatchError: Another rank failed, or has other stores, another seed, batch size,
                shuffle, shuffle_window, drop_last or number of data devices.
        """
        leave_gloo_at_exit()
        error = None
        try:
            self._set_up(stage)
        except Exception as caught:
            error = caught
        if self.trainer is not None and self.trainer.world_size > 1:
            check_ranks_match({} if error is not None else self._facts(), error)
        elif error is not None:
            raise error

    def _set_up(self, stage: str | None) -> None:
        # Not by teardown(), which a subclass may have made its own.
        self._release()
        self.stores = {}
        for split in _SPLITS_OF_STAGE[stage] if stage is not None else self._splits():
            if (store := self._open(split)) is not None:
                self.stores[split] = store
        topology, host = self._topology(), torch.device("cpu")
        self.placement = plan_placement(
            {split: self._sized(split, store) for split, store in self.stores.items()},
            topology,
            self.residency,
            budget_bytes=device_budgets(topology.data_devices, self.memory_fraction),
            pinned_budget_bytes=int(free_bytes(host) * _PINNED_FRACTION),
            window=self.shuffle_window,
            window_budget_bytes=int(free_bytes(host) * self.memory_fraction),
        )
        self._print_placement(self.placement)
        self._warn_of_random_reads(self.placement, free_bytes(host))
        self._resident = {
            split: load_split(store, topology, self.placement.splits[split], self._subset(split))
            for split, store in self.stores.items()
        }

    def _facts(self) -> dict[str, object]:
        """What decides which rows a step has."""
        facts: dict[str, object] = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "data devices per process": len(self._topology().data_devices),
        }
        if self.placement is not None and (train := self.placement.splits.get("train")):
            facts["shuffle_window"] = self.train_stream(train, train.num_shards).shuffle_window
        for split, store in self.stores.items():
            facts[f"the {split} store"] = store.manifest.content
            facts[f"rows of the {split} store"] = self._subset(split) or "all"
        return facts

    def train_stream(self, store: Sized, num_shards: int) -> Stream:
        """The order of the training rows, but for ``overfit_batches``.

        Args:
            store: Their store, or the part of it that is trained on.
            num_shards: Shards that they are dealt to.
        """
        window = self.shuffle_window if self.shuffle else None
        if self.shuffle and window is None and self.residency == Residency.STREAM.value:
            window = default_window(num_shards, store.row_bytes)
        return Stream(store.num_rows, num_shards, self.seed, self.shuffle, window)

    def teardown(self, stage: str | None = None) -> None:
        """Let go of the resident shards."""
        self._release()

    def _release(self) -> None:
        for split in self._resident.values():
            split.release()
        self._resident = {}

    def train_dataloader(self) -> SuperBatchLoader | DeviceLoader:
        """The training rows in the order of `lightning_memmap.sampling`.

        Without a Trainer, this and the other loaders are `lightning_memmap.loading.BatchLoader`.
        """
        # Lightning turns shuffling off for overfit_batches, but only in torch's own DataLoader.
        overfitting = getattr(self.trainer, "overfit_batches", 0) > 0
        shuffle = self.shuffle and not overfitting
        loader = self._loader(
            "train",
            self.transform,
            shuffle=shuffle,
            drop_last=self.drop_last,
            shuffle_window=self.shuffle_window if shuffle else None,
            progress=None if self.trainer is None else TrainerProgress(self.trainer),
        )
        self._train_loader = loader
        if self._train_state is not None and self.trainer is not None:
            # Before the Trainer asks for the length: with another number of data devices than
            # before, the epoch that is resumed has another number of steps than the next ones.
            loader.set_epoch(self.trainer.current_epoch)
            loader.load_state_dict(self._train_state)
            if len(loader) != loader.num_steps:
                renew_train_loader_after_epoch(
                    self.trainer, self.trainer.current_epoch, loader.num_steps
                )
            if (
                self._num_trained is not None
                and self._train_state["epoch"] == self.trainer.current_epoch
            ):
                go_on_after(self.trainer, self._num_trained)
            self._train_state = self._num_trained = None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Where the training stream stands, the same on every rank."""
        if self._train_loader is None:
            return {}
        state: dict[str, Any] = {"train": self._train_loader.state_dict()}
        if (subset := self._subset("train")) is not None:
            state["rows"] = asdict(subset)
        if (num_trained := self._train_loader.num_trained) is not None:
            state["num_trained"] = num_trained
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next fit go on where the training stream stood.

        Raises:
            ValueError: The checkpoint is of another fold or part: its weights have learned from
                rows that this one holds out. Or it is not what `state_dict` has returned.
        """
        _check_state(state_dict)
        if self.trainer is not None and self.trainer.state.fn is TrainerFn.FITTING:
            subset, saved = self._subset("train"), state_dict.get("rows")
            if saved != (None if subset is None else asdict(subset)):
                then = "all rows" if saved is None else str(RowSubset(**saved))
                raise ValueError(
                    f"the checkpoint was trained on {then}, and this data module trains on"
                    f" {subset or 'all rows'}: resume with the member, num_folds and num_parts of"
                    " the checkpoint"
                )
            self._train_state = state_dict.get("train")
            self._num_trained = state_dict.get("num_trained")

    def val_dataloader(self) -> SuperBatchLoader | DeviceLoader | list[Any]:
        """The validation rows in dataset order; nothing where there are none."""
        if "val" not in self._resident and self._running is not TrainerFn.VALIDATING:
            return []
        if self.trainer is not None and self._running is TrainerFn.FITTING:
            validate_anew(self.trainer)
        return self._loader("val", self.eval_transform)

    def test_dataloader(self) -> SuperBatchLoader | DeviceLoader:
        """The test rows in dataset order."""
        return self._loader("test", self.eval_transform)

    def predict_dataloader(self) -> SuperBatchLoader | DeviceLoader:
        """The rows to predict on in dataset order, in which the predictions come back."""
        return self._loader("predict", self.eval_transform)

    def _print_placement(self, placement: Placement) -> None:
        found = {split: (placement.topology, plan) for split, plan in placement.splits.items()}
        # A stage whose splits lie where the last one that had them left them says nothing new.
        if found.items() - self._printed.items():
            _print_table(placement)
        self._printed |= found

    def _warn_of_random_reads(self, placement: Placement, free: int) -> None:
        """Say once that the mapped shards do not fit into memory."""
        mapped = sum(split.mapped_bytes for split in placement.splits.values())
        if mapped > free and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"residency={self.residency!r}: {format_bytes(mapped)} of shards are read from the"
                f" file mapping, and {format_bytes(free)} of memory are available: rows will come"
                " from the disk one by one, and slowly. residency='stream' reads them in long"
                " pieces, shuffled within a window (shuffle_window)",
                stacklevel=2,
            )

    @property
    def _running(self) -> TrainerFn | None:
        """What the Trainer runs; None without one, and before and after its runs."""
        if self.trainer is None or self.trainer.state.status is not TrainerStatus.RUNNING:
            return None
        return self.trainer.state.fn

    def _splits(self) -> tuple[str, ...]:
        """The splits of what the Trainer runs; all of them where it runs nothing."""
        return _SPLITS if self._running is None else _SPLITS_OF_STAGE[self._running.value]

    def _stored_split(self, split: str) -> str:
        """The split whose store has the rows of a split."""
        return "train" if split == "val" and self.num_folds is not None else split

    def _subset(self, split: str) -> RowSubset | None:
        """The rows of its store that a split is; None where it is all of them."""
        if self.num_folds is not None and split in ("train", "val"):
            return self._row_subset("num_folds", self.num_folds, split == "train")
        if self.num_parts is not None and split == "train":
            return self._row_subset("num_parts", self.num_parts)
        return None

    def _sized(self, split: str, store: Store) -> Sized:
        subset, manifest = self._subset(split), store.manifest
        if subset is None:
            return manifest
        return _Part(subset.num_rows(manifest.num_rows), manifest.num_shards, manifest.row_bytes)

    @property
    def _strategy(self) -> Any:
        return None if self.trainer is None else self.trainer.strategy

    def _row_subset(self, name: str, count: int, excluded: bool = False) -> RowSubset:
        given = f"{name}={count}"
        member = self._member(given)
        if self.member is not None:
            if member >= count:
                raise ValueError(f"member={member} with {given}: choose 0 to {count - 1}")
        elif (num_members := self._strategy.num_members) % count:
            raise ValueError(
                f"{given} with {num_members} members: some would be trained less often than"
                f" others; use {count} members or a multiple of it, with devices=... or"
                f" IndependentStrategy(num_members={count})"
            )
        return RowSubset(member % count, count, excluded)

    def _member(self, given: str) -> int:
        """The member that this process trains.

        Raises:
            ValueError: It is not known. The message says what was given that needs it.
        """
        if self.member is not None:
            return self.member
        member: int | None = getattr(self._strategy, "member", None)
        if member is None:
            raise ValueError(
                f"{given}: which member is it? Train with strategy='memmap_independent', or say"
                " which with member=..."
            )
        return member

    def _directory(self) -> Path:
        """Where the stores are."""
        text = str(self.store_dir)
        if "{member}" not in text:
            return self.store_dir
        return Path(text.replace("{member}", str(self._member(f"store_dir={text!r}"))))

    def _open(self, split: str) -> Store | None:
        split = self._stored_split(split)
        dataset, path = self.datasets[split], self._directory() / split
        try:
            store = open_store(path)
        except StoreNotFoundError:
            if dataset is None:
                # An error only where its loader is asked for: a Trainer keeps a data module, and
                # sets it up for stages that have other loaders.
                return None
            raise StoreNotFoundError(
                f"no store at {path}: call prepare_data() before setup(), which builds it from"
                f" {split}_dataset; a subclass that overrides it calls super().prepare_data()"
            ) from None
        if dataset is not None and not self._is_its_own(split, store):
            store.check_dataset(
                dataset,
                fingerprint=self.fingerprints.get(split),
                check=self.check,
                num_workers=self.num_workers,
            )
        return store

    def _topology(self) -> DataTopology:
        if self.trainer is None:
            return DataTopology((torch.device("cpu"),))
        strategy = self.trainer.strategy
        sharding = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        devices = getattr(strategy, "data_devices", None) or (strategy.root_device,)
        return DataTopology(tuple(devices), sharding["rank"], sharding["num_replicas"])

    def _loader(
        self,
        split: str,
        transform: Callable[..., Any] | None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        shuffle_window: int | None = None,
        progress: TrainerProgress | None = None,
    ) -> SuperBatchLoader | DeviceLoader:
        if split not in self._resident:
            raise self._missing(split)
        loader = SuperBatchLoader(
            self._resident[split],
            self.batch_size,
            build=self._builder(split),
            transform=transform,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.seed,
            shuffle_window=shuffle_window,
            progress=progress,
        )
        if self.trainer is None:
            return BatchLoader(loader, loader.data_devices[0])
        if not getattr(self.trainer, "overfit_batches", 0):
            loader.dataset = loader.batch_sizes
        if hasattr(self.trainer.strategy, "data_devices"):
            return loader
        # A strategy that knows nothing of super-batches is given plain batches.
        return loader.to(self.trainer.strategy.root_device)

    def _missing(self, split: str) -> StoreNotFoundError:
        stored = self._stored_split(split)
        path = self._directory() / stored
        if self.datasets[stored] is None and not is_store(path):
            return StoreNotFoundError(
                f"{stored}_dataset=None and no store at {path}: give the dataset, or a store_dir"
                f" that holds a store named {stored!r}"
            )
        return StoreNotFoundError(f"the {split} split is not set up: call setup() first")

    def _builder(self, split: str) -> Callable[[Sequence[Tensor]], Any]:
        schema, dataset = self.stores[split].schema, self.datasets[self._stored_split(split)]
        sample = None
        if dataset is not None and schema.has_classes:
            sample = first_sample(dataset, self.num_workers)
        return schema.builder(sample)


@dataclass(frozen=True)
class _Part:
    """What a plan needs to know of some rows of a store."""

    num_rows: int
    num_shards: int
    row_bytes: int


def _check_state(state: object) -> None:
    """Check what is loaded for a data module. Subclasses may have added to it.

    Raises:
        ValueError: It is not what a data module has saved.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state of the data module is a {type(state).__name__}: give load_state_dict the"
            " dict that state_dict has returned"
        )
    if (train := state.get("train")) is not None:
        LoaderState.read(train)
    rows, num_trained = state.get("rows"), state.get("num_trained")
    try:
        is_subset = rows is None or asdict(RowSubset(**rows)) == rows
    except (TypeError, ValueError):
        is_subset = False
    if not is_subset:
        raise ValueError(
            f"the state of the data module has rows={rows!r}, which names no fold and no part:"
            " resume from a checkpoint that this version has written"
        )
    if num_trained is not None and not (type(num_trained) is int and num_trained >= 0):
        raise ValueError(
            f"the state of the data module has num_trained={num_trained!r}, which is no number of"
            " batches: resume from a checkpoint that this version has written"
        )


@rank_zero_only
def _print_table(placement: Placement) -> None:
    Console().print(placement.table())
