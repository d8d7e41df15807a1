"""How a store is built, as its user says, checked."""

from dataclasses import dataclass
from functools import partial

from lightning_memmap.sampling import default_shards
from lightning_memmap.schema.forms import FieldOptions
from lightning_memmap.store.fingerprint import check_given
from lightning_memmap.store.manifest import check_num_shards
from lightning_memmap.store.progress import ShowProgress, show_progress
from lightning_memmap.store.workers import check_num_workers


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built, as its user says; see `lightning_memmap.store.build_store`.

    Args:
        num_shards: Shards that the rows are divided into; None for those of `default_shards`.
        num_workers: Worker processes that read the dataset and write its rows; with 0, this one.
        fingerprint: The identity of the dataset in the user's own words.
        fields: What the user says of the fields.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: It is out of range.
    """

    num_shards: int | None
    num_workers: int
    fingerprint: str | None
    fields: FieldOptions
    progress: bool

    def __post_init__(self) -> None:
        # As integers of Python, whatever they were given as.
        if self.num_shards is not None:
            object.__setattr__(self, "num_shards", check_num_shards(self.num_shards))
        object.__setattr__(self, "num_workers", check_num_workers(self.num_workers))
        check_given(self.fingerprint)

    def shards_of(self, num_rows: int) -> int:
        """The shards of a store of so many rows."""
        return default_shards(num_rows) if self.num_shards is None else self.num_shards

    @property
    def show(self) -> ShowProgress:
        """What shows the progress."""
        return partial(show_progress, hidden=not self.progress)
