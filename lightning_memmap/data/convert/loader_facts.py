"""Reads the facts that DataLoaders state, or raises an error for one without a counterpart."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning.pytorch.utilities import CombinedLoader
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

from lightning_memmap.data.splits import check_store_name, has_several
from lightning_memmap.errors import with_article
from lightning_memmap.sampling.selection import Subset
from lightning_memmap.sampling.weighted import Weighted

_COLLATE = "docs/guides/existing.md#a-custom-collate_fn"
_LOADERS = "docs/guides/existing.md"
_ORDER = "docs/data_order.md"
_STREAMS = "docs/datasets.md"


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
        """Return whether both loaders serve the same rows, in any order."""
        rows = None if self.subset is None else self.subset.rows
        other_rows = None if other.subset is None else other.subset.rows
        return self.dataset is other.dataset and rows == other_rows


@dataclass(frozen=True)
class LoaderTree:
    """The loaders that one method has returned: one, or several in a list or dict."""

    #: By name in a dict, by index in a list, and under "" if there is only one.
    loaders: Mapping[Any, Any] = field(default_factory=dict)
    form: Literal["one", "list", "dict"] = "one"
    #: The CombinedLoader that contained them, if any.
    combined: CombinedLoader | None = None
    #: The facts of each loader, by key.
    facts: Mapping[Any, LoaderFacts] = field(default_factory=dict)

    @classmethod
    def read(
        cls, method: str, returned: Any, is_training: bool, chosen: frozenset[str]
    ) -> "LoaderTree":
        """Take apart what a method has returned, and read the facts of each loader."""
        combined = returned if isinstance(returned, CombinedLoader) else None
        if combined is not None:
            returned = combined.iterables
        if isinstance(returned, Mapping):
            tree = cls(dict(returned), "dict", combined)
        elif isinstance(returned, (list, tuple)):
            tree = cls(dict(enumerate(returned)), "list", combined)
        else:
            tree = cls({} if returned is None else {"": returned}, "one", combined)
        facts = {
            key: read_loader(
                f"{method}[{key!r}]" if tree.has_several else method, loader, is_training, chosen
            )
            for key, loader in tree.loaders.items()
        }
        tree = replace(tree, facts=facts)
        for key in facts if tree.has_several else ():
            check_store_name(method, key)
        if facts and tree.has_several and not has_several(tree.datasets):
            raise TypeError(
                f"{method}: the datasets of several loaders look like rows of one: make each a"
                " torch.utils.data.Dataset; see docs/guides/existing.md"
            )
        return tree

    @property
    def has_several(self) -> bool:
        """Whether the loaders are in a list or dict."""
        return self.form != "one"

    @property
    def datasets(self) -> Any:
        """The dataset of each loader, in a list or dict like the loaders; None without loaders."""
        return self._nested({key: facts.dataset for key, facts in self.facts.items()})

    def combine(self, by_key: Mapping[Any, Any]) -> Any:
        """Return other loaders in the list, dict or CombinedLoader of these."""
        if self.combined is None:
            return self._nested(by_key)
        key_of = {id(loader): key for key, loader in self.loaders.items()}
        combined = copy(self.combined)
        combined.flattened = [by_key[key_of[id(loader)]] for loader in self.combined.flattened]
        return combined

    def _nested(self, by_key: Mapping[Any, Any]) -> Any:
        if self.form == "one":
            return by_key.get("")
        return [*by_key.values()] if self.form == "list" else dict(by_key)


def read_loader(
    name: str, loader: Any, is_training: bool, chosen: frozenset[str] = frozenset()
) -> LoaderFacts:
    """Read the facts of a loader.

    Args:
        name: The loader's name in errors.
        loader: The loader.
        is_training: Whether it is for training, so that its order and ``drop_last`` count.
        chosen: Names of options that are not read.

    Raises:
        TypeError: The loader is not a `DataLoader`.
        ValueError: A fact has no counterpart here.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{name}: is {with_article(type(loader).__name__)}, but a dataset can only be read from"
            f" a torch.utils.data.DataLoader: return one; see {_LOADERS}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{name}: {type(loader).__name__} overrides __iter__, so its batches may differ from"
            f" the rows of its dataset: return a torch.utils.data.DataLoader; see {_LOADERS}"
        )
    batches: Any = loader.batch_sampler
    if batches is None:
        raise ValueError(
            f"{name}: batch_size=None: the dataset returns whole batches, and a data module stores"
            f" rows: pass a dataset of rows, and a batch_size; see {_LOADERS}"
        )
    if loader.collate_fn is not default_collate:
        raise ValueError(
            f"{name}: collate_fn={_name_of(loader.collate_fn)}: rows are collated field by field,"
            " like default_collate does: remove it from the DataLoader, and use layout= or"
            f" transform= instead; see {_COLLATE}"
        )
    if not _iterates_as(batches, BatchSampler):
        raise ValueError(
            f"{name}: batch_sampler={type(batches).__name__}: sampler=, such as Bucketed(...),"
            " decides which rows share a batch: remove it from the DataLoader, and use sampler="
            f" instead; see {_ORDER}"
        )
    facts = LoaderFacts(loader.dataset, batches.batch_size, loader.num_workers)
    if not isinstance(loader.dataset, IterableDataset):
        facts = _with_order(name, facts, batches, is_training, chosen)
    else:
        # One process reads a stream.
        facts = replace(facts, num_workers=0)
        if loader.worker_init_fn is not None:
            raise ValueError(
                f"{name}: worker_init_fn={_name_of(loader.worker_init_fn)} of an IterableDataset:"
                " it may decide which rows a worker reads, and one process stores all rows: remove"
                f" it from the DataLoader, and let the dataset yield each row once; see {_STREAMS}"
            )
    if is_training:
        return replace(facts, drop_last=batches.drop_last)
    rows = facts.dataset if facts.subset is None else facts.subset.rows
    if batches.drop_last and (not hasattr(rows, "__len__") or len(rows) % facts.batch_size):
        raise ValueError(
            f"{name}: drop_last=True: evaluation drops no row: remove it from the DataLoader"
        )
    return facts


def _with_order(
    name: str, facts: LoaderFacts, batches: Any, is_training: bool, chosen: frozenset[str]
) -> LoaderFacts:
    """Add to the facts which rows the sampler of a loader draws, and in which order."""
    if is_training and "sampler" in chosen:
        return replace(facts, shuffle=True)
    sampler = batches.sampler
    num_rows = len(facts.dataset)
    kind = type(sampler).__name__
    is_shuffled = False
    if _iterates_as(sampler, SubsetRandomSampler):
        rows = [int(row) for row in sampler.indices]
        if len(set(rows)) != len(rows) or not all(0 <= row < num_rows for row in rows):
            raise ValueError(
                f"{name}: {kind} of {len(rows)} indices: the indices must be different rows, 0 to"
                f" {num_rows - 1}; see {_ORDER}"
            )
        return replace(facts, subset=Subset(rows), shuffle=is_training)
    if is_training and _iterates_as(sampler, WeightedRandomSampler):
        if not sampler.replacement or len(sampler.weights) != num_rows:
            raise ValueError(
                f"{name}: {kind}(replacement={sampler.replacement}) with {len(sampler.weights)}"
                f" weights for {num_rows} rows: Weighted needs a weight for each row, and draws"
                f" rows with replacement: use replacement=True and {num_rows} weights, or sampler="
                f" instead; see {_ORDER}"
            )
        num_samples = None if sampler.num_samples == num_rows else sampler.num_samples
        return replace(facts, sampler=Weighted(sampler.weights, num_samples), shuffle=True)
    if _iterates_as(sampler, RandomSampler) and len(sampler.data_source) == num_rows:
        if sampler.replacement or sampler.num_samples != num_rows:
            raise ValueError(
                f"{name}: {kind}(replacement={sampler.replacement},"
                f" num_samples={sampler.num_samples}) of {num_rows} rows: an epoch has each row"
                " once: shuffle without replacement and num_samples; or use sampler=Weighted(...)"
                f" or subset=Subset(...); see {_ORDER}"
            )
        is_shuffled = True
    elif _iterates_as(sampler, DistributedSampler) and len(sampler.dataset) == num_rows:
        if sampler.drop_last and num_rows % sampler.num_replicas and not batches.drop_last:
            raise ValueError(
                f"{name}: {kind}(drop_last=True): rows that processes cannot share evenly are not"
                f" dropped here: remove it, or use DataLoader(drop_last=True); see {_LOADERS}"
            )
        is_shuffled = sampler.shuffle
    elif not (_iterates_as(sampler, SequentialSampler) and len(sampler.data_source) == num_rows):
        remedy = (
            f"there is nothing like it here: use sampler= or subset= of the data module; see"
            f" {_ORDER}"
            if is_training
            else "evaluation reads rows in dataset order: use a SequentialSampler, or the rows of a"
            f" SubsetRandomSampler; see {_LOADERS}"
        )
        raise ValueError(f"{name}: sampler={kind}: {remedy}")
    if is_shuffled and not is_training:
        raise ValueError(
            f"{name}: sampler={kind}, which shuffles: evaluation reads rows in dataset order: use"
            f" shuffle=False; see {_LOADERS}"
        )
    return replace(facts, shuffle=is_shuffled)


def _iterates_as(value: Any, kind: type) -> bool:
    """Return whether a value is an instance of a class, and no subclass overrides ``__iter__``."""
    return isinstance(value, kind) and type(value).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
