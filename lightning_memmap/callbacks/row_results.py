"""Stores what each step computes for its rows, by row of the dataset."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.callbacks.ranks import fill_member, is_last_with_its_rows
from lightning_memmap.data.splits import SplitName
from lightning_memmap.errors import SchemaError, with_article
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.ranks import raise_on_all_ranks
from lightning_memmap.results.folder import ResultFolder, Run, digest_of
from lightning_memmap.results.parts import PartHeader, PartWriter, RowSlots
from lightning_memmap.results.row_log import logged_rows
from lightning_memmap.results.writer import ResultWriter
from lightning_memmap.schema.fields import Field, dtype_name, field_name

#: Names that `read_row_results` adds.
_RESERVED = ("seen", "epoch", "row_number")
_STAGES = {"train": "training_step", "val": "validation_step", "test": "test_step"}
#: Steps whose values are written at once. On a GPU, each write waits for the device.
_PENDING_STEPS = 256
_PENDING_BYTES = 16 * 2**20


class RowResults(ResultWriter, L.Callback):
    """Stores what each step returns for its rows, such as their losses, by row of the dataset.

    ``training_step`` returns a dict with the mean loss and, under each of ``keys``, a tensor of
    shape (B, ...), whose first dimension is the rows of the batch; or it calls ``self.log_rows`` of
    `lightning_memmap.results.RowLog`. If documents are packed, there is a value for each document,
    of shape (B, max_documents, ...) as `Packing.document_means` returns it; a document that is cut
    has the value of its last piece in the order. Shape and dtype of a row must not change. Row
    numbers are known from the order, so the batch need not contain them. Read the results with
    `lightning_memmap.results.read_row_results`.

    Each process writes its own rows, without communication in a step. At the end of an epoch rank
    zero merges them into a store with checksums, ``<path>/epoch-000003``, and needs memory for one
    value per row of the dataset. A run that is killed leaves the epochs before. If it is resumed
    inside an epoch, the rows before the checkpoint keep their results; resumed from an earlier
    checkpoint, the run replaces the results of later epochs. Rows without a value are masked. A row
    that is drawn more than once in an epoch has its last value, by position in the order.

    All ranks must run this callback, and share one file system at ``path``.

    Args:
        path: Folder of the results of one run. Under ``memmap_independent``, ``{member}`` in the
            path is replaced by the number of the member.
        keys: Keys of what the step returns.
        split: ``"train"``, ``"val"`` or ``"test"``; ``"val/clean"`` or ``"val/1"`` for one of
            several loaders. Use one callback for each, with its own path. Validation during a fit
            replaces the results of the same epoch.
        overwrite: Replace the results of another run, when this one begins.

    Raises:
        TypeError: ``keys`` is a string.
        ValueError: A key or the split cannot be used; the rows of the batches are unknown, because
            the loader is not of a `MemmapDataModule`; ``{member}`` is in the path under another
            strategy; or what a step returned lacks a key or has another number of rows.
        SchemaError: Rows have another shape or dtype than those before.
        StoreError: ``path`` has the results of another run or something else, or processes have
            results of different fields.
        RankMismatchError: Another rank failed at the beginning or the end of an epoch.
    """

    def __init__(
        self,
        path: str | Path,
        keys: Sequence[str],
        *,
        split: str = "train",
        overwrite: bool = False,
    ) -> None:
        if isinstance(keys, str):
            raise TypeError(f"RowResults: keys={keys!r}: pass a list, such as [{keys!r}]")
        self.path = Path(path)
        self.keys = tuple(keys)
        for key in self.keys:
            if not isinstance(key, str) or field_name((key,)) != key or key in _RESERVED:
                raise ValueError(
                    f"RowResults: keys: {key!r} cannot name results. Use letters, digits and _, and"
                    f" none of {', '.join(_RESERVED)}"
                )
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(f"RowResults: keys={list(keys)}: pass at least one key, each once")
        self._stage, self._loader_name = SplitName.parse(split)
        if self._stage not in _STAGES or (self._stage == "train" and self._loader_name):
            raise ValueError(
                f"RowResults: split={split!r}: choose from {', '.join(_STAGES)}, or one of several"
                " loaders such as 'val/clean'"
            )
        self.split = split
        self.overwrite = overwrite
        #: Identifies the run in checkpoints and in the folder; "" before it begins.
        self._run = ""
        self._attempt = ""
        self._folder = ResultFolder(self.path)
        self._writes = False
        #: Whether results of later epochs, which the run repeats, have been removed.
        self._is_rewound = False
        self._loader: SuperBatchLoader | None = None
        self._loader_index = 0
        self._fields: tuple[Field, ...] = ()
        self._part: PartWriter | None = None
        self._slots: RowSlots | None = None
        self._pending: list[tuple[int, list[Tensor]]] = []
        #: Steps that are written at once. The first step shows errors, and their bytes.
        self._max_pending = 1

    @property
    @override
    def state_key(self) -> str:
        """The key in checkpoints, which differs between callbacks of one Trainer."""
        return f"{type(self).__qualname__}[{self.split}, {self.path}, {', '.join(self.keys)}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the run, so that one resumed from the checkpoint continues its results."""
        return {"run": self._run}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the results of the run that saved a checkpoint."""
        self._run = str(state_dict["run"])

    @override
    def path_in(self, trainer: L.Trainer) -> Path:
        """Return the folder that it writes to in a run, with the member filled in."""
        return fill_member(self.path, trainer, self).resolve()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Fill the member into the path, and check that no other callback writes there."""
        path = self.path_in(trainer)
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if (
                other is not self
                and isinstance(other, RowResults)
                and other.path_in(trainer) == path
            ):
                raise ValueError(
                    f"RowResults: path={str(self.path)!r} belongs to two callbacks, with"
                    f" split={self.split!r}, keys={[*self.keys]} and split={other.split!r},"
                    f" keys={[*other.keys]}: pass all keys of a split to one callback, and another"
                    " path for each split"
                )
        self._folder = ResultFolder(path)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the loader, and claim the folder."""
        if self._stage == "train":
            self._begin(trainer, trainer.train_dataloader)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Forget what the last step has logged for its rows."""
        logged_rows(pl_module).clear()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the results of the step until some steps are written at once."""
        if self._stage == "train":
            self._keep(trainer, pl_module, outputs, batch_idx)

    @override
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Bring all results to the disk, because the run may be resumed from here."""
        if self._stage != "train" or self._loader is None:
            return
        # After an exception, other ranks may not get here.
        with nullcontext() if trainer.interrupted else raise_on_all_ranks():
            # Rank zero saves the checkpoint once all ranks have written their rows.
            self._write_all(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Commit the epoch."""
        if self._stage == "train":
            self._commit(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the loader, and claim the folder."""
        if self._is_evaluated(trainer):
            self._begin(trainer, getattr(trainer, f"{self._stage}_dataloaders"))

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the results of the step until some steps are written at once."""
        if self._is_evaluated(trainer) and dataloader_idx == self._loader_index:
            self._keep(trainer, pl_module, outputs, batch_idx)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Commit the results."""
        if self._is_evaluated(trainer):
            self._commit(trainer)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start
    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _is_evaluated(self, trainer: L.Trainer) -> bool:
        """Return whether the Trainer evaluates the split, and not only for a sanity check."""
        stage = trainer.state.stage
        assert stage is not None
        return not trainer.sanity_checking and stage.dataloader_prefix == self._stage

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Commit the last epoch of a run that was killed after its last step."""
        # Lightning starts no training if the checkpoint has all of its steps.
        if self._stage == "train" and self._loader is None and self._run:
            self._begin(trainer, trainer.train_dataloader)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Write all results and close the files, because a checkpoint may be saved after this."""
        try:
            self._write_all(trainer)
        finally:
            self._close()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the files."""
        self._close()
        self._loader = None

    def _begin(self, trainer: L.Trainer, loaders: Any) -> None:
        """Claim the folder for the run, or raise on all ranks. All ranks must call this."""
        self._close()
        self._fields = ()
        self._is_rewound = False
        with raise_on_all_ranks():
            self._loader_index, self._loader = self._find_loader(loaders)
        loader = self._loader
        assert loader is not None
        self._writes = is_last_with_its_rows(trainer)
        names = self._run or secrets.token_hex(8), secrets.token_hex(4)
        self._run, self._attempt = trainer.strategy.broadcast(names)
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                run = Run(
                    run=self._run,
                    num_rows=loader.order.pool.rows.num_dataset_rows,
                    dataset=dict(loader.contents),
                )
                self._folder.claim(run, overwrite=self.overwrite)
                if self._stage == "train":
                    # A checkpoint of the last step may be older than the end of its epoch, and the
                    # order of the next one may need its results.
                    start = loader.start_state
                    is_complete = not loader.num_steps_of(start.epoch, start.position)
                    epoch = start.epoch + is_complete
                    self._folder.finish(self._run, loader.order, epoch)

    def _find_loader(self, loaders: Any) -> tuple[int, SuperBatchLoader]:
        """Return the loader of the split, and its index."""
        if isinstance(loaders, (list, tuple)):
            loaders = dict(enumerate(loaders))
        if not isinstance(loaders, Mapping):
            loaders = {"": loaders}
        names = [str(name) for name in loaders]
        if self._loader_name not in names:
            raise ValueError(
                f"RowResults: split={self.split!r}: the {self._stage} loaders are"
                f" {', '.join(map(repr, names))}. Choose one, such as"
                f" split='{self._stage}/{names[0]}'"
            )
        index = names.index(self._loader_name)
        loader = [*loaders.values()][index]
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if not isinstance(sampler, SuperBatchLoader):
            raise ValueError(
                f"RowResults: the rows in the batches of {with_article(type(loader).__name__)} are"
                " unknown. Use the loaders of a MemmapDataModule"
            )
        return index, sampler

    def _keep(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, step: int) -> None:
        """Keep the values of a step until some steps are written at once."""
        logged = logged_rows(module)
        returned = outputs if isinstance(outputs, Mapping) else {}
        # After a training_step that returned None, the outputs are {}.
        is_skipped = not logged and (outputs is None or (outputs is returned and not returned))
        if not self._writes or is_skipped:
            return
        values = []
        for key in self.keys:
            # Lightning makes {"loss": ...} of a step that returns its loss.
            value = logged.get(key, returned.get(key))
            if not isinstance(value, Tensor) or not value.ndim:
                raise self._lacking({**outputs, **logged} if returned else outputs, key, step)
            # A copy: the module may reuse the memory, and a view would keep all of it.
            values.append((value.detach() if value.requires_grad else value).clone())
        self._pending.append((step, values))
        if len(self._pending) >= self._max_pending:
            self._flush(trainer)

    def _write_all(self, trainer: L.Trainer) -> None:
        """Bring the training results of all steps to the disk."""
        if self._stage == "train":
            self._flush(trainer)
            if self._part is not None:
                self._part.sync()

    def _flush(self, trainer: L.Trainer) -> None:
        """Write the values of pending steps."""
        if not self._pending:
            return
        loader = self._loader
        assert loader is not None
        pending = self._pending
        self._pending = []
        ranges = loader.local_positions([step for step, _ in pending])
        rank, size = find_data_parallel_rank(trainer.strategy)
        if self._part is None:
            start = loader.start_state
            self._slots = RowSlots(loader.order, start.epoch, rank, size)
        slots = self._slots
        assert slots is not None
        for (step, values), positions in zip(pending, ranges, strict=True):
            self._check(step, values, slots.batch_shape(len(positions)))
        if self._part is None:
            self._rewind(trainer, loader)
            self._part = self._new_part(trainer, loader)
            step_bytes = max(1, sum(value.nbytes for value in pending[0][1]))
            self._max_pending = min(_PENDING_STEPS, _PENDING_BYTES // step_bytes)
        first = 0
        for index, positions in enumerate(ranges):
            # Steps may be skipped.
            end = positions.start + len(positions) * size
            if index + 1 < len(ranges) and ranges[index + 1].start == end:
                continue
            columns = zip(*(values for _, values in pending[first : index + 1]), strict=True)
            run = range(ranges[first].start, end, size)
            joined = [slots.unpack(torch.cat(tensors).cpu(), run) for tensors in columns]
            self._part.write(slots.slot(run.start), len(joined[0]), joined)
            first = index + 1

    def _check(self, step: int, values: Sequence[Tensor], batch_shape: tuple[int, ...]) -> None:
        """Check the values of a step. The first step defines the fields."""
        num = len(batch_shape)
        self._fields = self._fields or tuple(
            Field(key, value.dtype, tuple(value.shape[num:]))
            for key, value in zip(self.keys, values, strict=True)
        )
        for field, value in zip(self._fields, values, strict=True):
            if value.shape[:num] != batch_shape:
                expected = "(B, ...)" if num == 1 else "(B, max_documents, ...)"
                item = "row" if num == 1 else "document of each pack"
                raise ValueError(
                    f"{_STAGES[self._stage]}, batch {step}: {field.name!r} has shape"
                    f" {tuple(value.shape)}: return a tensor of shape {expected}, which begins with"
                    f" {batch_shape} in this batch, with a value for each {item}"
                )
            if (value.dtype, value.shape[num:]) != (field.dtype, field.shape):
                raise SchemaError(
                    f"{_STAGES[self._stage]}, batch {step}: values of {field.name!r} are"
                    f" {dtype_name(value.dtype)} of shape {tuple(value.shape[num:])}, and earlier"
                    f" ones {field}"
                )

    def _rewind(self, trainer: L.Trainer, loader: SuperBatchLoader) -> None:
        """Remove the results of steps that the run repeats, before it writes the first ones."""
        is_first = find_data_parallel_rank(trainer.strategy)[0] == 0
        if is_first and self._stage == "train" and not self._is_rewound:
            start = loader.start_state
            self._folder.rewind(self._run, loader.order, start.epoch, start.position, self._attempt)
            self._is_rewound = True

    def _new_part(self, trainer: L.Trainer, loader: SuperBatchLoader) -> PartWriter:
        """Create the part of this process for the epoch."""
        start = loader.start_state
        rank, size = find_data_parallel_rank(trainer.strategy)
        header = PartHeader(
            run=self._run,
            order=digest_of(loader.order),
            order_epoch=start.epoch,
            rank=rank,
            size=size,
            start=start.position,
            stop=loader.order.num_positions,
            fields=self._fields,
        )
        name = f"{self._attempt}-{trainer.global_rank}"
        return self._folder.new_part(self._epoch_of(trainer, loader), name, header)

    def _epoch_of(self, trainer: L.Trainer, loader: SuperBatchLoader) -> int:
        """Return the epoch of the results: of the order, or of the fit that is validated."""
        return loader.start_state.epoch if self._stage == "train" else trainer.current_epoch

    def _commit(self, trainer: L.Trainer) -> None:
        """Commit the epoch, or raise on all ranks. All ranks must call this."""
        loader = self._loader
        assert loader is not None
        with raise_on_all_ranks():
            self._flush(trainer)
            self._close()
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                epoch = self._epoch_of(trainer, loader)
                part_prefix = "" if self._stage == "train" else self._attempt
                # As the checkpoints of this moment have them.
                step = str(trainer.global_step)
                self._folder.commit(self._run, loader.order, epoch, part_prefix, step=step)

    def _close(self) -> None:
        self._pending = []
        self._max_pending = 1
        if self._part is not None:
            self._part.close()
            self._part = None

    def _lacking(self, outputs: Any, key: str, step: int) -> ValueError:
        """Return the error for a step that returned no rows under a key."""
        returned = with_article(type(outputs).__name__)
        if isinstance(outputs, Mapping):
            shapes = (
                f"{name!r} of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else repr(name)
                for name, value in outputs.items()
            )
            returned = ", ".join(shapes)
        return ValueError(
            f"RowResults: {_STAGES[self._stage]}, batch {step}: {key!r} must be a tensor of shape"
            f" (B, ...) with a value for each row of the batch, and it returned {returned}. Return"
            f" a dict, such as {{'loss': losses.mean(), 'row_loss': losses}} for keys=['row_loss'],"
            " or call self.log_rows('row_loss', losses)"
        )
