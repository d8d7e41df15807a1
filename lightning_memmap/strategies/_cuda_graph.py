"""Graphs of CUDA devices: nothing else in the package knows of them."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from lightning_memmap.loading.device_streams import allow_gradients_across_streams

T = TypeVar("T")


class CUDAGraph:
    """Work that a CUDA device records once, and repeats on the same memory.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        # Steps of another shape run in the current stream.
        allow_gradients_across_streams()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: Any = torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function in the stream of the capture, without capturing it.

        Args:
            run: Enqueues work on the device. Work in the current stream is ordered before and after
                it.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def capture(self, run: Callable[[], T], generators: Iterable[torch.Generator] = ()) -> T:
        """Record the device work of a function without doing it; `replay` does it.

        Args:
            run: Enqueues work on the device, and does not wait for it.
            generators: Generators of the device that it may draw from, besides torch's own: each
                replay goes on where they stand.

        Returns:
            What the function returned; each replay writes its result to these tensors.

        Raises:
            RuntimeError: The function does something that cannot be captured.
        """
        for generator in generators:
            self._graph.register_generator_state(generator)
        # Meanwhile other threads may allocate page-locked memory for rows that they prefetch.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode=mode):
            return run()

    def replay(self) -> None:
        """Let the device do the captured work."""
        self._graph.replay()


def make_graph(device: torch.device) -> CUDAGraph:
    """Make an empty graph.

    Args:
        device: The root device.

    Raises:
        ValueError: The device is not a CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(
            f"cuda_graph=True: the root device is {device}, and only CUDA devices have graphs;"
            " train without it"
        )
    return CUDAGraph(device)
