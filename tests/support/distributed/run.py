"""What each process of a distributed test runs: ``python -m tests.support.distributed.run``.

Arguments: the scenario, the directory for results, and the scenario's options as JSON. Writes what
the scenario returned to ``<out>/rank<r>.pt``, and with it the number of processes.
"""

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_memmap.strategies.members.processes import MEMBER_VARIABLE
from tests.support.installed import remember_entry_points


def main(scenario: str, out: Path, options: str) -> None:
    """Run one scenario in this process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    remember_entry_points()
    module, _, name = scenario.rpartition(".")
    function = getattr(
        importlib.import_module(f"tests.support.distributed.scenarios.{module}"), name
    )
    result = function(out, **json.loads(options))
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
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
