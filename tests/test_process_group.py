"""Leaving the process group at the end of a program."""

from pathlib import Path

import pytest

from tests.support.preloaded import END_WHOLLY, run

pytestmark = pytest.mark.slow


PROGRAM = """
import atexit, sys
import torch.distributed as dist
from lightning_memmap.process_group import leave_group_at_exit

atexit.register(lambda: print("left" if not dist.is_initialized() else "still in it"))
leave_group_at_exit()
leave_group_at_exit()
if sys.argv[1] != "out":
    dist.init_process_group(sys.argv[1], init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    assert dist.is_initialized()
"""


def test_program_leaves_its_group_before_its_interpreter_ends(tmp_path: Path) -> None:
    # Beside GPUs, gloo is one of several backends, each for devices of one kind.
    for way in ("gloo", "cpu:gloo", "out"):
        done = run("-c", PROGRAM, way, tmp_path / way, **{END_WHOLLY: "1"})
        assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
