"""Encoded images: threads decode those of the next step while a step is used."""

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

from lightning_memmap.images import ImageError
from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers, memory_for
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.image_decoder import ImageDecoder, image_failure
from lightning_memmap.loading.row_source import Fetched
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling.sampler import Sampler

#: By default no more threads: between two images, each runs Python code, which one at a time can.
_MAX_THREADS = 16
#: The step that is used, the next one, and those that a user keeps for a while.
_NUM_BUFFERS = 6


def default_threads(num_local_processes: int) -> int:
    """How many threads decode by default: this process's share of the cores, 1 to 16."""
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // num_local_processes))


@dataclass(frozen=True)
class Images:
    """The fields of a split that are decoded."""

    decoders: Mapping[int, ImageDecoder]  # By the place of the field among those of the store.
    num_threads: int
    _begun: "weakref.WeakSet[Ahead[_Step]]" = field(default_factory=weakref.WeakSet)

    @property
    def row_bytes(self) -> int:
        """Bytes of the images of one row."""
        return sum(math.prod(decoder.shape) for decoder in self.decoders.values())

    def decoded(self, steps: Iterator[Fetched], sampler: Sampler) -> Generator[Fetched, None, None]:
        """The same steps with images instead of their bytes, and their places behind the fields."""
        fields = list[tuple[tuple[int, ...], torch.dtype]]()
        for decoder in self.decoders.values():
            fields += [(decoder.shape, torch.uint8), ((3,), torch.float32)]
        memory = list[Callable[[int], Buffers]]()  # For each receiver.
        # The next step is decoded, and the one behind it.
        with closing(Ahead[_Step]("decode", self.num_threads)) as begun:
            self._begun.add(begun)
            for step in steps:
                memory = memory or [memory_for(fields, [d], _NUM_BUFFERS) for d in step.devices]
                images = [*self._images(step, memory)]
                begun.begin((step, images), partial(_jobs, images))
                del step, images
                if len(begun) > 1:
                    yield _decoded(*begun.take(), sampler)
            while len(begun):
                yield _decoded(*begun.take(), sampler)

    def release(self) -> None:
        """End all threads. No step comes any more."""
        for begun in list(self._begun):
            begun.close()

    def _images(
        self, step: Fetched, memory: Sequence[Callable[[int], Buffers]]
    ) -> Iterator["_FieldImages"]:
        """The images of a step, with memory for them that nobody else holds."""
        for receiver, (leaves, buffers) in enumerate(zip(step.leaves, memory, strict=True)):
            with torch.inference_mode(False):
                found = iter(buffers(len(leaves[next(iter(self.decoders))])))
            for index, decoder in self.decoders.items():
                rows = leaves[index]
                assert isinstance(rows, VariableRows)
                yield _FieldImages(receiver, index, decoder, rows, next(found), next(found))


@dataclass(eq=False)
class _FieldImages:
    """The images of one field in one step, which several threads decode together."""

    receiver: int
    index: int  # Of the field among the leaves of the receiver.
    decoder: ImageDecoder
    rows: VariableRows  # Their bytes, in host memory.
    pixels: Tensor  # Where they go, uint8 of shape (B, *shape).
    places: Tensor  # Where their scales and offsets go, float32 of shape (B, 3).
    errors: dict[int, Exception] = field(default_factory=dict)  # By its place in the step.

    def jobs(self) -> Iterator[Callable[[], None]]:
        """What decodes each image."""
        data, ends = self.rows.memory, self.rows.starts + self.rows.lengths
        pixels, places = self.pixels.numpy(), self.places.numpy()
        for index, (begin, end) in enumerate(zip(self.rows.starts, ends, strict=True)):
            yield partial(self._decode, index, data[begin:end], pixels[index], places[index])

    def _decode(self, index: int, *arguments: Any) -> None:
        try:
            self.decoder.decode(*arguments)
        except Exception as error:
            self.errors[index] = error

    def failed(self, step: Fetched, sampler: Sampler) -> Exception:
        """The error of the first image that cannot be decoded."""
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
    return chain.from_iterable(each.jobs() for each in images)


def _decoded(step: Fetched, images: list[_FieldImages], sampler: Sampler) -> Fetched:
    """A step whose images are decoded."""
    for each in images:
        if each.errors:
            raise each.failed(step, sampler)
        leaves, device = step.leaves[each.receiver], step.devices[each.receiver]
        leaves[each.index] = send(each.pixels, device)
        if each.decoder.form.with_scale:
            leaves.append(send(each.places, device))
    return step
