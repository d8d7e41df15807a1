"""The only user of names that torch and Lightning keep to themselves."""

import copy
import sys
import types
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import (
    _DeviceDtypeModuleMixin,
    _update_properties,
)
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
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


def view_of(original: Any, **members: Any) -> Any:
    """An object that is another one in all but some members: it shares all of its state.

    Args:
        original: An object that keeps its state in its ``__dict__``.
        members: By name; a property, or a value, which then cannot be assigned.
    """
    namespace: dict[str, Any] = {"__slots__": ()}
    for name, member in members.items():
        namespace[name] = member if isinstance(member, property) else _constant(member)
    kind = types.new_class(
        type(original).__name__, (type(original),), exec_body=lambda body: body.update(namespace)
    )
    view: Any = object.__new__(kind)
    object.__setattr__(view, "__dict__", original.__dict__)
    return view


def _constant(value: Any) -> property:
    return property(lambda view: value)


def view_of_strategy(strategy: Any, given_optimizers: list[Any], **members: Any) -> Any:
    """A strategy with other members, and with other optimizers for a module that asks for them."""
    return view_of(strategy, _lightning_optimizers=given_optimizers, **members)


def lightning_optimizers(strategy: Any) -> list[Any]:
    """The optimizers that a module is given, as Lightning wraps them."""
    optimizers: list[Any] = strategy._lightning_optimizers
    return optimizers


def view_of_trainer(trainer: Any, results: Any, **members: Any) -> Any:
    """A Trainer with other members and other results: what ``self.log`` writes to.

    Args:
        trainer: The real one.
        results: Gives the results at each time they are asked for.
        members: As for `view_of`.
    """
    return view_of(trainer, _results=property(lambda view: results()), **members)


def results_of(trainer: Any) -> Any:
    """What ``self.log`` writes to; None in a stage that has nothing of the kind."""
    return trainer._results


class _Divert:
    def __init__(self, module: L.LightningModule, kind: type) -> None:
        self.module = module
        self.kind = kind

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, self.kind):
            return batch
        return before_transfer(self.module, batch, dataloader_idx)


def divert_batches(module: L.LightningModule, kind: type) -> None:
    """Keep batches of a type from ``on_before_batch_transfer``, which is for plain ones."""
    module._on_before_batch_transfer = _Divert(module, kind)  # type: ignore[method-assign]


def end_diversion(module: L.LightningModule) -> None:
    """Undo `divert_batches`."""
    module.__dict__.pop("_on_before_batch_transfer", None)


def before_transfer(module: L.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Run ``on_before_batch_transfer`` of the module, or of its data module, on a plain batch."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def swap_metric_names(module: L.LightningModule, names: Any) -> Any:
    """Exchange the names by which a module knows its metrics; they are found anew where None."""
    before, module._metric_attributes = module._metric_attributes, names
    return before


def own_parts(
    module: nn.Module,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, nn.Module | None]]:
    """The parameters, buffers and children of a module alone, by name, None included."""
    return module._parameters, module._buffers, module._modules


#: The attributes that `own_parts` returns.
PARTS = ("_parameters", "_buffers", "_modules")


def lightning_attributes(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """What a replica of a module on a device keeps otherwise: where it is, which
    ``module.device`` tells, and that it has yet to learn the names of its metrics."""
    if not isinstance(module, _DeviceDtypeModuleMixin):
        return {}
    return {"_device": device, "_metric_attributes": None}


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module holds code that was compiled for this very object."""
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica of it; none for others."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return {}
    return {
        name: context["dynamo_ctx"](types.MethodType(context[f"original_{name}"].__func__, replica))
        for name in ("forward", "training_step", "validation_step", "test_step", "predict_step")
    }


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of the same shapes, in few kernels where they are on one device."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)


def add_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add tensors of the same shapes in place, in few kernels."""
    with torch.no_grad():
        torch._foreach_add_(targets, sources)


def copy_metric(metric: nn.Module, device: torch.device) -> Any:
    """An empty copy of a torchmetrics metric or collection on a device."""
    twin: Any = copy.deepcopy(metric).to(device)
    for part in twin.modules():
        if isinstance(part, MetricCollection):
            # Each metric of a copy has states of its own, to be merged one by one.
            part._enable_compute_groups, part._groups_checked, part._groups = False, False, {}
    twin.reset()
    return twin


def states_without_reduction(metric: Metric) -> list[str]:
    """The tensor states of a metric that cannot be merged."""
    return [
        name
        for name, reduction in metric._reductions.items()
        if reduction is None and isinstance(metric._defaults[name], Tensor)
    ]


def merge_metric(target: Metric, sources: list[Metric]) -> None:
    """Merge the states of metrics into those of another one, each by its ``dist_reduce_fx``.

    Means are weighted by the number of updates, as torchmetrics weighs them.
    """
    updated = [metric for metric in (target, *sources) if metric._update_count]
    # Metrics overload comparison: only their identity says whether they are the same.
    if all(metric is target for metric in updated):
        return
    for name, reduction in target._reductions.items():
        values = [getattr(metric, name) for metric in updated]
        device = target.device
        if isinstance(values[0], list):
            merged: Any = [item.to(device) for value in values for item in value]
        elif reduction is dim_zero_cat:
            merged = torch.cat([value.to(device) for value in values])
        elif reduction is dim_zero_mean:
            counts = torch.tensor([float(metric._update_count) for metric in updated])
            stacked = torch.stack([value.to(device) for value in values])
            weights = (counts / counts.sum()).to(stacked)
            merged = torch.tensordot(weights, stacked, dims=1)
        else:
            merge: Any = reduction
            merged = merge(torch.stack([value.to(device) for value in values]))
        setattr(target, name, merged)
    target._update_count = sum(metric._update_count for metric in updated)
    target._computed = None


def batch_value(metric: Metric) -> Any:
    """What a metric's ``forward`` returned last, None if it was not called since a reset."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Let a metric have returned this from ``forward``."""
    metric._forward_cache = value


def without_computing(module: nn.Module, example: Any) -> None:
    """Run a module's forward on tensors that have shapes and no values.

    Args:
        module: The module; nothing of it changes.
        example: A tensor, a tuple of arguments or a dict of keyword arguments.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        tensors = chain(module.named_parameters(), module.named_buffers())
        fakes: dict[str, Any] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
        fake = apply_to_collection(example, Tensor, mode.from_tensor)
        args, kwargs = ((), fake) if isinstance(fake, dict) else (fake, {})
        torch.func.functional_call(module, fakes, args, kwargs)
