"""Encoded images: threads decode those of the next step while a step is used."""

import math
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import DatasetError
from lightning_memmap.images import ImageError, ImageMissingError, ImageSizeError, decode_image
from lightning_memmap.loading.buffers import BufferPool, Buffers
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.row_source import released_error
from lightning_memmap.loading.steps import Fetched, ordinary_tensors
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling import Sampler
from lightning_memmap.schema import Decode

#: By default no more threads: between two images, each runs Python code, which one at a time can.
_MAX_THREADS = 16
#: The step that is used, the next one, and those that a user keeps for a while.
_NUM_BUFFERS = 6


def default_threads(num_local_processes: int) -> int:
    """How many threads decode by default: this process's share of the cores, 1 to 16."""
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // num_local_processes))


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
        """A decoder of images that have the size of the first one, or that of the form."""
        try:
            return cls(field, form, decode_image(first, form.mode, form.size).shape)
        except ImageError as error:
            raise _failed(field, f"row {row}", error) from error

    def decode(
        self, data: NDArray[np.uint8], out: NDArray[np.uint8], place: NDArray[np.float32]
    ) -> None:
        """Decode the bytes of a file."""
        out[...] = decode_image(data, self.form.mode, self.form.size, self.shape, place)

    def decoded(self, rows: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        """Decode images one by one: their pixels, and their places."""
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        places = torch.empty((len(rows), 3))
        targets = zip(rows, out.numpy(), places.numpy(), strict=True)
        for index, (data, pixels, place) in enumerate(targets):
            try:
                self.decode(data, pixels, place)
            except ImageError as error:
                raise _failed(self.field, f"image {index} of a batch", error) from error
        return out, places

    def failed(self, row: int, error: ImageError) -> DatasetError:
        """The error for a row of the dataset that cannot be decoded."""
        return _failed(self.field, f"row {row}", error)


def _failed(field: str, which: str, error: ImageError) -> DatasetError:
    remedy = "repair it in the dataset or leave it out, and build the store again"
    if isinstance(error, ImageSizeError):
        remedy = (
            "scale all images to one size with Decode(size=(height, width)), or store them decoded,"
            " as PIL images or tensors of one size in the dataset"
        )
    if isinstance(error, ImageMissingError):
        remedy = (
            "repair it in the dataset, or give an image in its place, and build the store again"
        )
    return DatasetError(f"field {field!r}, {which}: {error}: {remedy}")


@dataclass(frozen=True)
class Images:
    """The fields of a split that are decoded."""

    decoders: Mapping[int, ImageDecoder]
    num_threads: int
    _stages: "weakref.WeakSet[_Stage]" = field(default_factory=weakref.WeakSet)
    _pools: dict[tuple[int, int], BufferPool] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of the images of one row."""
        return sum(math.prod(decoder.shape) for decoder in self.decoders.values())

    def decoded(self, steps: Iterator[Fetched], sampler: Sampler) -> Generator[Fetched, None, None]:
        """The same steps with images instead of their bytes, and their places behind the fields."""
        with closing(_Stage(self, sampler)) as stage:
            self._stages.add(stage)
            for step in steps:
                begun = stage.begin(step)
                del step
                if stage.ahead is not None:
                    yield stage.take_ahead(begun)
                else:
                    stage.ahead = begun
                del begun
            if stage.ahead is not None:
                yield stage.take_ahead(None)

    def release(self) -> None:
        """End all threads. No step comes any more."""
        for stage in list(self._stages):
            stage.close()
        self._pools.clear()

    def memory(self, num_rows: int, num_lists: int, device: torch.device) -> list[Tensor]:
        """Memory for the images and the places of each field, which nobody else holds."""
        fields: list[Any] = []
        for decoder in self.decoders.values():
            fields += [(decoder.shape, torch.uint8), ((3,), torch.float32)]
        if has_streams(device):
            return Buffers.empty(fields, num_rows, pin_memory=True).tensors
        key = num_rows, num_lists
        with ordinary_tensors():
            if key not in self._pools:
                self._pools[key] = BufferPool(fields, num_rows, _NUM_BUFFERS * num_lists)
            return self._pools[key].get(num_rows).tensors


@dataclass
class _Begun:
    """A step whose images are decoded, those of each data device by field."""

    step: Fetched
    images: list[list["_FieldImages"]]
    futures: list[Future[None]]


class _Stage:
    """Threads that decode the images of one epoch."""

    def __init__(self, images: Images, sampler: Sampler) -> None:
        self._images, self._decoders = images, images.decoders
        self._sampler = sampler
        #: The step that was begun last.
        self.ahead: _Begun | None = None
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._images.num_threads, "decode")

    def begin(self, step: Fetched) -> _Begun:
        """Let the threads decode the images of a step."""
        if self._is_closed:
            raise released_error()
        self._go_on_after_fork()
        images = []
        for which, leaves in enumerate(step.leaves):
            device = step.devices[which]
            num_rows = len(step.positions_of(which))
            memory = self._images.memory(num_rows, len(step.leaves), device)
            pairs = zip(memory[::2], memory[1::2], strict=True)
            of_list = []
            for (index, decoder), (pixels, places) in zip(
                self._decoders.items(), pairs, strict=True
            ):
                rows = leaves[index]
                assert isinstance(rows, VariableRows)
                of_list.append(_FieldImages(decoder, rows, pixels, places))
            images.append(of_list)
        return self._submitted(_Begun(step, images, []))

    def _submitted(self, begun: _Begun) -> _Begun:
        begun.futures = [
            self._threads.submit(each.decode)
            for fields in begun.images
            for each in fields
            for _ in range(min(self._images.num_threads, len(each.pixels)))
        ]
        return begun

    def take_ahead(self, following: _Begun | None) -> Fetched:
        """The step that was begun before, once its images are decoded."""
        if self._is_closed:
            raise released_error()
        self._go_on_after_fork()
        begun, self.ahead = self.ahead, following
        assert begun is not None
        for future in begun.futures:
            future.result()
        step = begun.step
        for which, fields in enumerate(begun.images):
            leaves, device = step.leaves[which], step.devices[which]
            extra: list[Any] = []
            for index, images in zip(self._decoders, fields, strict=True):
                if images.errors:
                    raise self._failed(images, step, which)
                leaves[index] = send(images.pixels, device)
                if images.decoder.form.with_scale:
                    extra.append(send(images.places, device))
            # Before the row numbers, if there are any, which come last.
            leaves[step.num_fields : step.num_fields] = extra
        return step

    def _failed(self, images: "_FieldImages", step: Fetched, which: int) -> Exception:
        index = min(images.errors)
        error = images.errors[index]
        if not isinstance(error, ImageError):
            return error
        position = step.positions_of(which)[index : index + 1]
        row = self._sampler.dataset_rows(step.steps.epoch, position)
        failure = images.decoder.failed(int(row[0]), error)
        failure.__cause__ = error
        return failure

    def _go_on_after_fork(self) -> None:
        if os.getpid() == self._process:
            return
        # The threads stayed with the parent, and so did what they had not decoded.
        self._start()
        if self.ahead is not None:
            for fields in self.ahead.images:
                for images in fields:
                    images.begin_again()
            self._submitted(self.ahead)

    def close(self) -> None:
        """End the threads. No step comes any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.ahead is not None:
            for fields in self.ahead.images:
                for images in fields:
                    images.cancel()
            self.ahead = None
        # When the interpreter ends, it has ended the threads, and much of the library is gone.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._threads.shutdown(cancel_futures=True)


class _FieldImages:
    """The images of one field in one step, which several threads decode together."""

    def __init__(
        self, decoder: ImageDecoder, rows: VariableRows, pixels: Tensor, places: Tensor
    ) -> None:
        self.decoder = decoder
        self.pixels = pixels
        self.places = places
        #: By its place in the step, why an image cannot be decoded.
        self.errors: dict[int, Exception] = {}
        self._rows = rows
        self._out = pixels.numpy(), places.numpy()
        self._data = rows.items.view(torch.uint8).numpy()
        self.begin_again()

    def begin_again(self) -> None:
        """Decode all of them again."""
        self._next: Callable[[], int] = count().__next__

    def decode(self) -> None:
        """Decode images until all are done or in the hands of other threads."""
        starts, lengths = self._rows.starts, self._rows.lengths
        pixels, places = self._out
        # Drawing the next number is one operation, which no other thread can interrupt.
        while (index := self._next()) < len(starts):
            data = self._data[starts[index] : starts[index] + lengths[index]]
            try:
                self.decoder.decode(data, pixels[index], places[index])
            except Exception as error:
                self.errors[index] = error

    def cancel(self) -> None:
        """Leave out the images that no thread has begun."""
        self._next = count(len(self.pixels)).__next__
