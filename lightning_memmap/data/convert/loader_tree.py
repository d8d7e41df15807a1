"""The loaders that one method of a data module returns: one, or several in a list or dict."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override


@dataclass(frozen=True)
class LoaderTree:
    """The loaders that one method has returned."""

    method: str
    #: By name in a dict, by index in a list, and under "" if there is only one.
    loaders: Mapping[Any, Any]
    form: Literal["one", "list", "dict"]
    #: The CombinedLoader that contained them, if any.
    combined: CombinedLoader | None = None

    @classmethod
    def of(cls, method: str, returned: Any) -> "LoaderTree":
        """Take apart what a method has returned."""
        combined = returned if isinstance(returned, CombinedLoader) else None
        if combined is not None:
            returned = combined.iterables
        if isinstance(returned, Mapping):
            return cls(method, dict(returned), "dict", combined)
        if isinstance(returned, (list, tuple)):
            return cls(method, dict(enumerate(returned)), "list", combined)
        return cls(method, {} if returned is None else {"": returned}, "one", combined)

    @property
    def has_several(self) -> bool:
        """Whether the loaders are in a list or dict."""
        return self.form != "one"

    def name(self, key: Any) -> str:
        """Return the name of one of the loaders for errors."""
        return f"{self.method}[{key!r}]" if self.has_several else self.method

    def rebuild(self, by_key: Mapping[Any, Any]) -> Any:
        """Return other values in the list or dict of these loaders."""
        if self.form == "one":
            return by_key[""]
        return [*by_key.values()] if self.form == "list" else dict(by_key)

    def combine(self, by_key: Mapping[Any, Any]) -> Any:
        """Return other loaders in the list, dict or CombinedLoader of these."""
        if self.combined is None:
            return self.rebuild(by_key)
        key_of = {id(loader): key for key, loader in self.loaders.items()}
        combined = copy(self.combined)
        combined.flattened = [by_key[key_of[id(loader)]] for loader in self.combined.flattened]
        return combined


class LoadersModule(L.LightningDataModule):
    """A data module that returns existing loaders."""

    def __init__(self, **by_split: Any) -> None:
        super().__init__()
        self._by_split = by_split

    @override
    def train_dataloader(self) -> Any:
        return self._by_split["train"]

    @override
    def val_dataloader(self) -> Any:
        return self._by_split["val"]

    @override
    def test_dataloader(self) -> Any:
        return self._by_split["test"]

    @override
    def predict_dataloader(self) -> Any:
        return self._by_split["predict"]
