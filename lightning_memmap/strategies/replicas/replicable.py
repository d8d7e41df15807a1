"""Modules of which ``memmap_dp`` cannot make replicas."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_memmap._compat.dynamo import compiler_context, is_compiled, original_backend
from lightning_memmap._compat.metrics import unmerged_state
from lightning_memmap.errors import UnsuitableModuleError


def check_replicable(module: LightningModule, devices: Sequence[torch.device]) -> None:
    """Raise for a module that can't be replicated on these devices."""
    compiled: Any = compiler_context(module).get("dynamo_ctx")
    backend = original_backend(getattr(compiled, "callback", None))
    config = getattr(compiled, "compiler_config", None) or {}
    name = getattr(backend, "compiler_name", "")
    if (config.get("triton.cudagraphs") or name == "cudagraphs") and len(set(devices)) > 1:
        raise ValueError(
            "torch.compile with CUDA graphs, such as mode='reduce-overhead': the replicas of"
            f" memmap_dp on {len(set(devices))} devices share the compiled code, and a graph is"
            " tied to one device. Compile without CUDA graphs, or use memmap_superbatch_ddp"
        )
    for name, child in module.named_modules():
        if is_compiled(child):
            raise UnsuitableModuleError(
                f"the submodule {name or 'self'!r} was compiled on its own, and has no replicas:"
                " pass torch.compile(module) to the Trainer, or use memmap_superbatch"
            )
        if any(map(is_lazy, child.parameters(recurse=False))):
            raise ValueError(
                f"the parameters of {name!r} have no shape yet, and memmap_dp cannot replicate"
                " them: run one batch through the module before fit"
            )
        if isinstance(child, Metric) and (unmerged := unmerged_state(child)):
            raise ValueError(
                f"the metric {name!r} ({type(child).__name__}) has {unmerged}, which replicas"
                " cannot merge: use memmap_superbatch, or update it in a callback from the step's"
                " output"
            )
