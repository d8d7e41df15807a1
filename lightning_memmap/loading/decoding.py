"""Decodes the images of the next steps in threads, while the current step is used."""

import math
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.image_crop import DRAWS
from lightning_memmap.images import ImageError
from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers, memory_for
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.image_decoder import ImageDecoder, image_failure
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.row_source import Fetched
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling.sampler import Sampler, derive_seed

#: More threads gain nothing: they hold the interpreter lock between two images.
_MAX_THREADS = 16
#: Buffers for the current step, the next one, and batches that the consumer keeps for a while.
_NUM_BUFFERS = 6
#: Derives the seed of random crops from the seed of a loader.
_CROP_SEED = 0xC409


def default_threads(num_local_processes: int) -> int:
    """Return the default number of threads: this process's fraction of the cores, 1 to 16."""
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // num_local_processes))


@dataclass(frozen=True)
class Images:
    """The fields of a split whose images are decoded."""

    decoders: Mapping[int, ImageDecoder]  # By the index of the field in the schema.
    num_threads: int
    _queues: "weakref.WeakSet[Ahead[_Step]]" = field(default_factory=weakref.WeakSet)

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
        memory: list[Callable[[int], Buffers]] = []  # One allocator per receiver.
        # Two steps are decoded ahead.
        with closing(Ahead[_Step]("decode", self.num_threads)) as queue:
            self._queues.add(queue)
            for step in steps:
                memory = memory or [memory_for(fields, [d], _NUM_BUFFERS) for d in step.devices]
                images = [*self._images(step, memory, self._draw_crops(step, sampler, seed))]
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

    def _draw_crops(self, step: Fetched, sampler: Sampler, seed: int) -> list[list[Any]] | None:
        """Draw numbers for the random crops of the rows of a step, which all fields share."""
        if all(decoder.form.crop == "center" for decoder in self.decoders.values()):
            return None
        # Derived, because a transform draws its numbers from the seed itself.
        crop_seed = derive_seed(seed, _CROP_SEED)
        random = RowRandom.at(sampler, step.steps.epoch, step.steps.positions, crop_seed)
        draws: list[list[Any]] = random.uniform(*DRAWS).tolist()
        return draws

    def _images(
        self,
        step: Fetched,
        memory: Sequence[Callable[[int], Buffers]],
        draws: list[list[Any]] | None,
    ) -> Iterator["_FieldImages"]:
        """Yield the images of a step, with unused memory for their pixels."""
        for receiver, (leaves, allocate) in enumerate(zip(step.leaves, memory, strict=True)):
            with torch.inference_mode(False):
                buffers = iter(allocate(len(leaves[next(iter(self.decoders))])))
            for index, decoder in self.decoders.items():
                rows = leaves[index]
                assert isinstance(rows, VariableRows)
                crops = None
                if draws is not None and decoder.form.crop != "center":
                    crops = draws[step.rows_of(receiver)]
                pixels = next(buffers)
                yield _FieldImages(receiver, index, decoder, rows, pixels, next(buffers), crops)


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
