"""`Results`: a column that training made, for samplers and subsets."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from typing_extensions import override

from lightning_memmap.errors import ReprAsCall, StoreError, check_integer, nearest
from lightning_memmap.results.reading import (
    check_dataset,
    check_keep,
    folders_of,
    read_epochs,
    read_latest,
)
from lightning_memmap.results.writer import ResultWriter
from lightning_memmap.sampling.columns import (
    Column,
    ColumnValues,
    ColumnVersion,
    DatasetIdentity,
)


@dataclass(frozen=True, repr=False)
class Results(ReprAsCall, Column):
    """Results per row, for use in place of the name of a field: a field that training made.

    Pass it to ``Weighted``, ``Bucketed``, ``Subset(field=..., where=...)`` or another selection.
    Only committed values are used, so each process reads the same ones, and so does a resumed
    run. Checkpoints store the epoch and a digest of the values, and a run that is resumed
    inside an epoch with other values is an error.

    Args:
        path: The folder of `lightning_memmap.callbacks.RowResults`. If it contains ``{member}``,
            the results of all members are joined, as by
            `lightning_memmap.results.read_row_results`.
        key: The key of the results, which must have one value in each row: its latest value, if
            the row was not in the last epoch.
        function: Instead of ``key``: a function of what `read_row_results` returns, a TensorDict of
            shape (N,), or (epochs, N) with ``keep``. It returns one value for each row, of shape
            (N,); NaN if a row has none.
        keep: The epochs that the function receives: ``"last"``, ``"all"`` or the number of last
            epochs.
        epoch: Read the results up to this epoch only; by default all that are committed at set-up.
        each_epoch: Use the results of the run itself: epoch ``e`` uses those of epochs up to
            ``e - 1``, and epoch 0 uses none. The run needs
            ``RowResults(path, ...)`` among its callbacks. Only for ``Weighted``.

    Raises:
        TypeError: ``function`` is not callable.
        ValueError: Neither ``key`` nor ``function`` is passed, or both; ``keep`` is passed without
            a function; ``epoch`` is negative; or ``each_epoch`` is combined with ``epoch`` or
            ``{member}``.
    """

    path: str | Path
    key: str | None = None
    function: Callable[..., Any] | None = None
    keep: str | int = "last"
    epoch: int | None = None
    each_epoch: bool = False

    def __post_init__(self) -> None:
        if (self.key is None) == (self.function is None):
            raise ValueError(f"{self!r}: pass either a key or a function of the results")
        if self.function is not None and not callable(self.function):
            raise TypeError(f"Results: function={self.function!r}: pass a function of the results")
        check_keep(self.keep)  # type: ignore[arg-type]
        if self.keep != "last" and self.function is None:
            raise ValueError(
                f"{self!r}: keep is for a function of several epochs. A key has the latest value of"
                " each row"
            )
        if self.epoch is not None:
            check_integer("epoch", self.epoch, 0, "epochs are counted from 0")
        if self.each_epoch and self.epoch is not None:
            raise ValueError(f"{self!r}: each_epoch=True reads other epochs: remove one of them")
        if self.each_epoch and "{member}" in str(self.path):
            raise ValueError(
                f"{self!r}: each_epoch=True uses the results of one run: put the number of the"
                " member into the path, strategy.member"
            )

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return {"key": self.key or getattr(self.function, "__name__", "function")}

    @property
    @override
    def remedy(self) -> str:
        if self.key is None:
            return "let the function return other values, or NaN for rows without one"
        which = ", each_epoch=True" if self.each_epoch else ""
        which = which if self.epoch is None else f", epoch={self.epoch}"
        return (
            f"pass Results({str(self.path)!r}, function=lambda results:"
            f" results[{self.key!r}].clamp(0, 100){which}) or another function instead of the key."
            " NaN from a function means that the row has no value"
        )

    @override
    def check_trainer(self, trainer: Any) -> None:
        """Check that a run writes the results that it uses; see `Column.check_trainer`."""
        path = Path(self.path).resolve()
        writers = (
            callback
            for callback in trainer.callbacks
            if isinstance(callback, ResultWriter) and callback.split == "train"
        )
        writer = next((each for each in writers if each.path_in(trainer) == path), None)
        if writer is None:
            key = self.key or "loss"
            raise ValueError(
                f"{self!r}: this run doesn't write results of training to {self.path}: add"
                f" RowResults({str(self.path)!r}, [{key!r}]) to the callbacks of the Trainer"
            )
        if self.key is not None and self.key not in writer.keys:
            raise ValueError(
                f"{self!r}: RowResults({str(self.path)!r}, {[*writer.keys]}) doesn't write this"
                f" key{nearest(self.key, writer.keys)}: add it to the keys"
            )

    @override
    def read(self, dataset: DatasetIdentity, before: int | None = None) -> ColumnValues:
        """Read the column; see `Column.read`."""
        limit = before
        if self.epoch is not None:
            limit = self.epoch + 1
        check_dataset(self.path, dataset)
        folders = folders_of(self.path)
        if limit is not None and not all(limit - 1 in folder.epochs() for folder in folders):
            raise StoreError(
                f"{self!r}: there are no results of epoch {limit - 1} in {self.path}: train with"
                f" callbacks=[RowResults({str(self.path)!r}, ...)]"
            )
        if self.key is not None:
            values, has_value, epoch = read_latest(self.path, self.key, limit)
        else:
            table = read_epochs(self.path, self.keep, limit)  # type: ignore[arg-type]
            epoch = int(table["epoch"].max())
            values = self._computed(table)
            has_value = torch.ones(len(values), dtype=torch.bool)
            if values.is_floating_point() and values.ndim == 1:
                has_value = ~values.isnan()
        if values.ndim != 1:
            raise ValueError(
                f"{self!r}: a value of shape {tuple(values.shape[1:])} for each row: pass"
                " function=..., which returns one number for each row"
            )
        if len(values) != dataset.num_rows:
            raise ValueError(
                f"{self!r}: results of {len(values)} rows, and the dataset has {dataset.num_rows}:"
                " use results for the same dataset, and for the same windows"
            )
        array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        digest = xxhash.xxh3_128(f"{array.dtype.str} {array.shape} ".encode())
        for part in (array, has_value.numpy()):
            digest.update(np.ascontiguousarray(part).data)
        return ColumnValues(array, has_value.numpy(), ColumnVersion(epoch, digest.hexdigest()))

    def _computed(self, table: Any) -> torch.Tensor:
        """Return what the function makes of the results."""
        assert self.function is not None
        values = torch.as_tensor(self.function(table))
        if not values.ndim or values.device.type != "cpu":
            raise ValueError(
                f"{self!r}: the function returned {values.dtype} of shape {tuple(values.shape)} on"
                f" {values.device}: return one value for each row, on the CPU"
            )
        return values.detach()
