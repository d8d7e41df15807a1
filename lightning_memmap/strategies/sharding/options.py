"""The options of sharding: one frozen value, checked when it is made."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How a module is to be sharded; `lightning_memmap.strategies.FSDP2Strategy` describes each.

    Raises:
        ValueError: An option is out of range.
    """

    wrap_classes: Sequence[str | type[nn.Module]] | None
    min_unit_parameters: int
    replicate_size: int
    reshard_after_forward: bool | int | None
    cpu_offload: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_batch: bool
    activation_checkpointing: bool | Sequence[str | type[nn.Module]]

    def __post_init__(self) -> None:
        classes = self.wrap_classes
        if isinstance(classes, str) or (classes is not None and not classes):
            raise ValueError(
                f"wrap_classes={classes!r}: give a list of classes or of their names, or leave it"
                " out to choose units by size"
            )
        if isinstance(self.activation_checkpointing, str):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r}: give True for all"
                " units, or a list of classes or of their names"
            )
        for name in ("min_unit_parameters", "replicate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")

    def check_processes(self, num_processes: int) -> None:
        """Check that the sizes of groups fit a number of processes.

        Args:
            num_processes: Processes of the run.

        Raises:
            ValueError: They do not.
        """
        if num_processes % self.replicate_size:
            raise ValueError(
                f"replicate_size={self.replicate_size}: it does not divide the {num_processes}"
                " processes; choose a number that does"
            )
        group, size = self.reshard_after_forward, num_processes // self.replicate_size
        if type(group) is int and not (1 < group < size and size % group == 0):
            raise ValueError(
                f"reshard_after_forward={group}: it must divide the {size} processes that a copy"
                " is sharded over, and be neither 1 nor all of them; or choose True or False"
            )


def floating_dtype(name: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that an option names.

    Args:
        name: Name of the option.
        value: Its value.

    Returns:
        The dtype; None for None.

    Raises:
        ValueError: It is no floating-point dtype.
    """
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name}={value!r}: give a floating-point dtype, such as 'bfloat16'")
    return dtype
