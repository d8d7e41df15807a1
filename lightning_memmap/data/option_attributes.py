"""The options of a data module as its attributes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from lightning_memmap.data.options import OPTIONS, DataOptions
from lightning_memmap.sampling.selection import Selection, Subset
from lightning_memmap.schema.forms import Windows
from lightning_memmap.store.paths import StoreUrl

T = TypeVar("T")


class Option(Generic[T]):
    """An attribute that is read from ``owner.options``, and checked when it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> "Option[T]": ...

    @overload
    def __get__(self, owner: Any, kind: type) -> T: ...

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.options, self._name)

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
