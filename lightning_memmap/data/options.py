"""The options of a data module: one frozen value, checked when it is made."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from lightning_memmap.data.splits import SPLITS, check_datasets
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.transform import check_callable
from lightning_memmap.placement.plan import Residency, check_residency
from lightning_memmap.placement.topology import check_memory_fraction
from lightning_memmap.sampling.factory import SamplerFactory
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler, check_seed
from lightning_memmap.sampling.schedule import steps_to_skip
from lightning_memmap.sampling.selection import Selection, Subset
from lightning_memmap.schema.forms import Form, read_forms
from lightning_memmap.store.identity import check_given
from lightning_memmap.store.manifest import check_num_shards
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.workers import check_num_workers

P = ParamSpec("P")

#: The least value of each count, and why.
_COUNTS = {
    "batch_size": (1, "at least 1 row per data device and step"),
    "member": (0, "members are counted from 0"),
    "shuffle_block": (1, "at least 1 row of a shard"),
    "prefetch": (0, "steps to prefetch, 0 for none"),
}
#: Arguments of a DataLoader that a data module does not have, and what takes their place.
_LOADER_OPTIONS = {
    "collate_fn": "`variable` says how rows of several lengths become a batch, and `transform` is"
    " called with the batch",
    "pin_memory": "memory is pinned where a GPU reads it",
    "batch_sampler": "give `batch_size` and a `sampler`, such as Bucketed",
    "prefetch_factor": "`prefetch` is the number of steps that are prefetched",
    "persistent_workers": "`num_workers` read the dataset once, when it is stored",
}


def without_loader_options(init: Callable[P, None]) -> Callable[P, None]:
    """Say what takes the place of an argument of a DataLoader that is given to a data module."""

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        for name in options.keys() & _LOADER_OPTIONS.keys():
            raise TypeError(f"{name}={options[name]!r}: leave it out: {_LOADER_OPTIONS[name]}")
        init(*args, **options)

    return checked


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The arguments of a `MemmapDataModule`, which describes them."""

    train_dataset: Any
    val_dataset: Any
    test_dataset: Any
    predict_dataset: Any
    store_dir: Path | StoreUrl
    batch_size: int
    transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    shuffle: bool
    drop_last: bool
    seed: int
    num_shards: int | None
    residency: str
    memory_fraction: float
    num_workers: int
    overwrite: bool
    fingerprint: str | Mapping[str, str] | None
    subset: Selection | Mapping[str, Subset] | None
    member: int | None
    shuffle_block: int | None
    sampler: SamplerFactory | Callable[[Pool, int], Sampler] | None
    variable: Mapping[str, Any] | None
    with_row_numbers: bool
    skip_steps: range | Sequence[int] | None
    build: str = "first"
    prefetch: int | None = None
    eval_batch_size: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for kind, given in self.datasets.items():
            check_datasets(kind, given)
        object.__setattr__(self, "store_dir", _directory(self.store_dir))
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                object.__setattr__(self, name, check_integer(name, value, *least))
        self._check_eval_batch_size()
        for name in ("shuffle", "drop_last", "overwrite", "with_row_numbers"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: give True or False")
        object.__setattr__(self, "seed", check_seed(self.seed))
        steps_to_skip(self.skip_steps)
        if self.num_shards is not None:
            object.__setattr__(self, "num_shards", check_num_shards(self.num_shards))
        object.__setattr__(self, "num_workers", check_num_workers(self.num_workers))
        check_residency(self.residency)
        share = check_memory_fraction(self.memory_fraction)
        object.__setattr__(self, "memory_fraction", share)
        self._check_subset()
        for name in ("transform", "eval_transform"):
            if (given := getattr(self, name)) is not None:
                check_callable(name, given)
        self._check_sampler()
        self._check_block()
        self._check_build()
        read_forms(self.variable)
        for argument, split in self.by_split():
            if str(split).partition("/")[0] not in SPLITS:
                raise _no_split(argument, split, SPLITS)
        given = self.fingerprint
        for each in given.values() if isinstance(given, Mapping) else [given]:
            check_given(each)

    def _check_eval_batch_size(self) -> None:
        given = self.eval_batch_size
        if given is None:
            return
        name, least = "eval_batch_size", _COUNTS["batch_size"]
        if not isinstance(given, Mapping):
            object.__setattr__(self, name, check_integer(name, given, *least))
            return
        sizes = dict[str, int]()
        for split, size in given.items():
            if str(split).partition("/")[0] not in SPLITS[1:]:
                raise _no_split(name, split, SPLITS[1:])
            sizes[split] = check_integer(f"{name}[{split!r}]", size, *least)
        object.__setattr__(self, name, sizes)

    def batch_size_of(self, split: str) -> int:
        """Return the rows per data device and step of a split."""
        sizes = self.eval_batch_size
        if split == "train" or sizes is None:
            return self.batch_size
        if not isinstance(sizes, Mapping):
            return sizes
        return sizes.get(split, sizes.get(split.partition("/")[0], self.batch_size))

    def _check_build(self) -> None:
        if not isinstance(self.build, str) or self.build not in ("first", "while_training"):
            raise ValueError(f"build={self.build!r}: choose first or while_training")
        if self.build == "first":
            return
        reason, is_remote = None, isinstance(self.store_dir, StoreUrl)
        if not self.num_workers and not is_remote:
            reason = "num_workers=0: rows are read by other processes: give num_workers=1 or more"
        elif self.overwrite:
            reason = "overwrite=True: remove the old store"
        elif self.is_streamed and self.shuffle and self.shuffle_block is None:
            reason = "residency='stream': the order depends on it: give shuffle_block=..."
        if reason is not None:
            raise ValueError(f"build='while_training' with {reason}, or build='first'")

    def _check_sampler(self) -> None:
        if self.sampler is None:
            return
        maker: object = self.sampler
        if isinstance(maker, partial):
            # So a class in a config comes, in the arguments of what makes it.
            maker = Sampler if Sampler in (maker.func, *maker.args) else maker
        is_class = isinstance(maker, type)
        if is_class or not (callable(maker) or isinstance(maker, SamplerFactory)):
            raise TypeError(
                f"sampler={maker!r}: give Weighted(...), or a function of the pool of rows and the"
                " seed that returns a sampler, such as lambda pool, seed: MySampler(pool)"
            )
        if not self.shuffle:
            raise ValueError(
                "shuffle=False with a sampler: leave one of them out; the sampler decides the order"
            )

    def _check_block(self) -> None:
        if self.shuffle_block is None:
            return
        # Under residency="stream" it also says how many rows are read at once.
        if not self.shuffle and not self.is_streamed:
            raise ValueError(
                f"shuffle_block={self.shuffle_block} with shuffle=False: leave one of them out;"
                " without residency='stream' it decides nothing but how rows are shuffled"
            )

    def _check_subset(self) -> None:
        if isinstance(self.subset, Mapping):
            for split, subset in self.subset.items():
                if not isinstance(subset, Subset):
                    raise TypeError(f"subset[{split!r}]={subset!r}: give a Subset")
        elif not isinstance(self.subset, (Selection, type(None))):
            raise TypeError(
                f"subset={self.subset!r}: give Subset(...), RandomSplit(...), Holdout(...),"
                " KFold(...) or Parts(...), or Subsets by split"
            )
        selection = self.selection("train")
        if (
            self.member is not None
            and (selection is None or selection.num_members is None)
            and "{member}" not in str(self.store_dir)
        ):
            raise ValueError(
                f"member={self.member}: it chooses nothing without a subset of folds or parts, such"
                " as subset=KFold(5), or a store_dir with {member} in it; give one of them, or"
                " leave member out"
            )

    @property
    def datasets(self) -> dict[str, Any]:
        """What is given for each of the four arguments."""
        return {kind: getattr(self, f"{kind}_dataset") for kind in SPLITS}

    @property
    def mixed(self) -> tuple[str, ...]:
        """The names of the training sets that the sampler mixes; none where there is one."""
        return self.sampler.stores if isinstance(self.sampler, SamplerFactory) else ()

    @property
    def order(self) -> dict[str, Any]:
        """The options that the order of the training rows depends on, by name."""
        names = ["sampler", "shuffle", "seed", "shuffle_block"]
        names += ["batch_size"] * self.is_by_batch
        return {name: getattr(self, name) for name in names}

    @property
    def is_by_batch(self) -> bool:
        """Whether the order depends on the rows of a global batch."""
        return isinstance(self.sampler, SamplerFactory) and self.sampler.by_batch

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read block by block."""
        return self.residency == Residency.STREAM.value

    @property
    def forms(self) -> dict[str, Form]:
        """The forms of ``variable``, by name of the field."""
        return read_forms(self.variable)

    def selection(self, split: str) -> Selection | None:
        """What selects the rows of a split; None where it has all of its store."""
        if isinstance(self.subset, Mapping):
            return self.subset.get(split)
        selection = self.subset
        return None if selection is None or split not in selection.splits else selection

    def fingerprint_of(self, split: str) -> str | None:
        """The fingerprint of a split's dataset; None where none is given."""
        if isinstance(self.fingerprint, Mapping):
            return self.fingerprint.get(split)
        return self.fingerprint

    def check_splits(self, splits: Iterable[str]) -> None:
        """Check that fingerprints and subsets are given for splits that there are."""
        names = list(splits)
        for argument, split in self.by_split():
            if split not in names:
                raise _no_split(argument, split, names)
            selection = self.selection(split)
            if argument == "fingerprint" and selection and selection.stored_split(split) != split:
                raise ValueError(
                    f"fingerprint for {split!r}: its rows are held out of the store of"
                    f" 'train': give the fingerprint for 'train'"
                )

    def by_split(self) -> Iterator[tuple[str, str]]:
        """The options that are given for some splits by name."""
        for argument in ("fingerprint", "subset"):
            given = getattr(self, argument)
            for split in given if isinstance(given, Mapping) else ():
                yield argument, split


def _no_split(argument: str, split: str, splits: Iterable[str]) -> ValueError:
    is_several = any(name.startswith(f"{split}/") for name in splits)
    reason = f"{split}_dataset is several datasets" if is_several else "there is no such split"
    return ValueError(f"{argument} for {split!r}: {reason}, choose among {', '.join(splits)}")


def _directory(given: object) -> Path | StoreUrl:
    if not isinstance(given, (str, Path)) or not str(given):
        raise TypeError(f"store_dir={given!r}: give the path of a directory, or a URL")
    return place_of(given)


class Option:
    """An option as an attribute of its owner: read from ``owner.options``, and checked when set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.options, self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        if "options" not in vars(owner):
            raise AttributeError(
                f"{self._name}: call super().__init__() before you set an option of the data module"
            )
        owner._set_option(self._name, value)


class OptionAttributes:
    """The fields of `DataOptions` as attributes of a data module."""

    options: DataOptions

    def _set_option(self, name: str, value: Any) -> None:
        self.options = replace(self.options, **{name: value})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


#: The names of all options.
OPTIONS = tuple(each.name for each in fields(DataOptions))
for _name in OPTIONS:
    setattr(OptionAttributes, _name, Option(_name))
