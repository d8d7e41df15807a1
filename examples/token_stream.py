"""A small language model on overlapping windows of one stream of tokens, which is stored once.

    python examples/token_stream.py
    python examples/token_stream.py --file FILE --stride 1
    lightning-memmap fit --config examples/configs/token_stream.yaml

Windows overlap, but the store and the memory have each token only once. The default text, 750 KB
about the Python language, comes with Python itself (PSF licence).
"""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn

from examples.data.text import python_help
from lightning_memmap import MemmapDataModule
from lightning_memmap.schema import Windows
from lightning_memmap.store import TokenStream

#: Tokens that the model predicts in a window. A window has one more.
LENGTH = 64


def text_stream(
    start: float = 0.0, stop: float = 1.0, stride: int = 8, file: str | Path | None = None
) -> TokenStream:
    """Make a stream of the bytes of a text, or of a part of it, for windows of `LENGTH` + 1.

    Args:
        start: The fraction of the text at which this part starts.
        stop: The fraction of the text at which it stops.
        stride: Bytes from the start of a window to the start of the next one.
        file: A text file. By default the help texts of Python, by topic in alphabetical order.
    """
    text: Any = file
    if file is None:
        text = np.frombuffer(python_help(), np.uint8)
    return TokenStream(text, LENGTH + 1, stride, start=start, stop=stop)


class LanguageModel(L.LightningModule):
    """A small transformer that predicts the next byte.

    Args:
        lr: Learning rate of AdamW.
        width: Width of the model, a multiple of 4.
        num_layers: Number of layers.
    """

    def __init__(self, lr: float = 3e-3, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (B, T, 256) for int64 tokens of shape (B, T)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        embedded = self.token(tokens) + self.position[:length]
        return self.head(self.layers(embedded, mask, is_causal=True))  # type: ignore[no-any-return]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy of the next byte, in nats."""
        tokens = batch["tokens"].long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch, logged as ``train_loss``."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``."""
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def continue_text(model: nn.Module, text: str, num_bytes: int = 80) -> str:
    """Continue a text with the bytes that the model predicts.

    Args:
        model: The model.
        text: The start of the text.
        num_bytes: Number of bytes to add.
    """
    tokens = list(text.encode())
    for _ in range(num_bytes):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens[-LENGTH:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


def main(
    file: str | None = None,
    store_dir: str = "stores/token_stream",
    stride: int = 8,
    devices: int = 2,
    batch_size: int = 16,
    max_steps: int = 300,
) -> None:
    """Train on windows of a text, validate on windows of its end, and let the model write.

    Args:
        file: A text file; by default the help texts of Python.
        store_dir: Directory of the stores.
        stride: Bytes from the start of a window to the start of the next one.
        devices: GPUs, or logical data devices on a CPU.
        batch_size: Windows per data device and step.
        max_steps: The most steps to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        text_stream(0.0, 0.95, stride, file),
        text_stream(0.95, 1.0, stride, file),
        store_dir=store_dir,
        batch_size=batch_size,
        windows=Windows("tokens", LENGTH + 1, stride),
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_steps=max_steps,
        val_check_interval=max_steps,
        limit_val_batches=50,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = LanguageModel()
    trainer.fit(model, datamodule=data)
    assert data.order is not None
    num_windows = data.order.num_positions
    num_stored = data.stores["train"].manifest.num_bytes
    times = num_windows * (LENGTH + 1) / num_stored
    print(f"{num_windows} windows of {LENGTH + 1} bytes over {num_stored} stored bytes;")
    print(f"stored one by one, they would take {times:.1f} times as many")
    print(f"val_loss {trainer.callback_metrics['val_loss']:.3f}")
    print(continue_text(model, "The following "))


if __name__ == "__main__":
    auto_cli(main)
