"""Tell languages by their sound: recordings that differ in length.

    apt-get install asterisk-core-sounds-{en,es,fr}-wav
    python examples/speech.py
    lightning-memmap fit --config examples/configs/speech.yaml

The store keeps each sound without padding. A batch is padded to its longest row, and ``lengths``
has the number of values in each row. In each step, the data devices compute spectrograms, and the
network averages over the frames that aren't padding.

The recordings are telephone prompts. The English and the Spanish ones are by the same speaker.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.prompts import FOLDER, LANGUAGES, Prompts
from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import Padded


def spectrogram(batch: dict[str, Any]) -> dict[str, Any]:
    """Turn ``sound``, int16 of (B, longest), into the logarithm of its spectrogram.

    The result is float32 of shape (B, frames, 129), padded like the sound.
    """
    values, lengths = batch["sound"]
    window = torch.hann_window(256, device=values.device)
    frames = torch.stft(values / 32768, 256, 128, window=window, center=False, return_complex=True)
    logarithms = frames.abs().add(1e-3).log().mT
    return {**batch, "sound": Padded(logarithms, (lengths - 256) // 128 + 1)}


class LanguageClassifier(L.LightningModule):
    """Two convolutions over time, and the mean over the frames of each sound.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the convolutions.
    """

    def __init__(self, lr: float = 2e-3, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(len(LANGUAGES), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(LANGUAGES), average="micro")
        self.network = nn.Sequential(
            nn.Conv1d(129, width, 5), nn.ReLU(), nn.Conv1d(width, width, 5), nn.ReLU()
        )
        self.head = nn.Linear(width, len(LANGUAGES))

    def forward(self, sound: Padded) -> Tensor:
        """Logits of shape (B, 3) for padded spectrograms of at least 9 frames."""
        features: Tensor = self.network(sound.values.mT)
        # Two convolutions of width 5 shorten each sound by 8 frames. What follows is padding.
        num_frames = (sound.lengths - 8)[:, None]
        is_sound = torch.arange(features.shape[2], device=num_frames.device) < num_frames
        mean = (features * is_sound[:, None]).sum(2) / num_frames
        return self.head(mean)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["sound"]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch["sound"])
        loss = F.cross_entropy(logits, batch["label"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["sound"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["sound"]), dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(folder: str = FOLDER, devices: int = 2, max_epochs: int = 6) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        folder: Folder of the recordings.
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        Prompts("train", folder),
        Prompts("val", folder),
        Prompts("test", folder),
        store_dir="stores/speech",
        batch_size=16,
        transform=spectrogram,
        eval_transform=spectrogram,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = LanguageClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
