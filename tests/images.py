"""Encoded images that are known row by row, and plain Python that decodes them."""

import functools
import io
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

HEIGHT, WIDTH = 10, 7


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file with these pixels, of shape (height, width) or (height, width, C)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def plain(data: bytes, mode: str = "RGB") -> Tensor:
    """An image decoded without this package, channels first."""
    pixels = np.array(Image.open(io.BytesIO(data)).convert(mode))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).movedim(-1, 0)


@functools.cache
def files_of(row: int) -> tuple[bytes, bytes]:
    """The image of a row, a PNG or JPEG file, and its mask, a PNG file."""
    random = np.random.default_rng(row)
    pixels = random.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    image = encoded(pixels, "PNG" if row % 3 else "JPEG")
    return image, encoded((pixels[..., 0] > 99).astype(np.uint8))


@functools.cache
def decoded_files_of(row: int) -> tuple[Tensor, Tensor]:
    image, mask = files_of(row)
    return plain(image), plain(mask, "L")


class EncodedImages:
    """Row ``i`` has its number, an image as the bytes of a PNG or JPEG file, and a mask as PNG.

    Args:
        num_rows: Rows.
        decoded: Give the same images decoded.
        broken: By row, other bytes.
    """

    def __init__(
        self, num_rows: int, decoded: bool = False, broken: dict[int, bytes] | None = None
    ) -> None:
        self.num_rows = num_rows
        self.decoded = decoded
        self.broken = broken or {}

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        if self.decoded:
            pixels, opaque = decoded_files_of(row)
            return {"row": row, "image": pixels.clone(), "mask": opaque.clone()}
        image, mask = files_of(row)
        return {"row": row, "image": self.broken.get(row, image), "mask": mask}


FORMS: dict[str, Any] = {"image": "decode", "mask": {"form": "decode", "mode": "L"}}


def assert_is_batch(batch: Any, rows: list[int]) -> None:
    """A batch of `EncodedImages` has these rows in this order, decoded."""
    dataset = EncodedImages(max(rows) + 1, decoded=True)
    assert batch["row"].tolist() == rows
    for name in ("image", "mask"):
        assert batch[name].dtype == torch.uint8
        assert batch[name].is_contiguous()
        assert torch.equal(batch[name].cpu(), torch.stack([dataset[row][name] for row in rows]))


class Brightness(L.LightningModule):
    """Learns a number of each row from its image and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1, 0.2]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        colors = batch["image"].float().mean((2, 3)) / 255
        features = torch.cat([colors, batch["mask"].float().mean((2, 3))], 1)
        target = batch["row"][:, None] % 7 / 7
        return nn.functional.mse_loss(self.net(features), target)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["image"].shape[1:] == (3, HEIGHT, WIDTH)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def photographs() -> list[Path]:
    """Two photographs as JPEG files, which scikit-learn ships."""
    import sklearn

    folder = Path(sklearn.__file__).parent / "datasets" / "images"
    return sorted(folder.glob("*.jpg"))


def icons() -> list[Path]:
    """Icons of several sizes as PNG files with transparency, which matplotlib ships."""
    import matplotlib

    return sorted((Path(matplotlib.get_data_path()) / "images").glob("*.png"))
