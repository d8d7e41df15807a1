"""A small GPT over the bytes of an English text, for every strategy that shards or divides a model.

    python examples/gpt.py
    lightning-memmap fit --config examples/configs/gpt.yaml
    lightning-memmap fit --config examples/configs/gpt.yaml \
        --config examples/configs/strategies/memmap_pipeline.yaml

`GPT.stages` and `GPT.loss` are for memmap_pipeline and memmap_model_parallel, `GPT.configure_model`
for Lightning's ModelParallelStrategy. The text is stored once, as windows of bytes (uint8).
"""

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

from examples.data.text import Text
from lightning_memmap import MemmapDataModule

#: Every byte is a token.
VOCABULARY = 256


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
        # Under tensor parallelism, a process has some of the heads: their number follows from the
        # width of the projections.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x + self.feed_forward(x)
        return added


def layers_of_gpt(num_blocks: int, width: int, length: int) -> nn.Sequential:
    """Make an embedding, blocks, and the head that returns the logits of the next byte.

    Args:
        num_blocks: Number of blocks.
        width: Width of the model, a multiple of 16.
        length: The most tokens in a window.
    """
    return nn.Sequential(
        Embedding(width, length),
        *(Block(width, head_width=16) for _ in range(num_blocks)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY)),
    )


def divide(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism inside the blocks, and FSDP2 over data-parallel processes.

    Args:
        layers: What `layers_of_gpt` returns.
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


class GPT(L.LightningModule):
    """A language model of bytes.

    Its layers are the stages of ``memmap_pipeline`` and ``memmap_model_parallel``. Under
    Lightning's ``ModelParallelStrategy`` the blocks are divided over the ``tensor_parallel`` axis.

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
        self.layers = layers_of_gpt(num_blocks, width, length)

    def stages(self) -> list[nn.Module]:
        """Return the consecutive modules of `forward`."""
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
        """Compute the mean cross-entropy of the next byte, in nats."""
        return F.cross_entropy(output.flatten(0, 1), batch["tokens"][:, 1:].long().flatten())

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        """Compute the loss of a batch, and log its mean over all rows of an epoch."""
        loss: Tensor = self.loss(self(batch["tokens"][:, :-1].long()), batch)
        self.log(
            f"{stage}_loss",
            loss,
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            prog_bar=True,
            batch_size=len(batch["tokens"]),
        )
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch, logged as ``train_loss``."""
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``."""
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_loss``."""
        self.step(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely next byte at each position, int64 of shape (B, T)."""
        return torch.argmax(self(batch["tokens"][:, :-1].long()), dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def main(devices: int = 4, max_steps: int = 250, file: str | None = None) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_steps: The most steps to train.
        file: A text file; by default the help texts of Python.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        Text("train", file=file),
        Text("val", file=file),
        Text("test", file=file),
        store_dir="stores/gpt",
        batch_size=8,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=1,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    model: Any = GPT()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
