"""Many trainings of the digits through one store, in one process: does memory grow?

    python -m tests.programs.benchmarks.many_trainings --minutes 5

Each training is an epoch with a data module, a Trainer and results per row of its own.
"""

import argparse
import gc
import logging
import tempfile
import warnings
from pathlib import Path
from time import monotonic

import lightning as L
import psutil
import torch
from torch import Tensor

from examples.data.digits import Digits
from examples.digits import DigitsClassifier, normalize
from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import RowLog


class Logging(RowLog, DigitsClassifier):
    """Logs the loss of each row."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = torch.nn.functional.cross_entropy(
            self(batch["image"]), batch["label"], reduction="none"
        )
        self.log_rows("row_loss", losses)
        return losses.mean()


def train(folder: Path, seed: int) -> None:
    """Train a new model for an epoch."""
    data = MemmapDataModule(
        Digits("train"),
        store_dir=folder / "stores",
        batch_size=64,
        transform=normalize,
        seed=seed,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[RowResults(folder / "results", ["row_loss"], overwrite=True)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Logging(), data)


def main() -> None:
    """Print what the process holds after every 50 trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30, help="begin no training after so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    process = psutil.Process()
    start = monotonic()
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        while number < options.trainings and monotonic() - start < 60 * options.minutes:
            train(Path(folder), number)
            number += 1
            if number % 50 == 0:
                gc.collect()
                print(
                    f"{number} trainings: {process.memory_info().rss / 2**20:.1f} MiB,"
                    f" {process.num_fds()} files, {process.num_threads()} threads,"
                    f" {monotonic() - start:.0f} s",
                    flush=True,
                )
    print(f"{number} trainings in {monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
