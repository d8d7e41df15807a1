"""Encoded images: threads decode those of the next step while a step is used."""

import math
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.images import ImageError
from lightning_memmap.loading.buffers import BufferPool, Buffers
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.image_decoder import ImageDecoder
from lightning_memmap.loading.row_source import Fetched, released_error
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling import Sampler

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
    _stages: "weakref.WeakSet[_Stage]" = field(default_factory=weakref.WeakSet)
    _pools: dict[int, BufferPool] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of the images of one row."""
        return sum(math.prod(decoder.shape) for decoder in self.decoders.values())

    def decoded(self, steps: Iterator[Fetched], sampler: Sampler) -> Generator[Fetched, None, None]:
        """The same steps with images instead of their bytes, and their places behind the fields."""
        with closing(_Stage(self, sampler)) as stage:
            self._stages.add(stage)
            for step in steps:
                stage.begin(step)
                del step
                if len(stage.begun) > 1:
                    yield stage.take()
            while stage.begun:
                yield stage.take()

    def release(self) -> None:
        """End all threads. No step comes any more."""
        for stage in list(self._stages):
            stage.close()
        self._pools.clear()

    def memory(self, num_rows: int, receivers: int, device: torch.device) -> list[Tensor]:
        """Memory for the images and the places of each field, which nobody else holds."""
        fields: list[Any] = []
        for decoder in self.decoders.values():
            fields += [(decoder.shape, torch.uint8), ((3,), torch.float32)]
        if has_streams(device):
            return Buffers.empty(fields, num_rows, pin_memory=True).tensors
        with torch.inference_mode(False):
            if receivers not in self._pools:
                self._pools[receivers] = BufferPool(fields, _NUM_BUFFERS * receivers)
            return self._pools[receivers].get(num_rows).tensors


class _Stage:
    """Threads that decode the images of one epoch."""

    def __init__(self, images: Images, sampler: Sampler) -> None:
        self._images, self._sampler = images, sampler
        #: The steps whose images are decoded: the next one, and the one behind it.
        self.begun: list[tuple[Fetched, list[_FieldImages]]] = []
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._images.num_threads, "decode")

    def begin(self, step: Fetched) -> None:
        """Let the threads decode the images of a step."""
        self._check()
        works = list[_FieldImages]()
        for receiver, (leaves, device) in enumerate(zip(step.leaves, step.devices, strict=True)):
            num_rows = len(leaves[next(iter(self._images.decoders))])
            memory = iter(self._images.memory(num_rows, len(step.leaves), device))
            for index, decoder in self._images.decoders.items():
                rows = leaves[index]
                assert isinstance(rows, VariableRows)
                works.append(
                    _FieldImages(receiver, index, decoder, rows, next(memory), next(memory))
                )
        self._submit(works)
        self.begun.append((step, works))

    def _submit(self, works: list["_FieldImages"]) -> None:
        for each in works:
            each.submit(self._threads, self._images.num_threads)

    def take(self) -> Fetched:
        """The step that was begun first, once its images are decoded."""
        self._check()
        step, works = self.begun.pop(0)
        for each in works:
            for future in each.futures:
                future.result()
            if each.errors:
                raise self._failed(each, step)
            device = step.devices[each.receiver]
            step.leaves[each.receiver][each.index] = send(each.pixels, device)
            if each.decoder.form.with_scale:
                step.leaves[each.receiver].append(send(each.places, device))
        return step

    def _failed(self, images: "_FieldImages", step: Fetched) -> Exception:
        index = min(images.errors)
        error = images.errors[index]
        if not isinstance(error, ImageError):
            return error
        positions = step.steps.positions[step.rows_of(images.receiver)][index : index + 1]
        row = self._sampler.dataset_rows(step.steps.epoch, positions)
        failure = images.decoder.failed(int(row[0]), error)
        failure.__cause__ = error
        return failure

    def _check(self) -> None:
        """Check that the rows are there, and that the threads are those of this process."""
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The threads stayed with the parent, and so did what they had not decoded.
            self._start()
            for _, works in self.begun:
                self._submit(works)

    def close(self) -> None:
        """End the threads. No step comes any more."""
        if self._is_closed:
            return
        self._is_closed = True
        for _, works in self.begun:
            for each in works:
                each.turn = count(len(each.pixels)).__next__
        self.begun.clear()
        # When the interpreter ends, it has ended the threads, and much of the library is gone.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._threads.shutdown(cancel_futures=True)


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
    turn: Callable[[], int] = count().__next__  # The next image that no thread has begun.
    futures: list[Future[None]] = field(default_factory=list)

    def submit(self, threads: ThreadPoolExecutor, num_threads: int) -> None:
        """Let threads decode all images."""
        self.turn = count().__next__
        self.futures = [
            threads.submit(self._decode) for _ in range(min(num_threads, len(self.pixels)))
        ]

    def _decode(self) -> None:
        starts, lengths = self.rows.starts, self.rows.lengths
        pixels, places, data = self.pixels.numpy(), self.places.numpy(), self.rows.memory
        # Drawing the next number is one operation, which no other thread can interrupt.
        while (index := self.turn()) < len(starts):
            file = data[starts[index] : starts[index] + lengths[index]]
            try:
                self.decoder.decode(file, pixels[index], places[index])
            except Exception as error:
                self.errors[index] = error
