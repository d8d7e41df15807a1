"""The options of a data module: one frozen value, and the attributes that read and set it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from lightning_memmap.data.splits import ROLES, SplitName, check_datasets
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.transform import check_callable
from lightning_memmap.placement.plan import Residency, check_residency
from lightning_memmap.placement.topology import check_memory_fraction
from lightning_memmap.sampling.factory import SamplerFactory
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler, check_seed
from lightning_memmap.sampling.schedule import steps_to_skip
from lightning_memmap.sampling.selection import Selection, Subset
from lightning_memmap.schema.forms import (
    Declared,
    Decode,
    Layout,
    Windows,
    read_declared,
    read_decode,
    read_layouts,
    read_windows,
)
from lightning_memmap.store.identity import check_fingerprint
from lightning_memmap.store.manifest import check_num_shards
from lightning_memmap.store.paths import StoreUrl, path_or_url
from lightning_memmap.store.workers import check_num_workers

P = ParamSpec("P")
T = TypeVar("T")

#: The smallest value of each count, and the message of the error for smaller ones.
_COUNTS = {
    "batch_size": (1, "must be at least 1 row per data device and step"),
    "member": (0, "members are counted from 0"),
    "shuffle_block": (1, "must be at least 1 row of a shard"),
    "prefetch": (0, "must be a number of steps, 0 for no prefetching"),
}
#: Arguments of a DataLoader that a data module does not have, and their replacements.
_LOADER_OPTIONS = {
    "collate_fn": "use `layout` for rows of different lengths, and `transform` for the rest",
    "pin_memory": "memory that a GPU reads is always pinned",
    "batch_sampler": "use `batch_size` and a `sampler` such as Bucketed",
    "prefetch_factor": "use `prefetch`, the number of steps to prefetch",
    "persistent_workers": "`num_workers` processes read the dataset once, to store it",
}


def reject_loader_options(init: Callable[P, None]) -> Callable[P, None]:
    """Raise an error that names the replacement when an argument of a DataLoader is passed."""

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        for name in options.keys() & _LOADER_OPTIONS.keys():
            remedy = _LOADER_OPTIONS[name]
            raise TypeError(f"{name}={options[name]!r}: not an argument of a data module: {remedy}")
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
    variable: Sequence[str] | Mapping[str, int] | None
    nullable: Sequence[str] | None
    layout: Mapping[str, Layout] | None
    decode: Mapping[str, Decode] | None
    windows: Windows | None
    with_row_numbers: bool
    skip_steps: range | Sequence[int] | None
    build: str
    prefetch: int | None
    eval_batch_size: int | Mapping[str, int] | None
    weight: Callable[[Any], Any] | str | None

    def __post_init__(self) -> None:
        for role, datasets in self.datasets.items():
            check_datasets(role, datasets)
        object.__setattr__(self, "store_dir", _directory(self.store_dir))
        for name, limit in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                object.__setattr__(self, name, check_integer(name, value, *limit))
        self._check_eval_batch_size()
        for name in ("shuffle", "drop_last", "overwrite", "with_row_numbers"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: must be True or False")
        object.__setattr__(self, "seed", check_seed(self.seed))
        steps_to_skip(self.skip_steps)
        if self.num_shards is not None:
            object.__setattr__(self, "num_shards", check_num_shards(self.num_shards))
        object.__setattr__(self, "num_workers", check_num_workers(self.num_workers))
        check_residency(self.residency)
        fraction = check_memory_fraction(self.memory_fraction)
        object.__setattr__(self, "memory_fraction", fraction)
        self._check_subset()
        for name in ("transform", "eval_transform"):
            if (transform := getattr(self, name)) is not None:
                check_callable(name, transform)
        if not (self.weight is None or isinstance(self.weight, str) or callable(self.weight)):
            raise TypeError(
                f"weight={self.weight!r}: pass the name of a field, or a function of the batch that"
                " returns the number of items of each row"
            )
        self._check_order()
        self._check_build()
        read_declared(self.variable, self.nullable)
        if self.layout is not None:
            object.__setattr__(self, "layout", read_layouts(self.layout))
        if self.decode is not None:
            object.__setattr__(self, "decode", read_decode(self.decode))
        object.__setattr__(self, "windows", read_windows(self.windows))
        for argument, split in self.by_split():
            if SplitName.parse(split).role not in ROLES:
                raise _no_split(argument, split, ROLES)
        prints = self.fingerprint
        for fingerprint in prints.values() if isinstance(prints, Mapping) else [prints]:
            check_fingerprint(fingerprint)

    def _check_eval_batch_size(self) -> None:
        name = "eval_batch_size"
        option = self.eval_batch_size
        if option is None:
            return
        if not isinstance(option, Mapping):
            object.__setattr__(self, name, check_integer(name, option, *_COUNTS["batch_size"]))
            return
        sizes = dict[str, int]()
        for split, size in option.items():
            if SplitName.parse(split).role not in ROLES[1:]:
                raise _no_split(name, split, ROLES[1:])
            sizes[split] = check_integer(f"{name}[{split!r}]", size, *_COUNTS["batch_size"])
        object.__setattr__(self, name, sizes)

    def batch_size_of(self, split: str) -> int:
        """Return the rows per data device and step of a split."""
        sizes = self.eval_batch_size
        if split == "train" or sizes is None:
            return self.batch_size
        if not isinstance(sizes, Mapping):
            return sizes
        return sizes.get(split, sizes.get(SplitName.parse(split).role, self.batch_size))

    def _check_build(self) -> None:
        if not isinstance(self.build, str) or self.build not in ("first", "while_training"):
            raise ValueError(f"build={self.build!r}: choose first or while_training")
        if self.build == "first":
            return
        reason = None
        if not self.num_workers and not isinstance(self.store_dir, StoreUrl):
            reason = "num_workers=0: other processes must read the rows: set num_workers=1 or more"
        elif self.overwrite:
            reason = "overwrite=True: delete the old store yourself"
        elif self.is_streamed and self.shuffle and self.shuffle_block is None:
            reason = "residency='stream' and no block size: set shuffle_block=..."
        if reason is not None:
            raise ValueError(f"build='while_training' with {reason}, or use build='first'")

    def _check_order(self) -> None:
        # Under residency="stream" a block is also the number of rows that are read at once.
        if self.shuffle_block is not None and not (self.shuffle or self.is_streamed):
            raise ValueError(
                f"shuffle_block={self.shuffle_block} with shuffle=False: nothing is shuffled:"
                " remove one of them, or set residency='stream'"
            )
        maker: object = self.sampler
        if isinstance(maker, partial):
            # jsonargparse passes a class of a config as an argument of its factory.
            maker = Sampler if Sampler in (maker.func, *maker.args) else maker
        can_make = maker is None or callable(maker) or isinstance(maker, SamplerFactory)
        if isinstance(maker, type) or not can_make:
            raise TypeError(
                f"sampler={maker!r}: must be a factory such as Weighted(...), or a function of the"
                " pool and the seed that returns a Sampler: lambda pool, seed: MySampler(pool)"
            )
        if maker is not None and not self.shuffle:
            raise ValueError(
                "shuffle=False with sampler=...: the sampler decides the order: remove one of them"
            )

    def _check_subset(self) -> None:
        if isinstance(self.subset, Mapping):
            for split, subset in self.subset.items():
                if not isinstance(subset, Subset):
                    raise TypeError(f"subset[{split!r}]={subset!r}: must be a Subset")
        elif not isinstance(self.subset, (Selection, type(None))):
            raise TypeError(
                f"subset={self.subset!r}: must be Subset(...), RandomSplit(...), Holdout(...),"
                " KFold(...) or Parts(...), or a dict of Subsets by split"
            )
        selection = self.selection("train")
        if (
            self.member is not None
            and (selection is None or selection.num_members is None)
            and "{member}" not in str(self.store_dir)
        ):
            raise ValueError(
                f"member={self.member}: has no effect without folds or parts, such as"
                " subset=KFold(5), or {member} in store_dir: set one of them, or remove member"
            )

    @property
    def datasets(self) -> dict[str, Any]:
        """The value of each of the four dataset arguments, by ``train``, ``val`` and so on."""
        return {role: getattr(self, f"{role}_dataset") for role in ROLES}

    @property
    def mixed(self) -> tuple[str, ...]:
        """The names of the training sets that the sampler mixes; empty if it does not mix."""
        return self.sampler.training_sets if isinstance(self.sampler, SamplerFactory) else ()

    @property
    def order_options(self) -> dict[str, Any]:
        """The options that decide the order of the training rows, by name."""
        names = ["sampler", "shuffle", "seed", "shuffle_block"]
        names += ["batch_size"] * self.is_by_batch
        return {name: getattr(self, name) for name in names}

    @property
    def is_by_batch(self) -> bool:
        """Whether the order depends on the size of a global batch."""
        return isinstance(self.sampler, SamplerFactory) and self.sampler.by_batch

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read block by block."""
        return self.residency == Residency.STREAM.value

    @property
    def declared(self) -> Declared:
        """How rows may differ in a build: in length too if in ``layout`` or ``windows``."""
        declared = read_declared(self.variable, self.nullable)
        names = [*(self.layout or ()), *(self.windows.fields if self.windows else ())]
        return replace(declared, variable={**dict.fromkeys(names, 1), **declared.variable})

    def selection(self, split: str) -> Selection | None:
        """Return the selection of a split's rows; None if it has all rows of its store."""
        if isinstance(self.subset, Mapping):
            return self.subset.get(split)
        selection = self.subset
        return None if selection is None or split not in selection.splits else selection

    def fingerprint_of(self, split: str) -> str | None:
        """Return the fingerprint that was passed for a split's dataset, or None."""
        if isinstance(self.fingerprint, Mapping):
            return self.fingerprint.get(split)
        return self.fingerprint

    def check_splits(self, splits: Iterable[str]) -> None:
        """Check that fingerprints and subsets are only named for splits that exist."""
        names = list(splits)
        for argument, split in self.by_split():
            if split not in names:
                raise _no_split(argument, split, names)
            selection = self.selection(split)
            if argument == "fingerprint" and selection and selection.stored_split(split) != split:
                raise ValueError(
                    f"fingerprint[{split!r}]: its rows are held out of the store of 'train': set"
                    " fingerprint['train'] instead"
                )

    def by_split(self) -> Iterator[tuple[str, str]]:
        """Yield (argument, split) for each entry of the options that are dicts by split."""
        for argument in ("fingerprint", "subset"):
            value = getattr(self, argument)
            for split in value if isinstance(value, Mapping) else ():
                yield argument, split


def _no_split(argument: str, split: str, splits: Iterable[str]) -> ValueError:
    is_several = any(name.startswith(f"{split}/") for name in splits)
    reason = f"{split}_dataset is several datasets" if is_several else "there is no such split"
    return ValueError(f"{argument}[{split!r}]: {reason}: choose from {', '.join(splits)}")


def _directory(store_dir: object) -> Path | StoreUrl:
    if not isinstance(store_dir, (str, Path)) or not str(store_dir):
        raise TypeError(f"store_dir={store_dir!r}: must be the path of a directory, or a URL")
    return path_or_url(store_dir)


#: The names of all options.
OPTIONS = tuple(field.name for field in fields(DataOptions))


class Option(Generic[T]):
    """An attribute that is read from ``owner.options``, and checked when it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> T:
        value: Any = self if owner is None else getattr(owner.options, self._name)
        return value  # type: ignore[no-any-return]  # Of the class, the option itself.

    def __set__(self, owner: Any, value: Any) -> None:
        if "options" not in vars(owner):
            raise AttributeError(
                f"{self._name}: call super().__init__() before you set an option of the data module"
            )
        owner._set_option(self._name, value)


class OptionAttributes:
    """The options of a data module, each as an attribute."""

    options: DataOptions

    train_dataset = Option[Any]()
    val_dataset = Option[Any]()
    test_dataset = Option[Any]()
    predict_dataset = Option[Any]()
    store_dir = Option[Path | StoreUrl]()
    batch_size = Option[int]()
    transform = Option[Callable[..., Any] | None]()
    eval_transform = Option[Callable[..., Any] | None]()
    shuffle = Option[bool]()
    drop_last = Option[bool]()
    seed = Option[int]()
    num_shards = Option[int | None]()
    residency = Option[str]()
    memory_fraction = Option[float]()
    num_workers = Option[int]()
    overwrite = Option[bool]()
    fingerprint = Option[str | Mapping[str, str] | None]()
    subset = Option[Selection | Mapping[str, Subset] | None]()
    member = Option[int | None]()
    shuffle_block = Option[int | None]()
    sampler = Option[Any]()
    variable = Option[Sequence[str] | Mapping[str, int] | None]()
    nullable = Option[Sequence[str] | None]()
    layout = Option[Mapping[str, Any] | None]()
    decode = Option[Mapping[str, Any] | None]()
    windows = Option[Windows | None]()
    with_row_numbers = Option[bool]()
    skip_steps = Option[Any]()
    build = Option[str]()
    prefetch = Option[int | None]()
    eval_batch_size = Option[int | Mapping[str, int] | None]()
    weight = Option[Callable[[Any], Any] | str | None]()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject class attributes that would silently replace arguments."""
        super().__init_subclass__(**kwargs)
        for name in OPTIONS:
            if name in vars(cls) and not isinstance(vars(cls)[name], property):
                raise TypeError(
                    f"class {cls.__name__} has an attribute {name!r}, which is an argument of"
                    f" MemmapDataModule: call super().__init__({name}=...) instead"
                )

    @property
    def effective_options(self) -> DataOptions:
        """The options, with the values of those that a subclass has overridden as properties."""
        names = [name for name in OPTIONS if isinstance(getattr(type(self), name), property)]
        overridden = {name: getattr(self, name) for name in names}
        return replace(self.options, **overridden) if overridden else self.options

    def _set_option(self, name: str, value: Any) -> None:
        self.options = replace(self.options, **{name: value})
