"""Tell languages by their sound: recordings that differ in length.

    apt-get install asterisk-core-sounds-{en,es,fr}-wav
    python examples/speech.py
    lightning-memmap fit --config examples/configs/speech.yaml

The store keeps sounds as long as they are, without padding. A batch is padded to its longest row,
and ``lengths`` says how much of each row is sound: the spectrogram is computed from it on the data
devices, and the network averages over nothing else.

The recordings are telephone prompts; those in English and in Spanish are by the same speaker.
"""

from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from examples.classifier import Classifier
from examples.data.prompts import FOLDER, LANGUAGES, Prompts
from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import Padded


class Spectrogram(nn.Module):
    """Batch transform: sounds to the logarithms of their spectrograms."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Turn ``sound`` of (B, longest) into float32 of (B, frames, 129), still padded."""
        values, lengths = batch["sound"]
        window = torch.hann_window(256, device=values.device)
        frames = torch.stft(
            values / 32768, 256, 128, window=window, center=False, return_complex=True
        )
        sound = Padded(frames.abs().add(1e-3).log().mT, (lengths - 256) // 128 + 1)
        return {**batch, "sound": sound}


class LanguageClassifier(Classifier):
    """Two convolutions over time, and the mean over the frames of each sound.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the convolutions.
    """

    def __init__(self, lr: float = 2e-3, width: int = 64) -> None:
        super().__init__(len(LANGUAGES), lr, field="sound")
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv1d(129, width, 5), nn.ReLU(), nn.Conv1d(width, width, 5), nn.ReLU()
        )
        self.head = nn.Linear(width, len(LANGUAGES))

    def forward(self, sound: Padded) -> Tensor:
        """Logits of shape (B, 3) for padded spectrograms of at least 9 frames."""
        features: Tensor = self.network(sound.values.mT)
        # The convolutions need four frames on either side: skip frames next to the padding.
        count = (sound.lengths - 8)[:, None]
        is_sound = torch.arange(features.shape[2], device=count.device) < count
        mean = (features * is_sound[:, None]).sum(2) / count
        return self.head(mean)  # type: ignore[no-any-return]


def main(folder: str = FOLDER, devices: int = 2, max_epochs: int = 6) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        folder: Folder of the recordings.
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        *(Prompts(split, folder) for split in ("train", "val", "test")),
        store_dir="stores/speech",
        batch_size=16,
        transform=Spectrogram(),
        eval_transform=Spectrogram(),
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
