"""The options of a data module: one frozen value, checked when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from lightning_memmap.errors import check_integer
from lightning_memmap.loading.transform import check_callable
from lightning_memmap.placement import RESIDENCIES
from lightning_memmap.sampling import Sampler, Shards
from lightning_memmap.sampling.sampler import check_seed
from lightning_memmap.schema import read_forms
from lightning_memmap.store.fingerprint import check_given
from lightning_memmap.store.manifest import check_num_shards
from lightning_memmap.store.recognition import check_choice
from lightning_memmap.store.workers import check_num_workers

SPLITS = ("train", "val", "test", "predict")
_COUNTS = ("batch_size", "seed", "num_folds", "num_parts", "member", "shuffle_window")
T = TypeVar("T")


@dataclass(frozen=True)
class DataOptions:
    """The arguments of a `MemmapDataModule`, which describes them, except its datasets.

    Raises:
        TypeError: A transform or the sampler cannot be called, a count or the seed is not an
            integer, a fingerprint is not a string, or a form has arguments that it cannot have.
        ValueError: An option is out of range, or two of them exclude each other.
    """

    store_dir: Path
    batch_size: int
    transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    shuffle: bool
    drop_last: bool
    seed: int
    num_shards: int
    residency: str
    memory_fraction: float
    num_workers: int
    overwrite: bool
    fingerprint: str | Mapping[str, str] | None
    check: str
    num_folds: int | None
    num_parts: int | None
    member: int | None
    shuffle_window: int | None
    sampler: Callable[[Shards, int], Sampler] | None
    variable: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "store_dir", _directory(self.store_dir))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None or name in ("batch_size", "seed"):
                check_integer(name, value)
        for name in ("shuffle", "drop_last", "overwrite"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: give True or False")
        if not isinstance(self.memory_fraction, (int, float)):
            raise TypeError(f"memory_fraction={self.memory_fraction!r}: give a number")
        check_seed(self.seed)
        if self.batch_size < 1:
            raise ValueError(
                f"batch_size={self.batch_size}: at least 1 row per data device and step"
            )
        check_num_shards(self.num_shards)
        check_num_workers(self.num_workers)
        if self.residency not in RESIDENCIES:
            raise ValueError(
                f"residency={self.residency!r}: choose one of {', '.join(RESIDENCIES)}"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction}: more than 0 and at most 1")
        self._check_subset()
        for name in ("transform", "eval_transform"):
            if (given := getattr(self, name)) is not None:
                check_callable(name, given)
        self._check_sampler()
        if self.shuffle_window is not None and self.shuffle_window < 1:
            raise ValueError(f"shuffle_window={self.shuffle_window}: at least 1 row of a shard")
        check_choice(self.check)
        read_forms(self.variable)
        for split, given in self.fingerprints.items():
            if split not in SPLITS:
                raise ValueError(
                    f"fingerprint for {split!r}: there is no such split, choose among"
                    f" {', '.join(SPLITS)}"
                )
            check_given(given)

    def _check_sampler(self) -> None:
        if self.sampler is None:
            return
        is_class = isinstance(self.sampler, type) and issubclass(self.sampler, Sampler)
        if is_class or not callable(self.sampler):
            raise TypeError(
                f"sampler={self.sampler!r}: give a function of the shards and the seed that returns"
                " a sampler, such as lambda shards, seed: MySampler(shards)"
            )
        if self.shuffle_window is not None and self.residency != "stream":
            raise ValueError(
                f"shuffle_window={self.shuffle_window} with a sampler: leave one of them out;"
                " the sampler decides the order"
            )
        if not self.shuffle:
            raise ValueError(
                "shuffle=False with a sampler: leave one of them out; the sampler decides the order"
            )

    def _check_subset(self) -> None:
        if self.num_folds is not None and self.num_parts is not None:
            raise ValueError(
                f"num_folds={self.num_folds} and num_parts={self.num_parts}: leave one of them out"
            )
        if self.num_folds is not None and self.num_folds < 2:
            raise ValueError(f"num_folds={self.num_folds}: at least 2, one of which is held out")
        if self.num_parts is not None and self.num_parts < 1:
            raise ValueError(f"num_parts={self.num_parts}: at least 1")
        if self.member is not None and self.member < 0:
            raise ValueError(f"member={self.member}: members are counted from 0")

    @property
    def fingerprints(self) -> dict[str, str | None]:
        """The fingerprint of each split's dataset."""
        if isinstance(self.fingerprint, Mapping):
            return dict(self.fingerprint)
        return dict.fromkeys(SPLITS, self.fingerprint)


def _directory(given: object) -> Path:
    if not isinstance(given, (str, Path)) or not str(given):
        raise TypeError(f"store_dir={given!r}: give the path of a directory")
    return Path(given)


class Option(Generic[T]):
    """An option as an attribute of its owner: read from ``owner.options``, and checked when set.

    Lightning's tuner sets ``batch_size``, and subclasses may set a transform.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> "Option[T]": ...
    @overload
    def __get__(self, owner: Any, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> "Option[T] | T":
        if owner is None:
            return self
        value: T = getattr(owner.options, self._name)
        return value

    def __set__(self, owner: Any, value: T) -> None:
        if "options" not in vars(owner):
            raise AttributeError(
                f"{self._name}: call super().__init__() before you set an option of the data module"
            )
        owner.options = replace(owner.options, **{self._name: value})
