"""Sharding a module with FSDP2, which starts from the values of rank 0."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_memmap._compat.fsdp2 import is_gathered_otherwise
from lightning_memmap._compat.modules import empty_own_tensors
from lightning_memmap.process_group import broadcast
from lightning_memmap.ranks import check_ranks_match, gather_from_ranks
from lightning_memmap.strategies.common.base import STEPS
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
    not_loaded: Iterable[str],
    reshard_after_forward: bool | int | None,
    **options: Any,
) -> None:
    """Broadcast the values of rank 0, and shard the units and then the module itself.

    On other ranks, tensors on the meta device get memory only as they are received.

    Args:
        module: The module. Nothing of it is sharded.
        units: The submodules to shard as units.
        device: The device of this process.
        policy: The dtypes of units, except for layers with running statistics.
        not_loaded: Names of parameters that a checkpoint doesn't contain.
        reshard_after_forward: As for ``fully_shard``, like all other options.
        **options: As for ``fully_shard``.
    """
    for parameter, names in parameter_names(module).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{names[0]} is a DTensor already: memmap_fsdp2 shards the module itself; remove"
                " that from configure_model, or use Lightning's ModelParallelStrategy"
            )
    roots = [module] if module.automatic_optimization else manual_roots(module)
    policies = dict.fromkeys([*units, *roots], policy)
    float32 = MixedPrecisionPolicy(None, torch.float32, None, False)
    if policy.param_dtype is not None:
        normed = [child for child in module.modules() if isinstance(child, _STATISTICS)]
        policies |= dict.fromkeys(filter(has_parameters, normed), float32)

    has_values = _check_modules_match(module)
    initializer = None if has_values else MetaInitializer(module, not_loaded)
    for child in dict.fromkeys(post_order(module)):
        changed = [] if initializer is None else initializer.initialize(child, device)
        empty_own_tensors(child, device)
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


def _check_modules_match(module: nn.Module) -> bool:
    """Raise if modules differ between ranks. Return whether rank 0 has the values of all tensors.

    Then others may be on the meta device on other ranks.
    """
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    has_values = gather_from_ranks(not any(tensor.is_meta for _, tensor in named))[0]
    facts: dict[str, object] = {
        f"{name or 'the module itself'}": "training" if child.training else "evaluating"
        for name, child in module.named_modules()
    }
    first_names: dict[Tensor, str] = {}
    for name, tensor in named:
        shared = first_names.setdefault(tensor, name)
        facts[name] = (
            f"{tensor.dtype} {[*tensor.shape]}"
            f"{' frozen' if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ''}"
            f"{'' if shared == name else f' shared with {shared}'}"
            f"{' on the meta device' if tensor.is_meta and not has_values else ''}"
        )
    check_ranks_match(
        facts,
        subject="module",
        remedy=(
            "On other ranks than 0, tensors may be on the meta device, if rank 0 has all values."
            " from_pretrained() returns a model in evaluation mode, and may choose another dtype"
            " than from_config(): call train(), pass dtype=, and call tie_weights() where"
            " parameters aren't shared"
        ),
    )
    return has_values


def recompute_activations(module: nn.Module, units: Sequence[nn.Module], every: int) -> None:
    """Let every n-th unit compute its activations again in the backward pass."""
    _check_enough_units(
        module, units, every, f"activation_checkpointing={'True' if every == 1 else every}"
    )
    for unit in units[every - 1 :: every]:
        # It then keeps only its inputs. The names of parameters do not change.
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def compile_forward(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Compile what units compute, once they are gathered."""
    _check_enough_units(module, units, 1, "compile_units=True")
    for unit in units:
        # Not the hooks, by which FSDP2 gathers and frees a unit.
        unit.forward = torch.compile(unit.forward)


def _check_enough_units(
    module: nn.Module, units: Sequence[nn.Module], least: int, option: str
) -> None:
    if len(units) < least:
        raise ValueError(
            f"{option}: the {type(module).__name__} has {len(units)} units; choose more by"
            " wrap_classes or a smaller min_unit_parameters"
        )


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
