"""Checkpoints of every step of one variant, and runs of several that go on from some of them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Subset

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Mixture, Weighted
from lightning_memmap.schema import Windows
from tests.distributed.scenarios.training import make_strategy
from tests.models import Points, Regression, make_trainer, weights

EPOCHS = 2


class InterruptError(Exception):
    pass


class Recorder(Regression):
    """Notes the rows of each epoch.

    Args:
        interrupt: The step that fails, counted from 0.
    """

    def __init__(self, interrupt: int | None = None) -> None:
        super().__init__()
        self.interrupt = interrupt
        self.rows: dict[int, list[list[int]]] = {epoch: [] for epoch in range(EPOCHS)}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupt:
            raise InterruptError
        self.rows[self.current_epoch].append(batch["row"].tolist())
        return self.step(batch, "train")


class SaveOnError(L.Callback):
    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "saved", "interrupted.ckpt"))


def fit(
    out: Path,
    rows: int,
    strategy: str,
    devices: int,
    batch_size: int,
    strategy_options: dict[str, Any] | None = None,
    accumulate: int = 1,
    checkpoint: str | None = None,
    save: bool = False,
    interrupt: int | None = None,
    in_windows: bool = False,
    in_sets: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, from the start or from a checkpoint, and tell which rows each epoch had.

    Where it is ``in_windows``, the rows are the steps of some series, which are cut into windows;
    ``in_sets``, two sets are mixed.
    """
    dataset: Any = Points(rows)
    if in_windows:
        whole = vars(dataset)
        dataset = [{name: whole[name][i : i + 40] for name in whole} for i in range(0, rows, 40)]
        options["variable"] = dict.fromkeys(whole, Windows(3, 2))
    if in_sets:
        parts = {"few": range(30), "many": range(30, rows)}
        dataset = {name: Subset(dataset, part) for name, part in parts.items()}
        options["sampler"] = Mixture({"few": 0.5, "many": 0.5})
    stores = out / ("series" if in_windows else "sets" if in_sets else "stores")
    data = MemmapDataModule(dataset, store_dir=stores, batch_size=batch_size, **options)
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=EPOCHS,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=save,
        callbacks=[saver] if save else [SaveOnError()],
    )
    module = Recorder(interrupt)
    trainer.fit(module, data, ckpt_path=checkpoint and out / "saved" / checkpoint)
    return {"rows": module.rows, "weights": weights(module)}


def save_and_resume(
    out: Path, rows: int, variant: dict[str, Any], steps: list[int], others: list[dict[str, Any]]
) -> dict[str, Any]:
    """Train one variant with a checkpoint of every step; go on from some, on it and on others.

    Returns:
        ``whole``, the run of the variant; by step, ``resumed``: the runs of the variant and of the
        others from there; and ``interrupted``: a run of the variant that goes on after an error
        inside of the step after the first one of them.
    """
    whole = fit(out, rows, **variant, save=True)
    with suppress(InterruptError):
        fit(out, rows, **variant, interrupt=steps[0])
    interrupted = fit(out, rows, **variant, checkpoint="interrupted.ckpt")
    resumed = {
        step: [fit(out, rows, **run, checkpoint=f"step={step}.ckpt") for run in (variant, *others)]
        for step in steps
    }
    return {"whole": whole, "resumed": resumed, "interrupted": interrupted}


def weighted_sampler(rows: int) -> Weighted:
    """Rows by weight, more than there are, some of which never come."""
    return Weighted([float(row % 7) for row in range(rows)], num_samples=2 * rows)


def weighted(out: Path, rows: int, variant: dict[str, Any], step: int) -> dict[str, Any]:
    """Train on rows drawn by weight with checkpoints, and from one of the checkpoints.

    Returns:
        By name, the runs.
    """
    sampler = weighted_sampler(rows)
    return {
        "whole": fit(out, rows, **variant, save=True, sampler=sampler),
        "resumed": fit(out, rows, **variant, sampler=sampler, checkpoint=f"step={step}.ckpt"),
    }


def stream_and_mapping(
    out: Path, rows: int, variant: dict[str, Any], window: int, step: int
) -> dict[str, Any]:
    """Train over the mapping with checkpoints, over the stream, over the stream from one of the
    checkpoints, over windows of series, and over a mixture in the same ways; and test what a stream
    gives where it is not shuffled.

    Returns:
        By name, the runs; and the rows of each step of an epoch of test.
    """
    streamed = {"residency": "stream", "shuffle_window": window}
    runs = {
        "mapping": fit(out, rows, **variant, save=True, shuffle_window=window),
        "stream": fit(out, rows, **variant, **streamed),
        "resumed": fit(out, rows, **variant, **streamed, checkpoint=f"step={step}.ckpt"),
        "windows": fit(out, rows, **variant, **streamed, in_windows=True),
        "mixture of the mapping": fit(
            out / "mixed", rows, **variant, save=True, shuffle_window=window, in_sets=True
        ),
        "mixture": fit(
            out / "mixed", rows, **variant, **streamed, in_sets=True, checkpoint=f"step={step}.ckpt"
        ),
    }
    data = MemmapDataModule(
        test_dataset=Points(rows), store_dir=out / "tests", batch_size=8, **streamed
    )
    module = Recorder()
    make_trainer(out, strategy=variant["strategy"], devices=variant["devices"]).test(
        module, data, verbose=False
    )
    return {**runs, "tested": module.seen["test"]}
