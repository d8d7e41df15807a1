"""Private names of torch: snapshots of the memory of CUDA devices, which others do not have."""

from pathlib import Path

import torch


def record_cuda_memory_history(is_on: bool) -> None:
    """Start or stop the history of CUDA's allocator, for all devices of the process.

    Args:
        is_on: Whether to start.
    """
    torch.cuda.memory._record_memory_history(enabled="all" if is_on else None)


def dump_cuda_memory_snapshot(path: Path) -> None:
    """Write the allocator's history for the viewer at https://pytorch.org/memory_viz.

    Args:
        path: The file to write, in an existing directory.
    """
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
