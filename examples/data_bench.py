"""Find wrong labels, and train without them: scikit-learn's digits, some with changed labels.

    pip install cleanlab
    python examples/data_bench.py
    python examples/data_bench.py --page docs/data_bench.md

Each fold predicts the rows that it holds out, and cleanlab finds labels that these predictions
contradict. Further runs leave rows out, or draw them less often. All runs share one store. Their
time is compared with runs through a DataLoader. The figures are printed, or written into a page.
"""

import logging
import statistics
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from examples.data.digits import Digits
from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import Results, RowLog, read_row_results
from lightning_memmap.sampling import KFold, Subset, Weighted

#: The figures of a page are between these lines.
BEGIN = "<!-- figures -->"
END = "<!-- end of figures -->"


class NoisyDigits(Digits):
    """The training digits, some of which have a wrong label.

    Args:
        fraction: The fraction of rows whose labels are changed. The mask ``is_wrong`` has them.
    """

    def __init__(self, fraction: float) -> None:
        super().__init__("train")
        generator = np.random.default_rng(0)
        true = np.array(self.labels)
        other = (true + generator.integers(1, 10, len(true))) % 10
        self.is_wrong = generator.random(len(true)) < fraction
        self.labels = np.where(self.is_wrong, other, true).tolist()


class LoggingClassifier(RowLog, L.LightningModule):
    """Logs the loss of each training row, and the probabilities of each row that is held out."""

    def __init__(self) -> None:
        super().__init__()
        self.test_accuracy = MulticlassAccuracy(10, average="micro")
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 10) for uint8 images of shape (B, 1, 8, 8)."""
        return self.network((image / 255 - 0.305) / 0.376)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, and log it for each row."""
        losses = F.cross_entropy(self(batch["image"]), batch["label"], reduction="none")
        self.log_rows("loss", losses)
        return losses.mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the probabilities of all classes for each row."""
        self.log_rows("probabilities", self(batch["image"]).softmax(1))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["image"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def fit(data: Any, seed: int, max_epochs: int, *callbacks: L.Callback) -> float:
    """Train on a data module or a DataLoader, and return the accuracy on the test digits."""
    L.seed_everything(seed, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[*callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LoggingClassifier()
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, DataLoader(Digits("test"), 270), verbose=False)
    return metrics["test_accuracy"]


def weight(results: Any) -> Any:
    """Return weights that are small for rows with a large loss."""
    return 1 / (1 + results["loss"])


def measure(
    folder: Path, noise: float, num_seeds: int, num_folds: int, max_epochs: int
) -> list[str]:
    """Return the figures as lines of a page."""
    train = NoisyDigits(noise)

    def data(**options: Any) -> MemmapDataModule:
        return MemmapDataModule(train, store_dir=folder / "stores", batch_size=64, **options)

    for fold in range(num_folds):
        held_out = RowResults(folder / f"fold_{fold}", ["probabilities"], split="val")
        fit(data(subset=KFold(num_folds), member=fold), fold, max_epochs, held_out)
    probabilities = read_row_results(folder / "fold_{member}")["probabilities"].numpy()
    labels = np.array(train.labels)
    is_issue = find_label_issues(labels, probabilities, n_jobs=1)
    losses = -np.log(probabilities[range(len(train)), labels])
    is_large = losses > np.quantile(losses, 1 - train.is_wrong.mean())

    run_loss = Results(folder / "run", function=weight, each_epoch=True)
    variants: dict[str, dict[str, Any]] = {
        "all rows": {},
        "without label issues": {"subset": Subset(~is_issue)},
        "without the largest losses": {"subset": Subset(~is_large)},
        "large losses less often": {"sampler": Weighted(run_loss)},
        "without the changed labels": {"subset": Subset(~train.is_wrong)},
    }
    lines = [
        f"{len(train):,} digits, {train.is_wrong.sum()} of which have a wrong label; {num_seeds}"
        f" seeds, {max_epochs} epochs.",
        "",
        "| training rows | test accuracy: mean (lowest..highest) |",
        "|---|---|",
    ]
    for name, options in variants.items():
        accuracies = []
        for seed in range(num_seeds):
            callback = RowResults(folder / "run", ["loss"], overwrite=True)
            accuracies.append(fit(data(seed=seed, **options), seed, max_epochs, callback))
        mean = statistics.mean(accuracies)
        lines.append(f"| {name} | {mean:.3f} ({min(accuracies):.3f}..{max(accuracies):.3f}) |")

    store_s = []
    loader_s = []
    for seed in range(num_seeds):
        start = time.process_time()
        fit(data(seed=seed), seed, max_epochs)
        middle = time.process_time()
        fit(DataLoader(train, 64, shuffle=True), seed, max_epochs)
        store_s.append(middle - start)
        loader_s.append(time.process_time() - middle)
    return [
        *lines,
        "",
        f"From out-of-fold probabilities of {num_folds} folds, cleanlab names {is_issue.sum()}"
        f" labels, and {(is_issue & train.is_wrong).sum()} of them had been changed.",
        "",
        f"One run takes {statistics.median(store_s):.2f} s of CPU time from the store and"
        f" {statistics.median(loader_s):.2f} s through a DataLoader (medians of {num_seeds},"
        " alternately in one process with one thread).",
    ]


def main(
    noise: float = 0.15,
    num_seeds: int = 5,
    num_folds: int = 4,
    max_epochs: int = 8,
    page: Path | None = None,
) -> None:
    """Print the figures, or write them into a page.

    Args:
        noise: The fraction of rows whose labels are changed.
        num_seeds: Number of runs of each variant.
        num_folds: Number of folds. Each one predicts the rows that it holds out.
        max_epochs: Epochs of each run.
        page: A page whose figures are replaced.
    """
    # The model is too small for more threads.
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    with TemporaryDirectory() as folder:
        figures = "\n".join(measure(Path(folder), noise, num_seeds, num_folds, max_epochs))
    if page is None:
        print(figures)
        return
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    auto_cli(main)
