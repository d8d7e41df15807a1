"""Decodes encoded images: those of the next steps in threads, while the current step is used."""

import math
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import DatasetError
from lightning_memmap.image_crop import DRAWS
from lightning_memmap.images import ImageError, ImageMissingError, ImageSizeError, decode_image
from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers, memory_for
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.row_source import Fetched
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling.sampler import Sampler, derive_seed
from lightning_memmap.schema.forms import Decode
from lightning_memmap.store.store import Store

#: More threads gain nothing: they hold the interpreter lock between two images.
_MAX_THREADS = 16
#: Buffers for the current step, the next one, and batches that the consumer keeps for a while.
_NUM_BUFFERS = 6
#: Allocates buffers for a number of rows.
Allocate: TypeAlias = Callable[[int], Buffers]
#: Derives the seed of random crops from the seed of a loader.
_CROP_SEED = 0xC409


def default_threads(num_local_processes: int) -> int:
    """Return the default number of threads: this process's fraction of the cores, 1 to 16."""
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // num_local_processes))


class Scaled(NamedTuple):
    """A batch of images decoded with ``Decode(size=..., with_scale=True)``.

    The point ``(x, y)`` of the upright image file, in pixels, is at ``(x, y) * scale + offset`` of
    the values, or outside of them if it was cropped. All tensors are on the device of the batch.
    """

    values: Tensor
    """The images, uint8 of shape (B, channels, height, width)."""
    scale: Tensor
    """The factor of each image, float32 of shape (B,)."""
    offset: Tensor
    """The position (x, y) of its upper left corner, 0 or negative, float32 of shape (B, 2)."""

    @classmethod
    def of(cls, pixels: Tensor, geometry: Tensor) -> "Scaled":
        """Combine images with their geometry: scale, x and y, of shape (B, 3)."""
        return cls(pixels, geometry[:, 0], geometry[:, 1:])


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes the images of one field, all to one shape, (channels, height, width)."""

    field: str
    form: Decode
    shape: tuple[int, ...]

    @classmethod
    def like(
        cls, field: str, form: Decode, first: NDArray[np.uint8], row: int = 0
    ) -> "ImageDecoder":
        """Return a decoder for images of the form's size, or of the size of a first image."""
        try:
            return cls(field, form, decode_image(first, form.mode, form.size).shape)
        except ImageError as error:
            raise image_failure(field, f"row {row}", error) from error

    def decode(
        self,
        data: NDArray[np.uint8],
        out: NDArray[np.uint8],
        geometry: NDArray[np.float32],
        draws: Any = None,
    ) -> None:
        """Decode the centre of an image, or a random crop, and write its scale and offset."""
        out[...] = decode_image(data, self.form.mode, self.form.size, self.shape, geometry, draws)


def image_failure(field: str, image: str, error: ImageError) -> DatasetError:
    """Return the error for an image that cannot be decoded."""
    remedy = "repair or remove it in the dataset, and build the store again"
    if isinstance(error, ImageSizeError):
        remedy = (
            "scale all images to one size with Decode(size=(height, width)), or store them decoded,"
            " as PIL images or tensors of one size in the dataset"
        )
    if isinstance(error, ImageMissingError):
        remedy = "repair it in the dataset, or return another image, and build the store again"
    return DatasetError(f"field {field!r}, {image}: {error}: {remedy}")


def image_decoders(store: Store, decode: Mapping[str, Decode]) -> dict[int, ImageDecoder]:
    """Make the decoders of encoded images, by the index of the field in the schema."""
    decoders = {}
    for index, stored in enumerate(store.schema.fields):
        if (form := decode.get(stored.name)) is None:
            continue
        form.check(stored)
        # All processes decode the same row, whether they hold it or not: the first with an image,
        # because rows without one may be in no split.
        num_rows = store.num_rows if stored.num_variable else 1
        images = ((store.read_row(row, stored.name)[0].numpy(), row) for row in range(num_rows))
        no_image = store.read_row(0, stored.name)[0].numpy(), 0
        image, row = next((pair for pair in images if len(pair[0])), no_image)
        decoders[index] = ImageDecoder.like(stored.name, form, image, row)
    return decoders


def decode_rows(rows: VariableRows, form: Decode) -> Tensor | Scaled:
    """Decode the images in rows one by one, to the size of the first or of the form."""
    images = np.split(rows.concatenated().numpy(), np.cumsum(rows.lengths)[:-1])
    decoder = ImageDecoder.like(rows.field.name, form, images[0])
    pixels = torch.empty((len(images), *decoder.shape), dtype=torch.uint8)
    geometry = torch.empty((len(images), 3))
    targets = zip(images, pixels.numpy(), geometry.numpy(), strict=True)
    for index, arguments in enumerate(targets):
        try:
            decoder.decode(*arguments)
        except ImageError as error:
            name = decoder.field
            raise image_failure(name, f"image {index} of a batch", error) from error
    return Scaled.of(pixels, geometry) if form.with_scale else pixels


@dataclass(frozen=True)
class Images:
    """The fields of a split whose images are decoded."""

    decoders: Mapping[int, ImageDecoder]  # By the index of the field in the schema.
    num_threads: int
    _queues: "weakref.WeakSet[Ahead[_Step]]" = field(default_factory=weakref.WeakSet)

    @classmethod
    def of(cls, decoders: Mapping[int, ImageDecoder], num_local_processes: int) -> "Images":
        """Decode images in the threads that one of the fields needs most."""
        default = default_threads(num_local_processes)
        counts = [decoder.form.num_threads for decoder in decoders.values()]
        return cls(decoders, max(default if count is None else count for count in counts))

    @property
    def row_bytes(self) -> int:
        """Bytes of the decoded images of one row."""
        return sum(math.prod(decoder.shape) for decoder in self.decoders.values())

    def decoded(
        self, steps: Iterator[Fetched], sampler: Sampler, seed: int = 0
    ) -> Generator[Fetched, None, None]:
        """Yield the steps with decoded images, and append the scales and offsets if wanted."""
        fields: list[tuple[tuple[int, ...], torch.dtype]] = []
        for decoder in self.decoders.values():
            fields += [(decoder.shape, torch.uint8), ((3,), torch.float32)]
        memory: list[Allocate] = []  # One allocator per receiver.
        # Two steps are decoded ahead.
        with closing(Ahead[_Step]("decode", self.num_threads)) as queue:
            self._queues.add(queue)
            for step in steps:
                memory = memory or [memory_for(fields, [d], _NUM_BUFFERS) for d in step.devices]
                images = self._images(step, memory, sampler, seed)
                queue.begin((step, images), partial(_jobs, images))
                del step, images
                if len(queue) > 1:
                    yield _decoded_step(*queue.take(), sampler)
            while len(queue):
                yield _decoded_step(*queue.take(), sampler)

    def release(self) -> None:
        """Stop all threads. Iterators of `decoded` raise an error from then on."""
        for queue in list(self._queues):
            queue.close()

    def _images(
        self, step: Fetched, memory: Sequence[Allocate], sampler: Sampler, seed: int
    ) -> list["_FieldImages"]:
        """Return the images of a step, with unused memory for their pixels."""
        draws: list[Any] = []
        if any(decoder.form.crop != "center" for decoder in self.decoders.values()):
            # Numbers for the random crops of each row, which all fields share. Their seed is
            # derived, because a transform draws its numbers from the seed itself.
            crop_seed = derive_seed(seed, _CROP_SEED)
            random = RowRandom.at(sampler, step.steps.epoch, step.steps.positions, crop_seed)
            draws = random.uniform(*DRAWS).tolist()
        images: list[_FieldImages] = []
        for receiver, (leaves, allocate) in enumerate(zip(step.leaves, memory, strict=True)):
            with torch.inference_mode(False):
                buffers = iter(allocate(len(leaves[next(iter(self.decoders))])))
            crops = draws[step.rows_of(receiver)]
            for index, decoder in self.decoders.items():
                rows = leaves[index]
                assert isinstance(rows, VariableRows)
                fields = receiver, index, decoder, rows, next(buffers), next(buffers)
                is_centred = decoder.form.crop == "center"
                images.append(_FieldImages(*fields, None if is_centred else crops))
        return images


@dataclass(eq=False)
class _FieldImages:
    """The images of one field in one step, which several threads decode together."""

    receiver: int
    index: int  # The index of the field among the leaves of the receiver.
    decoder: ImageDecoder
    rows: VariableRows  # The encoded images, in host memory.
    pixels: Tensor  # The decoded images, uint8 of shape (B, *shape).
    geometry: Tensor  # The scale and offset of each image, float32 of shape (B, 3).
    crops: Sequence[Any] | None  # The random numbers of the crop of each image, if it is random.
    errors: dict[int, Exception] = field(default_factory=dict)  # By index of the image.

    def jobs(self) -> Iterator[Callable[[], None]]:
        """Yield a function for each image that decodes it."""
        data = self.rows.memory
        stops = self.rows.starts + self.rows.lengths
        pixels = self.pixels.numpy()
        geometry = self.geometry.numpy()
        for index, (start, stop) in enumerate(zip(self.rows.starts, stops, strict=True)):
            arguments = data[start:stop], pixels[index], geometry[index]
            draws = None if self.crops is None else self.crops[index]
            yield partial(self._decode, index, *arguments, draws)

    def _decode(self, index: int, *arguments: Any) -> None:
        try:
            self.decoder.decode(*arguments)
        except Exception as error:
            self.errors[index] = error

    def failure(self, step: Fetched, sampler: Sampler) -> Exception:
        """Return the error of the first image that cannot be decoded, with its row."""
        index = min(self.errors)
        error = self.errors[index]
        if not isinstance(error, ImageError):
            return error
        positions = step.steps.positions[step.rows_of(self.receiver)][index : index + 1]
        row = sampler.dataset_rows(step.steps.epoch, positions)
        failure = image_failure(self.decoder.field, f"row {row[0]}", error)
        failure.__cause__ = error
        return failure


_Step: TypeAlias = tuple[Fetched, list[_FieldImages]]


def _jobs(images: list[_FieldImages]) -> Iterator[Callable[[], None]]:
    return chain.from_iterable(field_images.jobs() for field_images in images)


def _decoded_step(step: Fetched, images: list[_FieldImages], sampler: Sampler) -> Fetched:
    """Replace the encoded images of a step, once all of them are decoded."""
    for decoded in images:
        if decoded.errors:
            raise decoded.failure(step, sampler)
        leaves = step.leaves[decoded.receiver]
        device = step.devices[decoded.receiver]
        leaves[decoded.index] = send(decoded.pixels, device)
        if decoded.decoder.form.with_scale:
            leaves.append(send(decoded.geometry, device))
    return step
