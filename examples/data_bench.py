"""Find wrong labels, and train without them: scikit-learn's digits with labels that were changed.

    python examples/data_bench.py --page docs/data_bench.md

Many small trainings share one store. Folds predict the rows that they hold out; from these
predictions, wrong labels are found, by cleanlab if it is installed (``pip install cleanlab``). Then
rows are left out, or drawn more or less often, by these results and by losses. The same number of
trainings through a DataLoader shows what the store saves. The page receives the figures.
"""

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.data.digits import Digits
from examples.digits import DigitsClassifier, Normalize
from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import Results, RowLog, read_row_results
from lightning_memmap.sampling import KFold, Subset, Weighted

NORMALIZE = Normalize(mean=0.305, std=0.376)
#: The figures of a page are between these lines.
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


class NoisyDigits(Dataset[dict[str, Any]]):
    """The first training digits, some of which have a wrong label.

    Args:
        num_rows: The number of rows, at most 1,257.
        fraction: The fraction of rows whose labels are changed.
    """

    def __init__(self, num_rows: int, fraction: float) -> None:
        self.digits = Digits("train")
        self.num_rows = num_rows
        generator = np.random.default_rng(0)
        self.is_wrong = generator.random(num_rows) < fraction
        true = np.array(self.digits.labels[:num_rows])
        other = (true + generator.integers(1, 10, num_rows)) % 10
        self.labels = np.where(self.is_wrong, other, true)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.digits.images[row], "label": int(self.labels[row])}


class PerRow(RowLog, DigitsClassifier):
    """Logs the loss of each row, and what is predicted for rows that are held out."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of a batch, and log the rows' own."""
        losses = F.cross_entropy(self(batch["image"]), batch["label"], reduction="none")
        self.log_rows("loss", losses)
        return losses.mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the probabilities of all classes."""
        self.log_rows("probabilities", self(batch["image"]).softmax(1))


class LoaderModule(L.LightningDataModule):
    """The same rows through DataLoaders."""

    def __init__(self, train: Dataset[Any], batch_size: int) -> None:
        super().__init__()
        self.train = train
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that shuffles."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test digits."""
        return DataLoader(Digits("test"), self.batch_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise the images of a batch."""
        return NORMALIZE(batch)


def fit(data: L.LightningDataModule, seed: int, max_epochs: int, *callbacks: L.Callback) -> float:
    """Train, and return the accuracy on the test digits."""
    L.seed_everything(seed, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=None if callbacks else 0,
        callbacks=[*callbacks],
    )
    model = PerRow()
    trainer.fit(model, data)
    return float(trainer.test(model, data, verbose=False)[0]["test_accuracy"])


def label_issues(labels: NDArray[Any], probabilities: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which labels are probably wrong, from probabilities out of fold."""
    if find_spec("cleanlab") is not None:
        from cleanlab.filter import find_label_issues

        found: NDArray[np.bool_] = find_label_issues(labels, probabilities, n_jobs=1)
        return found
    # Confident learning: another class is as probable as it is, on average, for its own rows.
    thresholds = [probabilities[labels == label, label].mean() for label in range(10)]
    margins = np.where(probabilities >= thresholds, probabilities, 0)
    best = margins.argmax(1)
    issues: NDArray[np.bool_] = (margins.max(1) > 0) & (best != labels)
    return issues


def small_loss(results: Any) -> Tensor:
    """Return weights that are small for rows with a large loss."""
    return 1 / (1 + results["loss"])


def main(
    num_rows: int = 1257,
    noise: float = 0.15,
    num_seeds: int = 4,
    num_folds: int = 4,
    max_epochs: int = 8,
    batch_size: int = 64,
    page: Path | None = None,
) -> None:
    """Print the figures, or write them into a page.

    Args:
        num_rows: Rows to train on.
        noise: The fraction of rows whose labels are changed.
        num_seeds: Trainings of each variant.
        num_folds: Folds, each of which predicts what it holds out.
        max_epochs: Epochs of each training.
        batch_size: Rows of a step.
        page: A page whose figures are replaced.
    """
    train = NoisyDigits(num_rows, noise)
    with TemporaryDirectory() as folder:
        lines = measure(Path(folder), train, num_seeds, num_folds, max_epochs, batch_size)
    text = "\n".join(lines)
    print(text)
    if page is not None:
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def measure(
    folder: Path,
    train: NoisyDigits,
    num_seeds: int,
    num_folds: int,
    max_epochs: int,
    batch_size: int,
) -> list[str]:
    """Return the figures as lines of a page."""

    def data(**options: Any) -> MemmapDataModule:
        return MemmapDataModule(
            train,
            test_dataset=Digits("test"),
            store_dir=folder / "stores",
            batch_size=batch_size,
            transform=NORMALIZE,
            eval_transform=NORMALIZE,
            fingerprint="digits",
            **options,
        )

    for fold in range(num_folds):
        held_out = RowResults(folder / f"fold_{fold}", ["probabilities"], split="val")
        fit(data(subset=KFold(num_folds), member=fold), fold, max_epochs, held_out)
    table = read_row_results(folder / "fold_{member}")
    probabilities = table["probabilities"].numpy()
    issues = label_issues(train.labels, probabilities)

    def loss_out_of_fold(results: Any) -> Tensor:
        label = torch.from_numpy(train.labels)[:, None]
        return -results["probabilities"].gather(1, label)[:, 0].log()

    loss = Results(folder / "fold_{member}", function=loss_out_of_fold)
    limit = 1 - train.is_wrong.mean()

    def follow(seed: int) -> tuple[dict[str, Any], list[L.Callback]]:
        path = folder / f"follow_{seed}"
        column = Results(path, function=small_loss, each_epoch=True)
        return {"sampler": Weighted(column)}, [RowResults(path, ["loss"])]

    variants: dict[str, Callable[[int], tuple[dict[str, Any], list[L.Callback]]]] = {
        "all rows": lambda _: ({}, []),
        "without label issues": lambda _: ({"subset": Subset(~issues)}, []),
        "without the largest losses": lambda _: (
            {"subset": Subset(field=loss, where=lambda x: x <= np.quantile(x, limit))},
            [],
        ),
        "large losses rarely, by the epoch before": follow,
        "without the changed labels": lambda _: ({"subset": Subset(~train.is_wrong)}, []),
    }
    lines = [
        f"{len(train)} digits, {int(train.is_wrong.sum())} of which have a wrong label;"
        f" {num_seeds} seeds, {max_epochs} epochs.",
        "",
        "| training rows | test accuracy, mean (lowest..highest) |",
        "|---|---|",
    ]
    for name, options_of in variants.items():
        accuracies = []
        for seed in range(num_seeds):
            options, callbacks = options_of(seed)
            accuracies.append(fit(data(seed=seed, **options), seed, max_epochs, *callbacks))
        lines.append(
            f"| {name} | {statistics.mean(accuracies):.3f}"
            f" ({min(accuracies):.3f}..{max(accuracies):.3f}) |"
        )
    stored = []
    loaded = []
    for seed in range(num_seeds):
        for seconds, source in (
            (stored, data(seed=seed)),
            (loaded, LoaderModule(train, batch_size)),
        ):
            start = time.process_time()
            fit(source, seed, max_epochs)
            seconds.append(time.process_time() - start)
    num_right = int((issues & train.is_wrong).sum())
    method = "cleanlab" if find_spec("cleanlab") is not None else "confident learning"
    return [
        *lines,
        "",
        f"Out-of-fold probabilities of {num_folds} folds: {method} names {int(issues.sum())}"
        f" labels, and {num_right} of them had been changed.",
        "",
        f"A training takes {statistics.median(stored):.2f} s of CPU time from the store, and"
        f" {statistics.median(loaded):.2f} s through a DataLoader (medians of {num_seeds}, run"
        " alternately in one process).",
    ]


if __name__ == "__main__":
    auto_cli(main)
