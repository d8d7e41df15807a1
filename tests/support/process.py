"""What each process of a distributed test runs: ``python -m tests.support.process``.

Arguments: the function as ``module:name``, and the directory for results, which has its options.
Writes what the function returned to ``<out>/rank<r>.pt``, and with it the number of processes.
"""

import importlib
import logging
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_memmap.strategies.members.processes import MEMBER_VARIABLE
from tests.support.installed import remember_entry_points


def main(name: str, out: Path) -> None:
    """Call one function in this process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    remember_entry_points()
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    options = pickle.loads((out / "options.pickle").read_bytes())
    # The body of a test is what `in_processes` wraps.
    result = getattr(function, "__wrapped__", function)(out, **options) or {}
    is_distributed = dist.is_available() and dist.is_initialized()
    # Independent members have no process group.
    rank = dist.get_rank() if is_distributed else int(os.environ.get(MEMBER_VARIABLE, "0"))
    result["world_size"] = dist.get_world_size() if is_distributed else 1
    # On simulated GPUs, what these have noticed.
    devices: Any = sys.modules.get("tests.programs.simulated_gpu.devices")
    if devices is not None:
        devices.check_open_copies()
    result["reports"] = [] if devices is None else [str(report) for report in devices.reports]
    torch.save(result, out / f"rank{rank}.pt")
    if is_distributed:
        # Together and now. At the exit of the interpreter gloo's threads may end the process.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
