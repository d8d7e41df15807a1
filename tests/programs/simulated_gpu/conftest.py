"""These tests run in a process of their own: see `tests.programs.simulated_gpu`."""

import sys

if "tests.programs.simulated_gpu.devices" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]
