"""These tests run in a process of their own: see `tests.simulated_gpu`."""

import sys

if "tests.simulated_gpu.devices" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]
