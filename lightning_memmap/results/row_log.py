"""`RowLog`: ``self.log_rows`` for a LightningModule."""

from typing import Any

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
        """Log a value for each row of the batch.

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
    rows: dict[str, Tensor] = getattr(module, _LOGGED, {})
    return rows


def take_logged_rows(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has logged, and forget it."""
    rows = logged_rows(module)
    taken = dict(rows)
    rows.clear()
    return taken
