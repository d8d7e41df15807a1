"""Sharding a module with FSDP2, which starts from the values of rank 0."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_memmap._compat.fsdp2 import is_gathered_otherwise
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies.common.checked import STEPS
from lightning_memmap.strategies.common.meta_device import MetaInitializer, post_order
from lightning_memmap.strategies.sharding.units import has_parameters, manual_roots, parameter_names

#: Layers whose running statistics stay float32 in mixed precision, and so must their parameters.
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def shard_module(
    module: L.LightningModule,
    units: Sequence[nn.Module],
    device: torch.device,
    policy: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool | int | None,
    **options: Any,
) -> None:
    """Broadcast the values of rank 0, and shard the units and then the module itself.

    Args:
        module: The module. Nothing of it is sharded.
        units: The submodules to shard as units.
        device: The device of this process.
        policy: The dtypes of units, except for layers with running statistics.
        reshard_after_forward: As for ``fully_shard``, like all other options.
        **options: As for ``fully_shard``.
    """
    for parameter, names in parameter_names(module).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{names[0]} is a DTensor already: memmap_fsdp2 shards the module itself; remove"
                " that from configure_model, or use Lightning's ModelParallelStrategy"
            )
        if parameter.is_meta and len(names) > 1:
            raise UnsuitableModuleError(
                f"{' and '.join(names)}: one parameter on the meta device, which would become"
                f" {len(names)}; build the modules that share it on the CPU"
            )
    roots = [module] if module.automatic_optimization else manual_roots(module)
    policies = dict.fromkeys([*units, *roots], policy)
    float32 = MixedPrecisionPolicy(None, torch.float32, None, False)
    if policy.param_dtype is not None:
        normed = [child for child in module.modules() if isinstance(child, _STATISTICS)]
        policies |= dict.fromkeys(filter(has_parameters, normed), float32)

    initializer = MetaInitializer(module)
    for child in dict.fromkeys(post_order(module)):
        changed = initializer.initialize(child, device)
        for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
            # An expanded buffer can't be written to, and FSDP2 needs contiguous parameters.
            tensor.data = tensor.data.to(device).contiguous()
            broadcast(tensor, 0)
        for tensor in changed:
            # Tensors of submodules that an initializer has written again. Shards stay as they are.
            if not isinstance(tensor, DTensor):
                broadcast(tensor, 0)
        if (child_policy := policies.get(child)) is not None:
            # By default FSDP2 keeps what the root gathered, and frees everything else.
            reshard = False if child_policy is float32 else reshard_after_forward
            fully_shard(child, reshard_after_forward=reshard, mp_policy=child_policy, **options)
            # Before FSDP2's own hook.
            child.register_forward_pre_hook(_gather_again_if_thawed, prepend=True)
    if module in policies:
        for name in STEPS:
            register_fsdp_forward_method(module, name)


def recompute_activations(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let units compute their activations again in the backward pass."""
    if not units:
        raise ValueError(
            f"activation_checkpointing=True: the {type(module).__name__} has no units whose"
            " activations could be recomputed; choose some by wrap_classes or a smaller"
            " min_unit_parameters"
        )
    for unit in units:
        # It then keeps only its inputs. The names of parameters do not change.
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return the module and the submodules that FSDP2 gathers."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def reshard_if_thawed(units: Iterable[Any]) -> None:
    """Free what units have gathered if parameters have been frozen or thawed since."""
    # FSDP2 reads requires_grad only when it gathers, and roots stay gathered after a forward pass
    # until a backward pass reaches them.
    for unit in filter(is_gathered_otherwise, units):
        unit.reshard()


def _gather_again_if_thawed(unit: nn.Module, _: Any) -> None:
    reshard_if_thawed([unit])
