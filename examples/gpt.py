"""A small GPT over the bytes of an English text: one module for many strategies.

    python examples/gpt.py
    lightning-memmap fit --config examples/configs/gpt.yaml
    lightning-memmap fit --config examples/configs/gpt.yaml \
        --config examples/configs/strategies/memmap_pipeline.yaml

The text is stored once as windows of bytes (uint8), which stay resident on the data devices. The
default text, 750 KB about the Python language, comes with Python itself (PSF licence).
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RunSummary

#: Every byte is a token.
VOCABULARY = 256


class Text(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text: 90 % for training, 5 % for validation, 5 % for testing.

    A sample is ``{"tokens": uint8 tensor of shape (length + 1,)}``. Each token but the last has the
    next one as its target. The last token of a window is the first of the next window.

    Args:
        split: ``train``, ``val`` or ``test``.
        length: Tokens to predict in a window.
        file: A text file. By default the help texts of Python, by topic in alphabetical order.

    Raises:
        ValueError: An unknown split, or a text that is too short for it.
    """

    def __init__(self, split: str, length: int = 64, file: str | Path | None = None) -> None:
        shares = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}
        if split not in shares:
            raise ValueError(f"split={split!r}: choose one of {', '.join(shares)}")
        if file is None:
            text = "\n".join(topics[name] for name in sorted(topics)).encode()
        else:
            text = Path(file).read_bytes()
        first, last = (int(share * len(text)) for share in shares[split])
        rows = (last - first - 1) // length
        if rows < 1:
            raise ValueError(
                f"length={length}: the {last - first} bytes of the {split} split are fewer than the"
                f" {length + 1} of a window; use a smaller length or a longer text"
            )
        tokens = torch.frombuffer(bytearray(text[first:last]), dtype=torch.uint8)
        self.windows = tokens.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"tokens": self.windows[row]}


class Embedding(nn.Module):
    """The sum of a vector for each token and one for its position in the window."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed int64 tokens of shape (B, T), with T up to ``length``, as (B, T, width)."""
        embedded: Tensor = self.token(tokens) + self.position[: tokens.shape[1]]
        return embedded


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform vectors of shape (B, T, width)."""
        normed = self.norm(x)
        # The number of heads follows from the columns: under tensor parallelism a process has some.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x + self.feed_forward(x)
        return added


class GPT(L.LightningModule):
    """A language model of bytes.

    Under ``memmap_pipeline`` its layers are the stages. ``memmap_model_parallel`` finds them by
    itself. Under Lightning's ``ModelParallelStrategy`` the blocks are divided over the
    ``tensor_parallel`` axis.

    Args:
        lr: Learning rate of AdamW.
        num_blocks: Number of blocks.
        width: Width of the model, a multiple of 16.
        length: The most tokens in a window.
    """

    def __init__(
        self, lr: float = 3e-3, num_blocks: int = 4, width: int = 64, length: int = 64
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(
            Embedding(width, length),
            *(Block(width, head_width=16) for _ in range(num_blocks)),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY)),
        )

    def stages(self) -> list[nn.Module]:
        """The consecutive modules of `forward`, for ``memmap_pipeline``."""
        return list(self.layers)

    def configure_model(self) -> None:
        """Divide the layers if the strategy has a device mesh."""
        mesh = self.device_mesh
        if mesh is not None and not isinstance(next(self.layers.parameters()), DTensor):
            divide(self.layers, mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (B, T, 256) for int64 tokens of shape (B, T)."""
        logits: Tensor = self.layers(tokens)
        return logits

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy of the next byte, in nats."""
        return F.cross_entropy(output.flatten(0, 1), batch["tokens"][:, 1:].long().flatten())

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        """The loss of a batch. The mean over all rows of an epoch is logged."""
        loss: Tensor = self.loss(self(batch["tokens"][:, :-1].long()), batch)
        self.log(
            f"{stage}_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            sync_dist=True,
            batch_size=len(batch["tokens"]),
        )
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch, logged as ``train_loss``."""
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``."""
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_loss``."""
        self.step(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely next byte at each position, int64 of shape (B, T)."""
        return torch.argmax(self(batch["tokens"][:, :-1].long()), dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def divide(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism inside the blocks, and FSDP2 over data-parallel processes.

    Args:
        layers: The layers of a `GPT`.
        mesh: A mesh with the axes ``data_parallel`` and ``tensor_parallel``.
    """
    plan = {
        "query": ColwiseParallel(),
        "key": ColwiseParallel(),
        "value": ColwiseParallel(),
        "out": RowwiseParallel(),
        "feed_forward.1": ColwiseParallel(),
        "feed_forward.3": RowwiseParallel(),
    }
    for block in list(layers)[1:-1]:
        parallelize_module(block, mesh["tensor_parallel"], plan)
    if mesh["data_parallel"].size() > 1:
        for layer in layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(layers, mesh=mesh["data_parallel"])


def main(
    file: str | None = None,
    store_dir: str = "stores/gpt",
    devices: int | None = None,
    batch_size: int = 8,
    max_epochs: int = 1,
    max_steps: int = 250,
    lr: float = 3e-3,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        file: A text file; by default the help texts of Python.
        store_dir: Directory of the stores.
        devices: GPUs, by default all; on a CPU logical data devices, by default 4.
        batch_size: Windows per data device and step.
        max_epochs: The most epochs to train.
        max_steps: The most steps to train.
        lr: Learning rate.
    """
    L.seed_everything(0)
    datamodule = MemmapDataModule(
        *(Text(split, file=file) for split in ("train", "val", "test")),
        store_dir=store_dir,
        batch_size=batch_size,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices or ("auto" if torch.cuda.is_available() else 4),
        max_epochs=max_epochs,
        max_steps=max_steps,
        callbacks=[RunSummary()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model: Any = GPT(lr)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)


if __name__ == "__main__":
    auto_cli(main)
