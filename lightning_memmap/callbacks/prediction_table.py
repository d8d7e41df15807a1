"""Stores the predictions of all processes in dataset order."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_memmap.callbacks.ranks import fill_member, is_last_with_its_rows
from lightning_memmap.data.splits import check_store_name
from lightning_memmap.errors import SchemaError, StoreError, with_article
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.nested import children_of
from lightning_memmap.ranks import check_ranks_match, gather_from_ranks, raise_on_all_ranks
from lightning_memmap.sampling.rows import default_shards
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.forms import Declared, read_declared
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.table import TableBuild, TableWriter, check_table_path


class PredictionTable(BasePredictionWriter):
    """Writes the predictions of all processes into one store, in the order of the dataset.

    Row ``i`` of the store is the prediction for row ``i`` of the dataset, whichever process
    computed it.

    ``predict_step`` returns tensors whose first dimension is the rows of the batch, in any nesting
    of dicts, tuples, lists, named tuples and dataclasses. If rows differ in length, it returns a
    nested tensor, or a `lightning_memmap.loading.RowList` of tensors, str or bytes. The
    store has the same structure, and the same shards as the predicted store. The first batches of
    all processes show in which dimensions rows differ; ``variable`` names further fields.

    Each process writes its own rows batch by batch, so that no process needs memory for more than
    one batch unless predictions are returned as well: use ``trainer.predict(...,
    return_predictions=False)``. At the end rank zero checks that each row was written exactly once,
    and renames the store to ``path``. A run that ends earlier leaves no store, or the old one.

    All ranks must run this callback, and share one file system at ``path``.

    Args:
        path: Directory of the new store, or of the stores of several loaders. Under
            ``memmap_independent`` each member writes its own store, and ``{member}`` in the path is
            replaced by its number.
        overwrite: Replace an existing store. It stays until the new one is complete.
        variable: Fields whose rows may differ in length, or a dict with the number of leading
            dimensions that may, such as ``{"mask": 2}``.

    Raises:
        StoreError: ``path`` exists; a row was not predicted, or predicted twice.
        RankMismatchError: Another rank failed, or predicts rows of other fields.
        SchemaError: ``predict_step`` returned something that cannot be stored, or rows whose shape
            or dtype differs from earlier ones.
        ValueError: Not all batches are predicted, the rows of the batches are unknown, the name of
            a loader can't name a store, or ``{member}`` is in the path under another strategy.
    """

    def __init__(
        self,
        path: str | Path,
        overwrite: bool = False,
        variable: list[str] | dict[str, int] | None = None,
    ) -> None:
        super().__init__("batch")
        self.path = Path(path).resolve()
        self.overwrite = overwrite
        self._declared = read_declared(variable, None)
        self._tables: list[_Table] = []

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there is something to predict, and fill the member into the path."""
        super().setup(trainer, pl_module, stage)
        if stage == "predict":
            self.path = fill_member(self.path, trainer, self)
            if trainer.limit_predict_batches == 0:
                # No other hook is called in this case.
                raise _incomplete(trainer, "no batch")

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the rows of each table, and check that it can be written."""
        self._abandon()
        loaders = _by_path(self.path, trainer.predict_dataloaders)
        for (path, loader), num_batches in zip(
            loaders.items(), trainer.num_predict_batches, strict=True
        ):
            table = _Table(path, self.overwrite, loader, self._declared)
            check_table_path(path, overwrite=self.overwrite)
            if num_batches < len(loader) and not getattr(trainer, "fast_dev_run", False):
                raise _incomplete(trainer, f"{num_batches} of {len(loader)} batches")
            self._tables.append(table)

    @override
    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the rows of a batch. At the first batch, all ranks create the table."""
        self._tables[dataloader_idx].write(trainer, prediction, batch_indices, batch_idx)

    @override
    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Complete the tables on rank zero, while the other ranks wait."""
        for table in self._tables:
            table.finish(trainer, pl_module)
        self._abandon()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Remove what was written."""
        self._abandon()

    def _abandon(self) -> None:
        for table in self._tables:
            table.abandon()
        self._tables = []


class _Table:
    """The table of one loader, as one rank writes it."""

    def __init__(self, path: Path, overwrite: bool, loader: Any, declared: Declared) -> None:
        self._path = path
        self._overwrite = overwrite
        self._declared = declared
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        self._loader = sampler if isinstance(sampler, SuperBatchLoader) else None
        if self._loader is not None:
            order = self._loader.order
            self._num_rows = order.num_positions
            self._num_shards = order.num_shards
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            self._num_rows = len(loader.dataset)  # type: ignore[arg-type]
            self._num_shards = default_shards(self._num_rows)
        else:
            raise _unknown_rows(loader)
        self._schema: Schema | None = None
        self._build: TableBuild | None = None
        self._writer: TableWriter | None = None

    def write(
        self,
        trainer: L.Trainer,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch_idx: int,
    ) -> None:
        values = self._stacked(prediction, batch_idx)
        if not batch_indices:
            raise _unknown_rows(trainer.predict_dataloaders)
        if self._loader is not None:
            # The table has the rows of the loader, which may be a part of the dataset.
            batch_indices = self._loader.step_positions(batch_idx)
        if values[0].num_rows != len(batch_indices):
            raise ValueError(
                f"predict_step, batch {batch_idx}: it returned {values[0].num_rows} rows for a"
                f" batch of {len(batch_indices)}. The first dimension of every tensor must be the"
                f" rows of the batch{_explain_lists(prediction)}"
            )
        if batch_idx == 0:
            assert self._schema is not None
            # The batches of other ranks may show more dimensions that differ.
            self._schema = self._schema.admitting(gather_from_ranks(self._schema))
            self._open(trainer, self._schema)
            values = self._stacked(prediction, batch_idx)
        if self._writer is not None:
            self._writer.write(batch_indices, values)

    def _stacked(self, prediction: Any, batch_idx: int) -> list[Values]:
        """Check the rows of a batch, and stack them."""
        try:
            if self._schema is None:
                self._schema = Schema.from_batch(prediction, self._declared)
            return self._schema.stack_batch(prediction)
        except SchemaError as error:
            raise SchemaError(
                f"predict_step, batch {batch_idx}: {error}{self._needed_declaration(prediction)}"
            ) from error

    def _needed_declaration(self, prediction: Any) -> str:
        """Return the argument that would accept a batch whose rows differ only in shape."""
        if self._schema is None:
            return ""
        try:
            schema = self._schema.admitting([Schema.from_batch(prediction)])
            schema.stack_batch(prediction)
        except SchemaError:
            return ""
        return (
            ". The first batch did not show that these rows differ in length:"
            f" PredictionTable(..., {schema.declared})"
        )

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Complete the table on rank zero. All ranks must call this."""
        with raise_on_all_ranks():
            if self._writer is not None:
                self._writer.close()
        num_written = self._writer.num_written if self._writer is not None else 0
        count = torch.tensor(num_written, device=trainer.strategy.root_device)
        total = int(trainer.strategy.reduce(count, group=dist.group.WORLD, reduce_op="sum"))
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info("PredictionTable: fast_dev_run leaves no table")
            return
        with raise_on_all_ranks():
            if self._build is not None:
                model = type(pl_module)
                self._build.finish(total, predictions=f"{model.__module__}.{model.__qualname__}")
        rank_zero_info(f"PredictionTable: {self._num_rows} rows are at {self._path}")

    def abandon(self) -> None:
        """Remove an incomplete table."""
        if self._writer is not None:
            self._writer.abandon()
        if self._build is not None:
            self._build.abandon()

    def _open(self, trainer: L.Trainer, schema: Schema) -> None:
        """Create the files on rank zero and open them on all ranks, or raise on all ranks."""
        fields = ", ".join(f"{field.name} {field}" for field in schema.fields)
        check_ranks_match({"the table": f"{self._num_rows} rows of {fields} at {self._path}"})
        writes = is_last_with_its_rows(trainer)
        with raise_on_all_ranks():
            draft = Manifest.draft(self._num_rows, self._num_shards, schema)
            if trainer.is_global_zero:
                self._build = TableBuild(self._path, draft, overwrite=self._overwrite)
        token = trainer.strategy.broadcast(self._build.token if self._build is not None else "")
        with raise_on_all_ranks():
            if writes:
                self._writer = TableWriter(self._path, draft, token)


def _explain_lists(prediction: Any) -> str:
    """Return a hint for a prediction with a list, whose items may be meant as rows."""
    if not any(type(container) in (list, tuple) for container in _containers(prediction)):
        return ""
    return (
        ". A list has one field per item. Return a list of rows as a"
        " lightning_memmap.loading.RowList"
    )


def _containers(value: Any) -> Iterator[Any]:
    if (children := children_of(value)) is not None:
        yield value
        for child in children.values():
            yield from _containers(child)


def _by_path(path: Path, loaders: Any) -> dict[Path, Any]:
    """Map the directory of each table to its loader, in the order of the loaders."""
    if isinstance(loaders, (list, tuple)):
        loaders = dict(enumerate(loaders))
    if not isinstance(loaders, dict):
        return {path: loaders}
    if is_store(path):
        raise StoreError(
            f"{path} is a store, but {len(loaders)} loaders need a directory for their stores."
            " Choose another path, or delete this store"
        )
    for name in loaders:
        check_store_name("the predict dataloader", name)
    return {path / str(name): loader for name, loader in loaders.items()}


def _unknown_rows(loader: Any) -> ValueError:
    return ValueError(
        f"PredictionTable: the rows in the batches of {with_article(type(loader).__name__)} are"
        " unknown. Predict with a MemmapDataModule, or a DataLoader over a map-style dataset"
    )


def _incomplete(trainer: L.Trainer, what: str) -> ValueError:
    return ValueError(
        f"limit_predict_batches={trainer.limit_predict_batches}: {what} would be predicted, and a"
        " table has each row of the dataset. Predict all batches, or remove PredictionTable"
    )
