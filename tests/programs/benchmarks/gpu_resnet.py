"""What `gpu.py --only resnet` measures: a network that people know, on images from several loaders.

ResNet-50 is trained by Lightning's Trainer in bf16 and channels_last. timm's is used where timm can
be imported, or else the same network in plain torch, below. All loaders deliver the same images,
uint8 of shape (3, side, side), which the network normalises on the device.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import lightning as L
import torch
from jpegs import make_jpeg
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset

from lightning_memmap import MemmapDataModule
from lightning_memmap.images import decode_image
from lightning_memmap.schema import Decode

NUM_CLASSES = 1000


@dataclass(frozen=True)
class Sizes:
    """How much is trained on."""

    side: int = 224
    batch: int = 256
    #: Steps of an epoch: some that don't count, while workers start and cuDNN chooses its kernels,
    #: and those of each round.
    warm_up: int = 16
    steps: int = 9
    rounds: int = 3
    num_files: int = 48
    workers: tuple[int, int] = (8, 16)
    #: A loader whose epoch takes longer than this is cut short.
    limit_s: float = 14.0
    #: As the Trainer takes it, and the dtype of the images that the network is given.
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.warm_up + self.steps * self.rounds

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.num_steps * self.batch


TINY = Sizes(32, 2, 1, 1, 2, 2, (1, 2), 60.0, "32-true", torch.float32)


class Files(Dataset[dict[str, Any]]):
    """The bytes of JPEG files and labels: the same few files again and again."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.files = [make_jpeg(seed) for seed in range(sizes.num_files)]

    def __len__(self) -> int:
        return self.sizes.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        file = row % len(self.files)
        return {"image": self.files[file], "label": file}


class Decoded(Dataset[dict[str, Any]]):
    """The images of `Files`, decoded and scaled item by item."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def decode(self, row: int) -> Tensor:
        """Decode the image of a row."""
        side = self.files.sizes.side
        return torch.from_numpy(decode_image(self.files[row]["image"], "RGB", (side, side)).copy())

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**self.files[row], "image": self.decode(row)}


def kept(files: Files) -> Subset[Any]:
    """Return the same images with each file decoded once: rows of arrays are stored quickly."""
    decoded = Decoded(files)
    images = torch.stack([decoded.decode(row) for row in range(len(files.files))])
    rows: Any = StackDataset(image=images, label=torch.arange(len(images)))
    return Subset(rows, [row % len(images) for row in range(len(files))])


class Repeated:
    """One batch, again and again: a loader that takes no time."""

    def __init__(self, batch: Any, num_steps: int) -> None:
        self.batch = batch
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.num_steps)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.layers = nn.Sequential(
            *_convolution(width_in, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )  # fmt: skip
        is_same = width_in == out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(
            *_convolution(width_in, out, 1, stride)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Compute the block."""
        return torch.relu(self.layers(images) + self.shortcut(images))


def _convolution(width_in: int, width: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width)]


def plain_resnet50() -> nn.Module:
    """Make ResNet-50 (He et al. 2015, with the stride in the 3x3 convolutions)."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for index, (width, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(count):
            stride = 2 if index and not block else 1
            layers.append(Bottleneck(width_in, width, stride))
            width_in = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, NUM_CLASSES)]
    return nn.Sequential(*layers)


def make_network() -> tuple[nn.Module, str]:
    """Make the network, and say which one it is."""
    try:
        import timm
    except (
        ImportError,
        RuntimeError,
    ) as error:  # A torchvision of another torch raises the latter.
        return (
            plain_resnet50(),
            f"ResNet-50 in plain torch, because timm can't be imported ({error})",
        )
    network: nn.Module = timm.create_model("resnet50", pretrained=False, num_classes=NUM_CLASSES)
    return network, f"resnet50 of timm {timm.__version__}"


class Classifier(L.LightningModule):
    """Trains a network on uint8 images in channels_last."""

    def __init__(self, network: nn.Module, image_dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)
        self.image_dtype = image_dtype

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        images = batch["image"].to(self.image_dtype, memory_format=torch.channels_last)
        logits = self.network(images.sub_(127.5).div_(58.0))
        return nn.functional.cross_entropy(logits.float(), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)


class Clock(L.Callback):
    """Times rounds of steps, until the device is done, and ends a run that takes too long."""

    def __init__(self, sizes: Sizes, wait: Callable[[], None]) -> None:
        self.sizes = sizes
        self.wait = wait
        self.rates: list[float] = []
        self.begin = self.last = perf_counter()

    def on_train_start(self, *_: Any) -> None:
        """Count from here on: stores are built and loaded."""
        self.begin = perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Note the rate of a round."""
        done, is_late = index + 1 - self.sizes.warm_up, False
        if done >= 0 and done % self.sizes.steps == 0:
            self.wait()
            now = perf_counter()
            if done:
                self.rates.append(self.sizes.steps * self.sizes.batch / (now - self.last))
                is_late = now - self.begin > self.sizes.limit_s
            self.last = now
        trainer.should_stop = is_late


def resnet_rates(
    device: torch.device, wait: Callable[[], None], sizes: Sizes, folder: Path
) -> Iterator[tuple[str, list[float]]]:
    """Train from each loader in turn, and yield its name and its images/s, one for each round."""
    files = Files(sizes)
    side = (sizes.side, sizes.side)
    decode = {"image": Decode(size=side)}

    def stored(name: str, dataset: Any, **options: Any) -> MemmapDataModule:
        return MemmapDataModule(
            dataset, store_dir=folder / name, batch_size=sizes.batch, drop_last=True, **options
        )

    def loader(num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            Decoded(files), sizes.batch, shuffle=True, num_workers=num_workers, drop_last=True,
            pin_memory=device.type == "cuda",
        )  # fmt: skip

    def repeated() -> Repeated:
        images = torch.randint(0, 256, (sizes.batch, 3, *side), dtype=torch.uint8)
        batch = {"image": images, "label": torch.arange(sizes.batch) % NUM_CLASSES}
        on_device = {key: value.to(device) for key, value in batch.items()}
        return Repeated(on_device, sizes.num_steps)

    runs: dict[str, Callable[[], Any]] = {
        "one batch, repeated": repeated,
        "resident store": lambda: stored("decoded", kept(files), residency="device"),
        "encoded JPEGs in a store": lambda: stored("encoded", files, decode=decode),
    }
    for count in sizes.workers:
        runs[f"DataLoader, {count} workers"] = lambda count=count: loader(count)
    for name, make in runs.items():
        clock = Clock(sizes, wait)
        _train(make(), device, clock)
        gc.collect()
        yield name, clock.rates


def _train(loader: Any, device: torch.device, clock: Clock) -> None:
    """Train an epoch from a loader or data module."""
    torch.manual_seed(0)
    is_gpu, is_ours = device.type == "cuda", isinstance(loader, MemmapDataModule)
    trainer = L.Trainer(
        accelerator="gpu" if is_gpu else "cpu",
        devices=[device.index or 0] if is_gpu else 1,
        strategy="memmap_superbatch" if is_ours else "auto",
        precision=clock.sizes.precision,
        benchmark=True,
        max_epochs=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(make_network()[0], clock.sizes.dtype)
    trainer.fit(module, **{"datamodule" if is_ours else "train_dataloaders": loader})
