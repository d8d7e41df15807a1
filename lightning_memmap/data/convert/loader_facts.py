"""Reads the facts that a DataLoader states, or raises an error for one without a counterpart."""

from dataclasses import dataclass, replace
from typing import Any

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
    _check_class(name, loader)
    if loader.collate_fn is not default_collate and loader.batch_sampler is not None:
        raise _no_counterpart(
            name,
            f"collate_fn={_name_of(loader.collate_fn)}",
            "rows are collated field by field, like default_collate does: remove it from the"
            f" DataLoader, and use layout= or transform= instead; see {_COLLATE}",
        )
    batches = loader.batch_sampler
    if batches is None:
        raise _no_counterpart(
            name,
            "batch_size=None",
            "the dataset returns whole batches, and a data module stores rows: pass a dataset of"
            f" rows, and a batch_size; see {_LOADERS}",
        )
    if not _iterates_as(batches, BatchSampler):
        raise _no_counterpart(
            name,
            f"batch_sampler={type(batches).__name__}",
            "sampler=, such as Bucketed(...), decides which rows share a batch: remove it from the"
            f" DataLoader, and use sampler= instead; see {_ORDER}",
        )
    is_stream = isinstance(loader.dataset, IterableDataset)
    facts = LoaderFacts(
        loader.dataset,
        batches.batch_size,
        num_workers=0 if is_stream else loader.num_workers,  # One process reads a stream.
        drop_last=batches.drop_last,
    )
    if is_stream:
        if loader.worker_init_fn is not None:
            raise _no_counterpart(
                name,
                f"worker_init_fn={_name_of(loader.worker_init_fn)} of an IterableDataset",
                "it may decide which rows a worker reads, and one process stores all rows: remove"
                f" it from the DataLoader, and let the dataset yield each row once; see {_STREAMS}",
            )
    else:
        facts = _with_rows(name, facts, batches.sampler, is_training, chosen)
    return facts if is_training else _checked_evaluation(name, facts)


def _no_counterpart(name: str, fact: str, remedy: str) -> ValueError:
    return ValueError(f"{name}: {fact}: {remedy}")


def _check_class(name: str, loader: Any) -> None:
    """Check that a loader yields the batches of torch's own class."""
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


def _checked_evaluation(name: str, facts: LoaderFacts) -> LoaderFacts:
    """Check that a loader evaluates each of its rows, and return its facts."""
    rows = facts.dataset if facts.subset is None else facts.subset.rows
    if facts.drop_last and (not hasattr(rows, "__len__") or len(rows) % facts.batch_size):
        raise _no_counterpart(
            name, "drop_last=True", "evaluation drops no row: remove it from the DataLoader"
        )
    return replace(facts, drop_last=False)


def _with_rows(
    name: str, facts: LoaderFacts, sampler: Any, is_training: bool, chosen: frozenset[str]
) -> LoaderFacts:
    """Add to the facts which rows a sampler draws, and in which order."""
    if is_training and "sampler" in chosen:
        return replace(facts, shuffle=True)
    num_rows = len(facts.dataset)
    kind = type(sampler).__name__
    if _iterates_as(sampler, SequentialSampler) and len(sampler.data_source) == num_rows:
        return facts
    if _iterates_as(sampler, RandomSampler) and len(sampler.data_source) == num_rows:
        if sampler.replacement or sampler.num_samples != num_rows:
            raise _no_counterpart(
                name,
                f"{kind}(replacement={sampler.replacement}, num_samples={sampler.num_samples}) of"
                f" {num_rows} rows",
                "an epoch has each row once: shuffle without replacement and num_samples; or use"
                f" sampler=Weighted(...) or subset=Subset(...); see {_ORDER}",
            )
        return _shuffled(name, facts, kind, is_training)
    if _iterates_as(sampler, SubsetRandomSampler):
        rows = [int(row) for row in sampler.indices]
        if len(set(rows)) != len(rows) or not all(0 <= row < num_rows for row in rows):
            raise _no_counterpart(
                name,
                f"{kind} of {len(rows)} indices",
                f"the indices must be different rows, 0 to {num_rows - 1}; see {_ORDER}",
            )
        return replace(facts, subset=Subset(rows), shuffle=is_training)
    if is_training and _iterates_as(sampler, WeightedRandomSampler):
        if not sampler.replacement or len(sampler.weights) != num_rows:
            raise _no_counterpart(
                name,
                f"{kind}(replacement={sampler.replacement}) with {len(sampler.weights)} weights for"
                f" {num_rows} rows",
                "Weighted needs a weight for each row, and draws rows with replacement: use"
                f" replacement=True and {num_rows} weights, or sampler= instead; see {_ORDER}",
            )
        num_samples = None if sampler.num_samples == num_rows else sampler.num_samples
        return replace(facts, sampler=Weighted(sampler.weights, num_samples), shuffle=True)
    if _iterates_as(sampler, DistributedSampler) and len(sampler.dataset) == num_rows:
        if sampler.drop_last and num_rows % sampler.num_replicas and not facts.drop_last:
            raise _no_counterpart(
                name,
                f"{kind}(drop_last=True)",
                "rows that processes cannot share evenly are not dropped here: remove it, or use"
                f" DataLoader(drop_last=True); see {_LOADERS}",
            )
        return _shuffled(name, facts, kind, is_training) if sampler.shuffle else facts
    raise _no_counterpart(
        name,
        f"sampler={kind}",
        f"there is nothing like it here: use sampler= or subset= of the data module; see {_ORDER}"
        if is_training
        else "evaluation reads rows in dataset order: use a SequentialSampler, or the rows of a"
        f" SubsetRandomSampler; see {_LOADERS}",
    )


def _shuffled(name: str, facts: LoaderFacts, kind: str, is_training: bool) -> LoaderFacts:
    if not is_training:
        raise _no_counterpart(
            name,
            f"sampler={kind}, which shuffles",
            f"evaluation reads rows in dataset order: use shuffle=False; see {_LOADERS}",
        )
    return replace(facts, shuffle=True)


def _iterates_as(value: Any, kind: type) -> bool:
    """Return whether a value is an instance of a class, and no subclass overrides ``__iter__``."""
    return isinstance(value, kind) and type(value).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
