"""Rows that differ in length, known row by row, plain Python that makes batches of them, and a
module that learns from them."""

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap.loading import Padded


class Ragged(Dataset[dict[str, Any]]):
    """Row ``i`` has its number, a sound, an image, token ids in a list, and a text.

    Args:
        num_rows: Rows.
        longest: The sound of a row has 0 to this many samples.
    """

    def __init__(self, num_rows: int, longest: int = 40) -> None:
        self.num_rows = num_rows
        self.longest = longest

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        random = np.random.default_rng(row)
        length = int(random.integers(0, self.longest + 1))
        height, width = (int(size) for size in random.integers(0, 6, 2))
        return {
            "row": row,
            "sound": torch.from_numpy(random.standard_normal(length).astype(np.float32)),
            "image": random.integers(0, 255, (height, width, 2), dtype=np.uint8),
            "ids": random.integers(0, 99, random.integers(0, 20)).tolist(),
            "text": "żółw " * int(random.integers(0, 3)) + str(row),
        }


def padded(rows: list[Any], value: float = 0, multiple: int = 1, num_variable: int = 1) -> Tensor:
    """Rows padded to the longest, one by one."""
    tensors = [torch.as_tensor(row) for row in rows]
    shapes = torch.tensor([tensor.shape[:num_variable] for tensor in tensors])
    widths = (-(-shapes.amax(0) // multiple) * multiple).tolist()
    first = next((t for t in tensors if t.numel()), tensors[0])
    out = torch.full((len(rows), *widths, *first.shape[num_variable:]), value, dtype=first.dtype)
    for target, tensor in zip(out, tensors, strict=True):
        target[tuple(map(slice, tensor.shape))] = tensor
    return out


def assert_is_batch(
    batch: Any, samples: list[dict[str, Any]], value: float = 0, multiple: int = 1
) -> None:
    """A batch of `Ragged`, its fields in any form, has these samples in this order."""
    assert batch["row"].tolist() == [sample["row"] for sample in samples]
    assert batch["text"] == [sample["text"] for sample in samples]
    for name, dims in (("sound", 1), ("image", 2), ("ids", 1)):
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        found = batch[name]
        if isinstance(found, Padded):
            expected = padded(rows, value, multiple, dims).to(found.values.dtype)
            assert torch.equal(found.values, expected), name
            sizes = [list(row.shape[:dims]) if dims > 1 else len(row) for row in rows]
            assert found.lengths.tolist() == sizes
            assert found.lengths.dtype == torch.int64
            found = found.rows()
        elif isinstance(found, Tensor):
            assert found.layout is torch.jagged
            found = found.unbind()
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, rows, strict=True)), name


class Sounds(L.LightningModule):
    """Learns a number of each row from its sound, whose padding must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []
        self.texts: list[str] = []
        self.losses: list[Tensor] = []

    def features(self, sound: Any) -> Tensor:
        """Three numbers of each row, of shape (B, 3)."""
        if isinstance(sound, Padded):
            is_row = torch.arange(sound.values.shape[1]) < sound.lengths[:, None]
            values, lengths = sound.values * is_row, sound.lengths.clamp(min=1)
            sums = torch.stack([values.sum(1), values.square().sum(1)], 1)
            return torch.cat([sums / lengths[:, None], sound.lengths[:, None] / 40], 1)
        rows = sound.unbind() if isinstance(sound, Tensor) else sound
        return torch.stack(
            [
                torch.stack([row.sum(), row.square().sum(), torch.tensor(len(row) ** 2 / 40)])
                / max(len(row), 1)
                for row in rows
            ]
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        self.texts += batch["text"]
        target = batch["row"][:, None] % 7 / 7
        loss = nn.functional.mse_loss(self.net(self.features(batch["sound"])), target)
        self.losses.append(loss.detach())
        self.log("loss", loss, batch_size=len(target))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val", self.net(self.features(batch["sound"])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)
