"""`StepSeeder`: dropout that differs between ranks and survives a resume, under any strategy."""

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_memmap.loading.transform import seeded
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.strategies.common.seeded_steps import seed_of_step


class StepSeeder(Callback):
    """Seeds torch's random numbers for each training batch, under Lightning's own strategies.

    After ``seed_everything`` all ranks draw equal numbers there, so that each has the same dropout
    masks, and a resumed fit starts its numbers again. With this callback the numbers of a batch
    depend on the seed, the epoch, the batch and the data-parallel rank alone: ranks differ, except
    within a tensor-parallel group, and a resumed fit draws the numbers of an uninterrupted one.
    The strategies of this package do so without it.

    The seed is `torch.initial_seed` at the beginning of a fit. Call ``seed_everything`` first, with
    the same seed on all ranks. Random numbers of numpy and Python, and those drawn outside of
    training batches, are unchanged.
    """

    def __init__(self) -> None:
        self._seed = 0
        self._stack = ExitStack()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed = torch.initial_seed()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        seed = seed_of_step(trainer, self._seed, find_data_parallel_rank(strategy)[0])
        self._stack.enter_context(seeded(strategy.root_device, seed))

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._stack.close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stack.close()
