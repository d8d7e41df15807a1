"""`RowLog`: ``self.log_rows`` for a LightningModule."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memmap.errors import with_article

#: The attribute of a module that has what its step has logged.
_LOGGED = "_logged_rows"


class RowLog:
    """Adds ``self.log_rows`` to a LightningModule: ``class Model(RowLog, L.LightningModule)``.

    `lightning_memmap.callbacks.RowResults` stores what is logged under its ``keys``, as if the
    step had returned it. Without the callback nothing is stored. It works in compiled steps.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logged_rows: dict[str, Tensor] = {}

    def log_rows(self, name: str, values: Tensor) -> None:
        """Log a value for each row of the batch, in a step or in the ``loss`` of a pipeline.

        Args:
            name: Name of the values, one of the ``keys`` of `RowResults`.
            values: A tensor of shape (B, ...), whose first dimension is the rows of the batch. A
                second call in a step replaces it.

        Raises:
            TypeError: ``values`` is not a tensor.
        """
        if not isinstance(values, Tensor):
            raise TypeError(
                f"log_rows({name!r}, ...): pass a tensor of shape (B, ...), and not"
                f" {with_article(type(values).__name__)}"
            )
        self._logged_rows[name] = values.detach()


def logged_rows(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has logged in the present step."""
    # Looking up a missing attribute of a module takes microseconds.
    return getattr(module, _LOGGED, {}) if isinstance(module, RowLog) else {}


def take_logged_rows(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has logged, and forget it."""
    rows = logged_rows(module)
    taken = dict(rows)
    rows.clear()
    return taken


def log_again(
    module: nn.Module, logged: dict[str, Tensor], parts: Sequence[dict[str, Tensor]]
) -> None:
    """Log what was taken before, and what the parts of a batch have logged, part after part."""
    if isinstance(module, RowLog):
        names = [name for name in chain(*parts[:1]) if all(name in part for part in parts)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in names}
        module._logged_rows.update({**logged, **joined})
