"""Shards a LightningModule: its units, with their precision and what they keep."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lightning_memmap.strategies.sharding.options import ShardingOptions
from lightning_memmap.strategies.sharding.precision import ShardedPrecision, cast_buffers
from lightning_memmap.strategies.sharding.units import (
    STATISTICS,
    modules_of_classes,
    modules_of_size,
    recompute,
    roots,
    shard,
    without_shared,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_module(
    module: L.LightningModule,
    mesh: DeviceMesh,
    device: torch.device,
    options: ShardingOptions,
    precision: ShardedPrecision,
) -> dict[str, Tensor]:
    """Shard a module. All ranks must call it.

    Args:
        module: The module, whose weights are converted first, as the precision has them.
        mesh: The processes that it is sharded over, and replicated over with HSDP.
        device: The device of this process.
        options: How it is sharded.
        precision: The dtype of weights, and what units compute in.

    Returns:
        By name, the values of buffers before they were cast.

    Raises:
        ValueError: It is sharded already, or cannot be as the options say.
        UnsuitableModuleError: A module on the meta device cannot be initialised.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor already: memmap_fsdp2 shards the module itself; leave that"
                " out of configure_model, or use Lightning's ModelParallelStrategy"
            )
    precision.convert_module(module)
    compute_dtype = precision.compute_dtype
    units = _units(module, options)
    outermost = [module] if module.automatic_optimization else _outermost(module)
    _checkpoint_activations(module, units, options)
    reduce_dtype = options.reduce_dtype or (compute_dtype and torch.float32)
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    # The outermost units cast what the user's step receives and returns.
    outer = MixedPrecisionPolicy(
        compute_dtype, reduce_dtype, options.output_dtype, options.cast_batch
    )
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    make = partial(fully_shard, mesh=mesh, offload_policy=offload)
    # By default FSDP2 keeps what the outermost unit gathered, and frees all else.
    reshard = options.reshard_after_forward
    calls: dict[nn.Module, Any] = {}
    for each, policy_of_each in ((units, policy), (outermost, outer)):
        unit_call = partial(make, mp_policy=policy_of_each, reshard_after_forward=reshard)
        calls |= dict.fromkeys(each, unit_call)
    if compute_dtype is not None:
        exact = MixedPrecisionPolicy(None, torch.float32, None, False)
        for child in module.modules():
            if isinstance(child, STATISTICS) and next(child.parameters(), None) is not None:
                calls[child] = partial(make, mp_policy=exact, reshard_after_forward=False)
    shard(module, device, calls)
    buffers = {} if compute_dtype is None else cast_buffers(module, compute_dtype)
    if module in calls:
        for name in _STEPS:
            register_fsdp_forward_method(module, name)
    return buffers


def _units(module: nn.Module, options: ShardingOptions) -> list[nn.Module]:
    if options.wrap_classes is None:
        units = modules_of_size(module, options.min_unit_parameters)
    else:
        units = modules_of_classes(module, options.wrap_classes, "wrap_classes")
    return without_shared(module, units)


def _outermost(module: L.LightningModule) -> list[nn.Module]:
    """The outermost units in manual optimization.

    The backward pass is then inside of training_step, where FSDP2 would reduce the gradients of
    the module itself too late.
    """
    # A metric, or a loss without parameters, has nothing to shard.
    with_parameters = [each for each in roots(module) if next(each.parameters(), None) is not None]
    units = without_shared(module, with_parameters)
    found = {parameter for unit in units for parameter in unit.parameters()}
    left = [name for name, parameter in module.named_parameters() if parameter not in found]
    if left:
        raise ValueError(
            f"{', '.join(left)}: under manual optimization memmap_fsdp2 shards each child of"
            f" the {type(module).__name__} by itself, and these parameters belong to none of"
            " them, or to several; put them into one submodule that is called"
        )
    return units


def _checkpoint_activations(
    module: nn.Module, units: Sequence[nn.Module], options: ShardingOptions
) -> None:
    wanted = options.activation_checkpointing
    if wanted is False:
        return
    if wanted is True:
        if not units:
            raise ValueError(
                f"activation_checkpointing=True: the {type(module).__name__} has no units to"
                " compute again; choose some by wrap_classes or a smaller"
                f" min_unit_parameters than {options.min_unit_parameters}, or name classes here"
            )
    else:
        units = modules_of_classes(module, wanted, "activation_checkpointing")
    for unit in units:
        recompute(unit)
