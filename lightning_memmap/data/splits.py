"""The splits of a data module: training rows, and one or several sets of rows to evaluate on.

Where several datasets are given to validate, test or predict on, each is a split of its own, whose
name has two parts, such as ``val/clean``.
"""

import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch.utils.data import Dataset

from lightning_memmap.store.sources.column_dataset import is_dict_of_splits, way_out
from lightning_memmap.store.sources.stream import is_stream

SPLITS = ("train", "val", "test", "predict")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def named_datasets(kind: str, given: Any) -> dict[str, Any]:
    """The datasets that are given for one argument, by split."""
    if not has_several(given):
        return {kind: given}
    return {f"{kind}/{name}": dataset for name, dataset in _entries(given).items()}


def has_several(given: Any) -> bool:
    """Whether several datasets are given for one argument."""
    entries = _entries(given).values()
    if not entries or any(map(_is_dataset, entries)):
        return bool(entries)
    is_by_name = _is_by_name(given) and all(map(_is_list_of_samples, entries))
    return is_by_name or all(entry is None for entry in entries)


def check_datasets(kind: str, given: Any) -> None:
    """Check what is given as the datasets of one argument."""
    if kind == "train" and is_dict_of_splits(given):
        raise TypeError(f"train_dataset: {way_out(given)}")
    entries = _entries(given)
    if (isinstance(given, (list, tuple)) or _is_by_name(given)) and not given:
        raise ValueError(f"{kind}_dataset={given!r}: it is empty: give a dataset, or leave it out")
    first = _entries(next(iter(entries.values()), None))
    if any(isinstance(entry, Dataset) for entry in first.values()):
        raise TypeError(
            f"{kind}_dataset={short_repr(given)}: datasets in a list within a list or dict: give"
            " all of them in one list, or in one dict by name"
        )
    if not has_several(given):
        entries = {}
    if entries and kind == "train" and not isinstance(given, Mapping):
        raise TypeError(
            f"train_dataset: found a list of {len(entries)} {type(entries[0]).__name__}, which are"
            " taken for datasets, and training has one: join them with"
            " torch.utils.data.ConcatDataset, or give a dict of them by name and say how they are"
            " mixed: sampler=Mixture({'a': 0.7, 'b': 0.3}); if they are samples, such as graphs,"
            " give a Dataset whose rows are dicts of their tensors"
        )
    seen: dict[str, Any] = {}
    for name, dataset in entries.items():
        if not (dataset is None or _is_dataset(dataset) or _is_list_of_samples(dataset)):
            raise _no_dataset(f"{kind}_dataset[{name!r}]", dataset)
        check_store_name(f"{kind}_dataset", name)
        other = seen.setdefault(str(name).casefold(), name)
        if other is not name:
            raise ValueError(
                f"{kind}_dataset[{name!r}] and [{other!r}]: some file systems would have one store"
                " for both: use names that differ in more than case"
            )
    is_one = hasattr(given, "__getitem__") and not isinstance(given, (str, type, np.generic))
    if given is not None and not is_one and not is_stream(given):
        raise _no_dataset(f"{kind}_dataset", given)


def check_store_name(what: str, name: object) -> None:
    """Check that a store can have the name or index of one of several datasets or loaders."""
    if isinstance(name, int) or (isinstance(name, str) and _NAME.fullmatch(name)):
        return
    raise ValueError(
        f"{what}[{name!r}]: its store has this name: use ASCII letters, digits, '_', '-' and '.',"
        " and begin with none of the last two"
    )


def argument_of(split: str) -> str:
    """The argument that a split's dataset is given with, for messages."""
    kind, _, name = split.partition("/")
    if not name:
        return f"{kind}_dataset"
    return f"{kind}_dataset[{name if name.isdecimal() else repr(name)}]"


def _entries(given: Any) -> dict[Any, Any]:
    if _is_by_name(given):
        return dict(given)
    return dict(enumerate(given)) if isinstance(given, (list, tuple)) else {}


def _is_by_name(given: Any) -> bool:
    """Whether something is a mapping. So is a TensorDict, but it is one dataset, of its rows."""
    return isinstance(given, Mapping) and not isinstance(given, TensorDictBase)


def _is_dataset(value: Any) -> bool:
    """Whether an entry of a list or dict is a dataset, and no sample or column of one."""
    if isinstance(value, Dataset):
        return True
    if isinstance(value, (str, bytes, list, tuple, Mapping)) or hasattr(value, "dtype"):
        return False
    return is_stream(value) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def _is_list_of_samples(value: Any) -> bool:
    """Whether a list is a dataset of dicts: as an entry of a dict it could also be a column."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _no_dataset(name: str, given: Any) -> TypeError:
    instead = way_out(given) or (
        "give a map-style dataset, with __len__ and __getitem__, or one that can be iterated over"
    )
    return TypeError(f"{name}={given!r}: {instead}")
