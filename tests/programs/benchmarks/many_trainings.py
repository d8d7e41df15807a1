"""Many trainings of the digits through one store, in one process: does memory grow?

python -m tests.programs.benchmarks.many_trainings --trainings 1000
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import psutil

from examples.data.digits import Digits
from examples.data_bench import NORMALIZE, fit
from lightning_memmap import MemmapDataModule


def main() -> None:
    """Print the resident memory and the CPU time after each tenth of the trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    count = parser.parse_args().trainings
    epochs = parser.parse_args().epochs
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            data = MemmapDataModule(
                Digits("train"),
                test_dataset=Digits("test"),
                store_dir=Path(folder),
                batch_size=64,
                transform=NORMALIZE,
                eval_transform=NORMALIZE,
                seed=number,
            )
            accuracy = fit(data, number, epochs)
            if number % max(1, count // 10) == 0:
                gc.collect()
                memory = process.memory_info().rss / 2**20
                files = process.num_fds()
                print(
                    f"{number} trainings: {memory:.0f} MiB, {files} files,"
                    f" {process.num_threads()} threads, {time.process_time():.0f} s,"
                    f" accuracy {accuracy:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
