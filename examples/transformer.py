"""The layers of a small GPT over bytes, and their division over processes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

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
        # The number of heads follows from the columns: under tensor parallelism a process has some.
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
        layers: The layers that `layers_of_gpt` has made.
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
