"""Reads the options of a data module from the loaders of an existing one.

Each fact that a ``DataLoader`` states becomes an option, or an error that names it: nothing is left
out silently. An argument that differs from its default was chosen, and is not read.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from typing_extensions import override

from lightning_memmap._compat.loops import copy_hyperparameters
from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.splits import check_store_name, has_several
from lightning_memmap.errors import with_article
from lightning_memmap.sampling.selection import Subset
from lightning_memmap.sampling.weighted import Weighted

#: What changes batches on their way to a step, which Lightning looks up in the data module.
TRANSFER_HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
#: What the Trainer reads from the attributes of a data module.
_ATTRIBUTES = ("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices")
#: What is set up where no Trainer says which stage runs.
_STAGES = {"fit": "train", "test": "test", "predict": "predict"}
_COLLATE = "docs/guides/collate.md"
_LOADERS = "docs/guides/existing.md"
_ORDER = "docs/data_order.md"
_STREAMS = "docs/datasets.md"

#: Makes an error about one loader.
_Fail: TypeAlias = Callable[[str, str], Exception]


@dataclass(frozen=True)
class LoaderFacts:
    """The facts that one loader states."""

    dataset: Any
    batch_size: int
    num_workers: int
    shuffle: bool = False
    drop_last: bool = False
    sampler: Weighted | None = None
    subset: Subset | None = None

    def has_rows_of(self, other: "LoaderFacts") -> bool:
        """Whether the rows are those of another loader, in whichever order."""
        own, theirs = (None if each.subset is None else each.subset.rows for each in (self, other))
        return self.dataset is other.dataset and own == theirs


@dataclass(frozen=True)
class LoaderTree:
    """The loaders that one method has returned: one of them, or several in a list or by name."""

    method: str
    #: By name; by number in a list, and under "" where there is only one.
    loaders: Mapping[Any, Any]
    form: Literal["one", "list", "dict"]
    #: What combines the loaders, if it is no plain list or dict.
    combined: CombinedLoader | None = None

    @classmethod
    def of(cls, method: str, given: Any) -> "LoaderTree":
        """Take apart what a method has returned."""
        combined = given if isinstance(given, CombinedLoader) else None
        if combined is not None:
            given = combined.iterables
        if isinstance(given, Mapping):
            return cls(method, dict(given), "dict", combined)
        if isinstance(given, (list, tuple)):
            return cls(method, dict(enumerate(given)), "list", combined)
        return cls(method, {} if given is None else {"": given}, "one", combined)

    @property
    def has_several(self) -> bool:
        """Whether the loaders are in a list or by name."""
        return self.form != "one"

    def name(self, key: Any) -> str:
        """Return what an error calls one of the loaders."""
        return f"{self.method}[{key!r}]" if self.has_several else self.method

    def rebuild(self, by_key: Mapping[Any, Any]) -> Any:
        """Return other values in the form of the loaders."""
        if self.form == "one":
            return by_key[""]
        return [*by_key.values()] if self.form == "list" else dict(by_key)

    def combine(self, by_key: Mapping[Any, Any]) -> Any:
        """Return other loaders in the form of the loaders, combined as they are."""
        if self.combined is None:
            return self.rebuild(by_key)
        key_of = {id(loader): key for key, loader in self.loaders.items()}
        combined = copy(self.combined)
        combined.flattened = [by_key[key_of[id(each)]] for each in self.combined.flattened]
        return combined


class GivenLoaders(L.LightningDataModule):
    """A data module of loaders that exist already."""

    def __init__(self, **by_split: Any) -> None:
        super().__init__()
        self._by_split = by_split

    @override
    def train_dataloader(self) -> Any:
        return self._by_split["train"]

    @override
    def val_dataloader(self) -> Any:
        return self._by_split["val"]

    @override
    def test_dataloader(self) -> Any:
        return self._by_split["test"]

    @override
    def predict_dataloader(self) -> Any:
        return self._by_split["predict"]


class LoaderSource:
    """Another data module, and the options that its loaders stand for.

    Args:
        datamodule: The data module. Its hooks are called when Lightning calls ours.
        chosen: The names of options that are not read.
    """

    def __init__(self, datamodule: L.LightningDataModule, chosen: Iterable[str]) -> None:
        self.datamodule = datamodule
        self._chosen = frozenset(chosen)
        #: By split: the loaders in their form, and their facts.
        self._trees: dict[str, LoaderTree] = {}
        self._facts: dict[str, dict[Any, LoaderFacts]] = {}
        #: The stages that were set up in advance, by the process that builds the stores.
        self._is_ready: set[str] = set()
        #: The options as they were read last.
        self._found: dict[str, Any] = {}

    def choosing(self, names: Iterable[str]) -> "LoaderSource":
        """Return a source of the same data module which leaves more options as they are."""
        return LoaderSource(self.datamodule, self._chosen.union(names))

    def choose(self, name: str) -> None:
        """Leave an option as it was set, unless it was set to replace one that was read."""
        if name not in self._found:
            self._chosen |= {name}

    def adopt_hooks(self, owner: L.LightningDataModule) -> None:
        """Give a data module the hooks and attributes that Lightning looks up in it."""
        theirs = vars(self.datamodule)
        vars(owner).update({name: theirs[name] for name in _ATTRIBUTES if name in theirs})
        copy_hyperparameters(self.datamodule, owner)
        for name in filter(self._is_overridden, TRANSFER_HOOKS):
            if getattr(type(owner), name) is not getattr(L.LightningDataModule, name):
                raise TypeError(
                    f"{name}: both {type(owner).__name__} and {type(self.datamodule).__name__} have"
                    " it, and Lightning calls one: remove it from one of them"
                )
            vars(owner)[name] = getattr(self.datamodule, name)

    @property
    def is_read(self) -> bool:
        """Whether any loaders were read."""
        return bool(self._trees)

    def has(self, kind: str) -> bool:
        """Whether a split has rows in the stores of the data module that reads these loaders."""
        is_apart = kind == "train" and self.training_sets is not None
        return f"{kind}_dataset" in self._chosen or (bool(self._facts.get(kind)) and not is_apart)

    @property
    def training_sets(self) -> LoaderTree | None:
        """Several training loaders; None where there is one."""
        tree = self._trees.get("train")
        return tree if tree is not None and tree.has_several else None

    def options_of_sets(self) -> dict[Any, dict[str, Any]]:
        """Return the options of a data module for each of several training sets."""
        if self.training_sets is None:
            return {}
        found = dict[Any, dict[str, Any]]()
        for key, facts in self._facts["train"].items():
            options = {"train_dataset": facts.dataset, "num_workers": facts.num_workers}
            options |= training_options(facts)
            options["subset"] = None if facts.subset is None else {"train": facts.subset}
            found[key] = {name: options[name] for name in options.keys() - self._chosen}
        return found

    def combine(self, kind: str, loaders: Any) -> Any:
        """Return loaders to evaluate on, combined as the loaders of the source are."""
        tree = self._trees.get(kind)
        if tree is None or tree.combined is None:
            return loaders
        several = [*loaders.values()] if isinstance(loaders, dict) else loaders
        by_key = zip(tree.loaders, several if tree.has_several else [loaders], strict=True)
        return tree.combine(dict(by_key))

    def prepare_data(self, trainer: L.Trainer | None) -> None:
        """Have the data module prepare its data. One process per node calls it."""
        self.datamodule.trainer = trainer
        self.datamodule.prepare_data()

    def read(
        self,
        options: DataOptions,
        kinds_of_stage: Mapping[str, tuple[str, ...]],
        stage: str | None,
        trainer: L.Trainer | None,
        *,
        in_advance: bool = False,
    ) -> DataOptions:
        """Set up the data module for a stage, and read its loaders.

        Args:
            options: The options so far.
            kinds_of_stage: The splits of each stage.
            stage: The stage; None for all.
            trainer: The Trainer, if there is one.
            in_advance: Whether the set-up of this stage will follow in this process, and read
                nothing then.

        Returns:
            The options with those that were read.

        Raises:
            TypeError: A method returned something that is not a `DataLoader`.
            ValueError: A loader cannot be carried over, or there is none for this stage.
        """
        self.datamodule.trainer = trainer
        for each in self._stages(stage):
            if each in self._is_ready:
                self._is_ready.discard(each)
                continue
            self.datamodule.setup(each)
            for kind in kinds_of_stage[each]:
                self._read_split(kind)
            if stage is not None:
                self._check_stage(stage, kinds_of_stage[stage][0])
            if in_advance:
                self._is_ready.add(each)
        return self._apply(options)

    def read_again(self, options: DataOptions, kind: str) -> DataOptions:
        """Read the loaders of a split again, for ``reload_dataloaders_every_n_epochs``.

        Raises:
            ValueError: Their rows are not those that are set up.
        """
        before = self._facts.get(kind, {})
        self._read_split(kind)
        after = self._facts.get(kind, {})
        if before.keys() != after.keys() or not all(
            before[key].has_rows_of(after[key]) for key in after
        ):
            raise ValueError(
                f"reload_dataloaders_every_n_epochs: {kind}_dataloader returned loaders of other"
                " rows than those that are set up: create datasets and subsets in setup(); batch"
                " sizes, drop_last and samplers of all rows may change"
            )
        return self._apply(options)

    def _apply(self, options: DataOptions) -> DataOptions:
        """Return options with those that were read and differ from what was read before."""
        found = self._options()
        changed = {
            name: value
            for name, value in found.items()
            if name not in self._chosen and not _is_same(value, self._found.get(name, self))
        }
        self._found = found
        return replace(options, **changed)

    def _stages(self, stage: str | None) -> list[str]:
        if stage is not None:
            return [stage]
        return [
            each
            for each, kind in _STAGES.items()
            if f"{kind}_dataset" not in self._chosen and self._is_overridden(f"{kind}_dataloader")
        ] or ["fit"]

    def _is_overridden(self, method: str) -> bool:
        return is_overridden(method, self.datamodule, L.LightningDataModule)

    def _read_split(self, kind: str) -> None:
        if f"{kind}_dataset" in self._chosen:
            return
        method = f"{kind}_dataloader"
        given = getattr(self.datamodule, method)() if self._is_overridden(method) else None
        tree = LoaderTree.of(method, given)
        facts = {
            key: read_loader(tree.name(key), loader, kind == "train", self._chosen)
            for key, loader in tree.loaders.items()
        }
        for key in facts if tree.has_several else ():
            check_store_name(method, key)
        datasets = {key: each.dataset for key, each in facts.items()}
        if facts and tree.has_several and not has_several(tree.rebuild(datasets)):
            raise TypeError(
                f"{method}: the datasets of several loaders cannot be told from rows: make each a"
                f" torch.utils.data.Dataset; see {_LOADERS}"
            )
        self._trees[kind] = tree
        self._facts[kind] = facts

    def _check_stage(self, stage: str, kind: str) -> None:
        if f"{kind}_dataset" not in self._chosen and not self._facts.get(kind):
            name = getattr(stage, "value", stage)
            raise ValueError(
                f"stage={name!r}: {type(self.datamodule).__name__} has no {kind}_dataloader, or it"
                " returned no loader: define it, or run another stage"
            )

    def _options(self) -> dict[str, Any]:
        """Return the options that all loaders read so far stand for."""
        found: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        subsets: dict[str, Subset] = {}
        for kind, tree in self._trees.items():
            facts = self._facts[kind]
            is_apart = kind == "train" and tree.has_several
            datasets = {key: each.dataset for key, each in facts.items()}
            found[f"{kind}_dataset"] = tree.rebuild(datasets) if facts and not is_apart else None
            if kind == "train" and not is_apart and facts:
                found |= training_options(facts[""])
            for key, each in facts.items():
                split = f"{kind}/{key}" if tree.has_several else kind
                if kind != "train":
                    sizes[split] = each.batch_size
                if each.subset is not None and not is_apart:
                    subsets[split] = each.subset
        found["eval_batch_size"] = sizes or None
        found["subset"] = subsets or None
        every = [each for facts in self._facts.values() for each in facts.values()]
        # The number is for all splits, and a stream has none.
        has_stream = any(isinstance(each.dataset, IterableDataset) for each in every)
        workers = [0] if has_stream else [each.num_workers for each in every]
        found["num_workers"] = max(workers, default=0)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle has: what was read stays with the loaders of this process."""
        datamodule = copy(self.datamodule)
        datamodule.trainer = None
        emptied: dict[str, Any] = {"_trees": {}, "_facts": {}, "_is_ready": set(), "_found": {}}
        return {**vars(self), "datamodule": datamodule, **emptied}


def training_options(facts: LoaderFacts) -> dict[str, Any]:
    """Return the options that the facts of a training loader stand for, except its rows."""
    names = "batch_size", "shuffle", "drop_last", "sampler"
    return {name: getattr(facts, name) for name in names}


def chosen_options(options: DataOptions, defaults: Mapping[str, Any]) -> list[str]:
    """Return the names of options that differ from their defaults."""
    return [
        name
        for name, default in defaults.items()
        if (value := getattr(options, name)) is not default and not _is_same(value, default)
    ]


def check_source(datamodule: Any, kind: type) -> None:
    """Check that loaders can be read from something."""
    if not isinstance(datamodule, L.LightningDataModule):
        raise TypeError(
            f"datamodule={datamodule!r}: it is {with_article(type(datamodule).__name__)}: pass a"
            " LightningDataModule; loaders are passed to from_loaders"
        )
    if isinstance(datamodule, kind):
        raise TypeError(
            f"datamodule={type(datamodule).__name__}: it is a MemmapDataModule already: pass it to"
            " the Trainer as it is"
        )


def _is_same(one: Any, other: Any) -> bool:
    is_plain = all(isinstance(each, (int, float, str, dict)) for each in (one, other))
    return one is other or (is_plain and type(one) is type(other) and _is_equal(one, other))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def read_loader(
    name: str, loader: Any, is_training: bool, chosen: frozenset[str] = frozenset()
) -> LoaderFacts:
    """Read the facts of a loader, or raise an error that names the one that has no counterpart.

    Args:
        name: What errors call the loader.
        loader: The loader.
        is_training: Whether it is for training: its order and its last batch count.
        chosen: Names of options that are not read.

    Raises:
        TypeError: The loader is not a `DataLoader`.
        ValueError: It cannot be carried over exactly.
    """

    def fail(what: str, remedy: str) -> Exception:
        return ValueError(f"{name}: {what}: {remedy}")

    _check_class(name, loader)
    if loader.collate_fn is not default_collate and loader.batch_sampler is not None:
        raise fail(
            f"collate_fn={_called(loader.collate_fn)}",
            "rows are collated field by field, as default_collate would: remove it from the"
            f" DataLoader, and pass variable= or transform= instead; see {_COLLATE}",
        )
    batches, dataset = loader.batch_sampler, loader.dataset
    if batches is None:
        raise fail(
            "batch_size=None",
            "the dataset gives whole batches, and a data module stores rows: pass a dataset of"
            f" rows, and a batch_size; see {_LOADERS}",
        )
    if not _runs(batches, BatchSampler):
        raise fail(
            f"batch_sampler={type(batches).__name__}",
            "which rows are together in a batch is decided by sampler=, such as Bucketed(...):"
            f" remove it from the DataLoader, and pass sampler= instead; see {_ORDER}",
        )
    is_stream = isinstance(dataset, IterableDataset)
    num_workers = 0 if is_stream else loader.num_workers  # One process reads a stream.
    facts = LoaderFacts(dataset, batches.batch_size, num_workers, drop_last=batches.drop_last)
    if is_stream:
        if loader.worker_init_fn is not None:
            raise fail(
                f"worker_init_fn={_called(loader.worker_init_fn)} of an IterableDataset",
                "it may decide which rows a worker reads, and one process stores them all: remove"
                f" it from the DataLoader, and let the dataset yield each row once; see {_STREAMS}",
            )
        return facts if is_training else _evaluated(facts, fail)
    drawn = _read_sampler(batches.sampler, dataset, facts, is_training, chosen, fail)
    facts = replace(facts, **drawn)
    return facts if is_training else _evaluated(facts, fail)


def _check_class(name: str, loader: Any) -> None:
    """Check that a loader gives the batches of torch's own class."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{name}: it is {with_article(type(loader).__name__)}, and a dataset is read from a"
            f" torch.utils.data.DataLoader: return one; see {_LOADERS}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{name}: {type(loader).__name__} has an __iter__ of its own, so that its batches may"
            " differ from the rows of its dataset: return a torch.utils.data.DataLoader; see"
            f" {_LOADERS}"
        )


def _evaluated(facts: LoaderFacts, fail: _Fail) -> LoaderFacts:
    """Check that a loader evaluates each of its rows."""
    rows = facts.dataset if facts.subset is None else facts.subset.rows
    if facts.drop_last and (not hasattr(rows, "__len__") or len(rows) % facts.batch_size):
        raise fail("drop_last=True", "evaluation drops no row: remove it from the DataLoader")
    return replace(facts, drop_last=False)


def _read_sampler(
    sampler: Any,
    dataset: Any,
    facts: LoaderFacts,
    is_training: bool,
    chosen: frozenset[str],
    fail: _Fail,
) -> dict[str, Any]:
    """Read which rows a sampler draws, and in which order."""
    if is_training and "sampler" in chosen:
        return {"shuffle": True}
    num_rows, kind = len(dataset), type(sampler).__name__
    if _runs(sampler, SequentialSampler) and len(sampler.data_source) == num_rows:
        return {}
    if _runs(sampler, RandomSampler) and len(sampler.data_source) == num_rows:
        if sampler.replacement or sampler.num_samples != num_rows:
            raise fail(
                f"{kind}(replacement={sampler.replacement}, num_samples={sampler.num_samples}) of"
                f" {num_rows} rows",
                "an epoch has each row once: shuffle without replacement and num_samples; or pass"
                f" sampler=Weighted(...) or subset=Subset(...); see {_ORDER}",
            )
        return _shuffled(kind, is_training, fail)
    if _runs(sampler, SubsetRandomSampler):
        rows = [int(row) for row in sampler.indices]
        if len(set(rows)) != len(rows) or not all(0 <= row < num_rows for row in rows):
            raise fail(
                f"{kind} of {len(rows)} indices",
                f"each must be a row of the {num_rows}, and be there once; see {_ORDER}",
            )
        return {"subset": Subset(rows), "shuffle": is_training}
    if is_training and _runs(sampler, WeightedRandomSampler):
        if not sampler.replacement or len(sampler.weights) != num_rows:
            raise fail(
                f"{kind}(replacement={sampler.replacement}) with {len(sampler.weights)} weights for"
                f" {num_rows} rows",
                "Weighted has a weight for each row, and draws rows again in an epoch: use"
                f" replacement=True and as many weights, or pass sampler= instead; see {_ORDER}",
            )
        count = None if sampler.num_samples == num_rows else sampler.num_samples
        return {"sampler": Weighted(sampler.weights, count), "shuffle": True}
    if _runs(sampler, DistributedSampler) and len(sampler.dataset) == num_rows:
        if sampler.drop_last and num_rows % sampler.num_replicas and not facts.drop_last:
            raise fail(
                f"{kind}(drop_last=True)",
                "rows are divided among processes without a rest: remove it, or use"
                f" DataLoader(drop_last=True); see {_LOADERS}",
            )
        return _shuffled(kind, is_training, fail) if sampler.shuffle else {}
    raise fail(
        f"sampler={kind}",
        "it has no counterpart here: pass sampler= or subset= of the data module instead; see"
        f" {_ORDER}"
        if is_training
        else "evaluation reads rows in dataset order: use a SequentialSampler, or the rows of a"
        f" SubsetRandomSampler; see {_LOADERS}",
    )


def _shuffled(kind: str, is_training: bool, fail: _Fail) -> dict[str, Any]:
    if not is_training:
        raise fail(
            f"sampler={kind}, which shuffles",
            f"evaluation reads rows in dataset order: use shuffle=False; see {_LOADERS}",
        )
    return {"shuffle": True}


def _runs(value: Any, kind: type) -> bool:
    """Whether something iterates as a class does, and no subclass has changed that."""
    return isinstance(value, kind) and type(value).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
