"""Write the parts of a store as tasks of Ray, one of which is killed and run again; then finish it.

Run as a program, with the directory of the store: Ray starts threads and processes of its own.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray

from lightning_memmap import build_part, finish_store
from tests.datasets import Numbered, holds
from tests.unit.store.build_server import Deadly

NUM_ROWS, NUM_PARTS = 600, 4


@ray.remote(max_retries=2)
def write(path: str, index: int) -> int:
    dataset: Any = Numbered(NUM_ROWS)
    killed = Path(f"{path}.killed")
    if index == 1 and not killed.exists():
        killed.touch()
        dataset = Deadly(dataset, 250)
    build_part(dataset, path, (index, NUM_PARTS), fingerprint="numbered", progress=False)
    return os.getpid()


def main(path: str) -> None:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        pids = ray.get([write.remote(path, index) for index in range(NUM_PARTS)])
    finally:
        ray.shutdown()
    assert os.getpid() not in pids
    assert Path(f"{path}.killed").exists()
    assert holds(finish_store(path, progress=False), Numbered(NUM_ROWS))


if __name__ == "__main__":
    main(sys.argv[1])
