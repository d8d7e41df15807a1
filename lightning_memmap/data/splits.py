"""The splits of a data module: training rows, and one or several datasets to evaluate on.

If several datasets are passed to validate, test or predict on, each is a split whose name has two
parts, such as ``val/clean``: its role and its own name.
"""

import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lightning_memmap.store.sources.column_dataset import explain_non_dataset, is_dict_of_splits
from lightning_memmap.store.sources.iterable import is_iterable_only
from lightning_memmap.tensordict_types import tensordict_types

#: The roles of splits: what their rows are for.
ROLES = ("train", "val", "test", "predict")
#: The roles of the splits in each stage of a Trainer.
ROLES_OF_STAGE = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


class SplitName(NamedTuple):
    """The two parts of a split's name, such as ``val/clean``."""

    role: str
    name: str  # The name of one of several datasets; empty if there is only one.

    @classmethod
    def parse(cls, split: object) -> "SplitName":
        """Divide the name of a split."""
        role, _, name = str(split).partition("/")
        return cls(role, name)


def name_datasets(role: str, datasets: Any) -> dict[str, Any]:
    """Return the datasets of one argument by split: one, or one for each entry of a list or dict.

    Args:
        role: One of `ROLES`.
        datasets: The argument ``{role}_dataset``.
    """
    if not has_several(datasets):
        return {role: datasets}
    return {f"{role}/{name}": dataset for name, dataset in _entries(datasets).items()}


def has_several(datasets: Any) -> bool:
    """Return whether an argument is a list or dict of datasets, and not a dataset itself."""
    entries = _entries(datasets).values()
    if not entries or any(map(_is_dataset, entries)):
        return bool(entries)
    is_by_name = _is_by_name(datasets) and all(map(_is_list_of_samples, entries))
    return is_by_name or all(entry is None for entry in entries)


def check_datasets(role: str, datasets: Any) -> None:
    """Check the value of one of the dataset arguments."""
    if role == "train" and is_dict_of_splits(datasets):
        raise TypeError(f"train_dataset: {explain_non_dataset(datasets)}")
    entries = _entries(datasets)
    if (isinstance(datasets, (list, tuple)) or _is_by_name(datasets)) and not datasets:
        raise ValueError(f"{role}_dataset={datasets!r}: is empty: pass a dataset or None")
    first = _entries(next(iter(entries.values()), None))
    if any(isinstance(entry, Dataset) for entry in first.values()):
        raise TypeError(
            f"{role}_dataset={short_repr(datasets)}: a list or dict of lists or dicts of datasets:"
            " pass all datasets in one list, or in one dict by name"
        )
    if not has_several(datasets):
        entries = {}
    if entries and role == "train" and not isinstance(datasets, Mapping):
        raise TypeError(
            f"train_dataset: a list of {len(entries)} {type(entries[0]).__name__}, which look like"
            " datasets, and training needs one: concatenate them with"
            " torch.utils.data.ConcatDataset, or pass a dict of them by name and mix them with"
            " sampler=Mixture({'a': 0.7, 'b': 0.3}). If they are samples, such as graphs, pass a"
            " Dataset whose rows are dicts of their tensors"
        )
    seen: dict[str, Any] = {}
    for name, dataset in entries.items():
        if not (dataset is None or _is_dataset(dataset) or _is_list_of_samples(dataset)):
            raise _not_a_dataset(f"{role}_dataset[{name!r}]", dataset)
        check_store_name(f"{role}_dataset", name)
        other = seen.setdefault(str(name).casefold(), name)
        if other is not name:
            raise ValueError(
                f"{role}_dataset[{name!r}] and [{other!r}]: names that differ only in case would"
                " share a store on some file systems: rename one of them"
            )
    is_one = hasattr(datasets, "__getitem__") and not isinstance(datasets, (str, type, np.generic))
    if datasets is not None and not is_one and not is_iterable_only(datasets):
        raise _not_a_dataset(f"{role}_dataset", datasets)


def check_store_name(argument: str, name: object) -> None:
    """Check that the name or index of a dataset or loader can be the name of its store."""
    if isinstance(name, int) or (isinstance(name, str) and _NAME.fullmatch(name)):
        return
    raise ValueError(
        f"{argument}[{name!r}]: this becomes a directory name: use ASCII letters, digits, '_', '-'"
        " and '.', starting with a letter, digit or '_'"
    )


def name_argument(split: str) -> str:
    """Return the argument that a split's dataset is passed as, for messages."""
    role, name = SplitName.parse(split)
    if not name:
        return f"{role}_dataset"
    return f"{role}_dataset[{name if name.isdecimal() else repr(name)}]"


def _entries(value: Any) -> dict[Any, Any]:
    if _is_by_name(value):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def _is_by_name(value: Any) -> bool:
    """Return whether a value is a mapping, other than a TensorDict, which is one dataset."""
    return isinstance(value, Mapping) and not isinstance(value, tensordict_types())


def _is_dataset(value: Any) -> bool:
    """Return whether an entry of a list or dict is a dataset, not a sample or a column."""
    if isinstance(value, Dataset):
        return True
    if isinstance(value, (str, bytes, list, tuple, Mapping)) or hasattr(value, "dtype"):
        return False
    return is_iterable_only(value) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def _is_list_of_samples(value: Any) -> bool:
    """Return whether a list is a dataset of dicts. Other lists in a dict may be columns."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _not_a_dataset(name: str, value: Any) -> TypeError:
    remedy = explain_non_dataset(value) or (
        "pass a map-style dataset, with __len__ and __getitem__, or one that can be iterated over"
    )
    return TypeError(f"{name}={value!r}: {remedy}")
