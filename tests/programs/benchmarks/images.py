"""Encoded images against a DataLoader of the same files, and against images stored decoded.

    python tests/programs/benchmarks/images.py --kind jpeg --size 224
    python tests/programs/benchmarks/images.py --crop 224 --size 400

The images are patches of the two photographs that scikit-learn ships, encoded again; or with
``--folder DIR`` the files of an image folder, scaled to one size. The DataLoader decodes the same
bytes, held in memory, with the same function, and its items are stacked. With ``--crop`` images
are cropped at random and resized: the DataLoader decodes the whole image first, as torchvision
does with Pillow, and the store no more than it needs, with ``simplejpeg`` and without. Each run is
an epoch, and starts its own threads or workers. With ``--work MS`` a training step is simulated
that takes so long and no core, as a step on a GPU does. Printed are images per second, and as
ratios, round by round, how many times those of the DataLoader that is.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timing import in_turn, machine, pairwise_ratios, spread
from torch.utils.data import DataLoader, Dataset

from lightning_memmap import ImageFolder, MemmapDataModule, image_crop
from lightning_memmap.image_crop import DRAWS, choose_box
from lightning_memmap.images import decode_image
from lightning_memmap.loading.decoding import default_threads


class Encoded(Dataset[dict[str, Any]]):
    """Patches of photographs, or the files of a folder, as bytes in memory."""

    def __init__(self, kind: str, size: int, count: int, folder: str | None) -> None:
        if folder is not None:
            files = ImageFolder(folder, None)
            chosen = np.linspace(0, len(files) - 1, min(count, len(files))).astype(int).tolist()
            self.rows = [files[row]["image"] for row in chosen]
            return
        photos, random = load_sample_images().images, np.random.default_rng(0)
        self.rows = []
        for index in range(count):
            photo = photos[index % 2]
            y, x = (int(random.integers(side - size + 1)) for side in photo.shape[:2])
            file = io.BytesIO()
            patch = Image.fromarray(np.ascontiguousarray(photo[y : y + size, x : x + size]))
            patch.save(file, kind.upper())
            self.rows.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.rows[row]}


class Decoded(Dataset[dict[str, Any]]):
    """The same images, decoded item by item."""

    def __init__(
        self, encoded: Encoded, size: tuple[int, int] | None, crop: int | None = None
    ) -> None:
        self.encoded = encoded
        self.size = size
        self.crop = crop

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.crop is not None:
            return {"image": torch.from_numpy(cropped(self.encoded.rows[row], self.crop))}
        pixels = decode_image(self.encoded.rows[row], "RGB", self.size)
        return {"image": torch.from_numpy(np.array(pixels, order="C"))}


def cropped(data: bytes, size: int) -> Any:
    """A random-resized crop of the whole image, by Pillow."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    draws = torch.rand(DRAWS).tolist()
    top, left, height, width = choose_box(draws, image.height, image.width)
    part = image.crop((left, top, left + width, top + height))
    return (
        np.asarray(part.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1).copy()
    )


def by_pillow(run: Callable[[], None]) -> Callable[[], None]:
    """Run without the package simplejpeg."""

    def run_patched() -> None:
        with patch.object(image_crop, "_turbo_decoder", lambda: None):
            run()

    return run_patched


def epoch(loader: Any, work_s: float) -> Callable[[], None]:
    """Takes all batches of an epoch."""

    def run() -> None:
        for batch in loader:
            sleep(work_s)
            del batch

    return run


def stored(dataset: Any, path: Path, batch: int, decode: dict[str, Any] | None) -> Any:
    """The loader over a store of a dataset."""
    data = MemmapDataModule(dataset, store_dir=path, batch_size=batch, decode=decode)
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


def measured(encoded: Encoded, args: argparse.Namespace) -> None:
    """Print the rates and ratios of all runs."""
    size = (args.size, args.size) if args.folder is not None else None
    items, form = Decoded(encoded, size, args.crop), {"size": size}
    if args.crop is not None:
        form = {"size": args.crop, "crop": "random_resized"}
    loaders: dict[str, Any] = {
        f"DataLoader, {workers} workers": DataLoader(
            items, args.batch, shuffle=True, num_workers=workers
        )
        for workers in (0, 2)
    }
    with tempfile.TemporaryDirectory() as directory:
        for threads in dict.fromkeys((1, 2, default_threads(1))):
            decode = {"image": {**form, "num_threads": threads}}
            path = Path(directory, "encoded")
            loaders[f"encoded, {threads} threads"] = stored(encoded, path, args.batch, decode)
        if args.crop is None:
            loaders["stored decoded"] = stored(items, Path(directory, "decoded"), args.batch, None)
        runs = {name: epoch(loader, args.work / 1000) for name, loader in loaders.items()}
        if args.crop is not None:
            for name in [name for name in runs if name.startswith("encoded")]:
                runs[f"{name}, Pillow"] = by_pillow(runs[name])
        seconds = in_turn(runs, args.rounds)
    mean = sum(map(len, encoded.rows)) / len(encoded)
    print(f"{len(encoded):,} images of {mean:,.0f} bytes, batches of {args.batch},", end=" ")
    print(f"steps of {args.work} ms; {machine()}")
    print(f"{'':<24}{'images/s':>28}{'of 0 workers':>22}{'of 2 workers':>22}")
    for name, took in seconds.items():
        rates = spread([len(encoded) / each for each in took], "{:,.0f}")
        ratios = [
            spread(pairwise_ratios(seconds[f"DataLoader, {workers} workers"], took))
            for workers in (0, 2)
        ]
        print(f"{name:<24}{rates:>28}{ratios[0]:>22}{ratios[1]:>22}")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=("jpeg", "png"), default="jpeg")
    parser.add_argument("--folder", help="an image folder instead of the photographs")
    parser.add_argument("--size", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--crop", type=int, help="size of random-resized crops")
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--work", type=float, default=0.0, help="milliseconds of a training step")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    measured(Encoded(args.kind, args.size, args.count, args.folder), args)


if __name__ == "__main__":
    main()
