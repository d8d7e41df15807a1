"""The only user of names that torch and Lightning keep to themselves."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from typing_extensions import override


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and storages, in Python and in C++, share the memory of a tensor.

    Views, tensors saved for backward, numpy arrays and DLPack capsules all count.
    """
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    # All who ask for the storage itself share one Python object, which C++ counts once.
    return count + sys.getrefcount(storage)


def process_group_size(argument: Any) -> int | None:
    """Processes of a group that an operator of ``torch.distributed`` was given; None if it is none.

    In these calls a group is a script object, from which Python must unbox it.
    """
    if not isinstance(argument, torch._C.ScriptObject):
        return None
    try:
        return int(torch.distributed.ProcessGroup.unbox(argument).size())
    except RuntimeError:  # Another kind of script object, such as the reduce operation.
        return None


def record_cuda_memory_history(is_on: bool) -> None:
    """Let CUDA's allocator keep the history of its allocations, or stop it."""
    torch.cuda.memory._record_memory_history(enabled="all" if is_on else None)


def dump_cuda_memory_snapshot(path: Path) -> None:
    """Write the allocator's history for the viewer at https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


class BatchIndices(_IndexBatchSamplerWrapper):
    """Where Lightning looks for the rows of a batch that a prediction writer is told.

    Args:
        sampler: What Lightning calls ``set_epoch`` of.
        rows: The dataset rows of each step.
    """

    def __init__(self, sampler: Any, rows: Sequence[list[int]]) -> None:
        self.sampler = sampler
        self.seen_batch_indices: Any = rows


class _RenewTrainLoader(L.Callback):
    def __init__(self, epoch: int, num_steps: int) -> None:
        self._epoch = epoch
        self._num_steps = num_steps

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch != self._epoch:
            # The checkpoint is of the last step of its epoch. The Trainer counts the next epoch
            # from zero only where the steps that it has done reach the steps of an epoch.
            trainer.fit_loop.epoch_loop.batch_progress.current.completed = self._num_steps
            self._renew(trainer)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._renew(trainer)

    def _renew(self, trainer: Any) -> None:
        trainer.fit_loop._combined_loader = None
        trainer.callbacks.remove(self)


def renew_train_loader_after_epoch(trainer: Any, epoch: int, num_steps: int) -> None:
    """Let the Trainer ask for the training loader, and its length, anew after an epoch.

    It asks once per fit. That is too seldom where the first epoch was resumed from a checkpoint
    of another number of data devices, and so has another number of steps than the next ones.

    Args:
        trainer: The Trainer.
        epoch: The epoch that is resumed.
        num_steps: The steps of all later epochs.
    """
    trainer.callbacks.append(_RenewTrainLoader(epoch, num_steps))


def validate_anew(trainer: Any) -> None:
    """Let the validation that a checkpoint was saved in be done again, from its first row.

    The Trainer goes back to it and counts the batches that were done before. But it keeps none of
    their metrics, and the loader begins at the first row: the metrics would be those of the first
    rows alone, as many as were left.

    Args:
        trainer: The Trainer, when it asks for the validation loader.
    """
    trainer.fit_loop.epoch_loop.val_loop.restarting = False


class DataParallelMesh(ModelParallelStrategy):
    """Lightning's strategy of a device mesh, with all processes on its data-parallel axis.

    By default it takes as many as there are nodes, and can be told only before they are counted.
    """

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()


def tell_device(module: torch.nn.Module, device: torch.device) -> None:
    """Let ``LightningModule.device`` be a device without moving parameters there."""
    _update_properties(module, device=device)
