"""The specification of a build: the dataset and the options of the user, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from torch.utils.data import Subset

from lightning_memmap.errors import with_article
from lightning_memmap.sampling.rows import Shards, default_shards
from lightning_memmap.schema.forms import Declared
from lightning_memmap.store.directory import StoreDirectory, is_store
from lightning_memmap.store.identity import Identity, check_fingerprint
from lightning_memmap.store.manifest import Manifest, are_class_names, check_num_shards
from lightning_memmap.store.paths import store_directory
from lightning_memmap.store.probes import Probes
from lightning_memmap.store.progress import ShowProgress, show_progress
from lightning_memmap.store.sources.column_dataset import explain_non_dataset
from lightning_memmap.store.sources.iterable import is_iterable_only
from lightning_memmap.store.workers import check_num_workers


@dataclass(frozen=True)
class BuildSpec:
    """The arguments of a build, checked."""

    dataset: Any
    path: str | Path
    num_shards: int | None
    num_workers: int
    fingerprint: str | None
    declared: Declared
    progress: bool = True
    #: The name of the argument that sets the path, for messages.
    argument: str = "path"

    def __post_init__(self) -> None:
        if (instead := explain_non_dataset(self.dataset)) is not None:
            raise TypeError(f"dataset: {instead}")
        if self.num_shards is not None:
            check_num_shards(self.num_shards)
        check_num_workers(self.num_workers)
        check_fingerprint(self.fingerprint)

    @property
    def directory(self) -> StoreDirectory:
        """The directory of the store."""
        return StoreDirectory(store_directory(self.path))

    @property
    def is_built(self) -> bool:
        """Whether there is a store in the directory, of any dataset."""
        return is_store(self.directory.path)

    @property
    def is_iterable_only(self) -> bool:
        """Whether rows can't be read by index; see `is_iterable_only`."""
        return is_iterable_only(self.dataset)

    def shards(self, num_rows: int) -> Shards:
        """Divide rows into shards."""
        return Shards(num_rows, int(self.num_shards or default_shards(num_rows)))

    @property
    def show(self) -> ShowProgress:
        """A context manager that shows the progress."""
        return partial(show_progress, hidden=not self.progress)

    @cached_property
    def identity(self) -> Identity:
        """The identity of the dataset; see `fix_identity`."""
        if not self.is_iterable_only:
            check_length(self.dataset)
        return Identity.of(self.dataset, self.fingerprint)

    def fix_identity(self) -> None:
        """Compute the identity before a row is read, because the dataset may cache rows."""
        _ = self.identity

    def draft(self, num_rows: int, probes: Probes, **more: str) -> Manifest:
        """Make the manifest of the store before a row is written."""
        shards = self.shards(num_rows)
        return Manifest.draft(
            shards.num_rows,
            shards.num_shards,
            probes.schema,
            probes=probes.digests,
            identity=self.identity,
            classes=find_class_names(self.dataset),
            source={"dataset": get_type_name(self.dataset), **more},
        )


def get_type_name(dataset: Any) -> str:
    """Return the qualified class name of a dataset."""
    python_type = type(dataset)
    return f"{python_type.__module__}.{python_type.__qualname__}"


def find_class_names(dataset: Any) -> tuple[str, ...]:
    """Return the names of a dataset's classes, by label."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    columns = getattr(dataset, "features", None)
    if names is None and isinstance(columns, Mapping):
        # In a Hugging Face dataset the column of labels has the names. Several are ambiguous.
        label_columns = [column for column in columns.values() if hasattr(column, "names")]
        names = label_columns[0].names if len(label_columns) == 1 else None
    return tuple(names) if isinstance(names, (list, tuple)) and are_class_names(names) else ()


def check_length(dataset: Any) -> int:
    """Return the length of a dataset, which must be at least 1."""
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"dataset={short_repr(dataset)}: {with_article(type(dataset).__name__)} has no length"
            f" ({error}): pass a map-style dataset with __len__ and __getitem__, or an iterable"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")
    return num_rows
