"""The precision of sharded modules: their plugin, and the dtype of their buffers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_memmap.strategies.sharding.options import ShardingOptions
from lightning_memmap.strategies.sharding.units import STATISTICS

_BATCH_DTYPES = {
    "32-true": None,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


class ShardedPrecision(Precision):
    """The precision of another plugin, which also casts batches, TensorDicts included.

    Args:
        inner: Chooses the dtype of weights, and makes the context of a step.
        options: May choose the dtype of the computation instead, and whether batches are cast.

    Attributes:
        inner: The other plugin.
        compute_dtype: What units compute in; None for the dtype of their parameters.
        batch_dtype: Floating-point tensors of a batch are cast to it; None leaves them.

    Raises:
        ValueError: The plugin is not supported, or both it and ``param_dtype`` choose a dtype.
    """

    def __init__(self, inner: Precision, options: ShardingOptions) -> None:
        if options.param_dtype is not None and inner.precision != "32-true":
            raise ValueError(
                f"param_dtype={options.param_dtype} with Trainer(precision={inner.precision!r}):"
                " both choose the dtype of the computation; leave one of them out"
            )
        self.compute_dtype = options.param_dtype
        if type(inner) is MixedPrecision and inner.precision == "bf16-mixed":
            self.compute_dtype = torch.bfloat16
        elif type(inner) not in (Precision, HalfPrecision, DoublePrecision):
            raise ValueError(
                f"Trainer(precision={inner.precision!r}): memmap_fsdp2 does not support"
                f" {type(inner).__name__}; choose 32-true, bf16-mixed, bf16-true, 16-true or"
                " 64-true"
            )
        self.batch_dtype = _BATCH_DTYPES.get(inner.precision)
        if self.compute_dtype is not None and options.cast_batch:
            self.batch_dtype = self.compute_dtype
        self.inner = inner
        self.precision = inner.precision

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.inner.convert_module(module)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self.inner.forward_context()

    @override
    def convert_input(self, data: Any) -> Any:
        if self.batch_dtype is None:
            return data
        return apply_to_collection(data, (TensorDictBase, Tensor), self._cast)

    def _cast(self, data: Tensor | TensorDictBase) -> Any:
        if isinstance(data, TensorDictBase):
            return data.apply(self._cast)
        return data.to(self.batch_dtype) if data.is_floating_point() else data

    @contextmanager
    def _evaluation_context(self) -> Iterator[None]:
        # What FSDP2 gathers for the first time in inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad(), self.forward_context():
            yield

    val_step_context = _evaluation_context
    test_step_context = _evaluation_context
    predict_step_context = _evaluation_context


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast floating-point buffers, except running statistics and metrics.

    Args:
        module: The module that has them.
        dtype: A floating-point dtype.

    Returns:
        By name, their values before.
    """
    before = {}
    for prefix, child in module.named_modules():
        if isinstance(child, (*STATISTICS, Metric)):
            continue
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                before[f"{prefix}.{name}" if prefix else name] = buffer.cpu()
                setattr(child, name, buffer.to(dtype))
    return before


def restored(buffer: Tensor, before: Tensor) -> Tensor:
    """A buffer that was cast, with its value from before where it has not changed since.

    Args:
        buffer: The buffer now.
        before: Its value before it was cast.
    """
    if torch.equal(before.to(buffer.dtype), buffer.cpu()):
        return before
    return buffer.to(before.dtype)
