"""CUDA graphs of simulated devices: the operators of a capture, noted and run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.graphs import RecordedGraph


class Graph:
    """Takes the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.recorded = RecordedGraph()

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Nothing: an operator that runs again draws from its generator again."""

    def replay(self) -> None:
        self.recorded.replay()


@contextmanager
def graph(cuda_graph: Graph, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
    """Takes the place of ``torch.cuda.graph``, which waits for the device first."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cuda_graph.recorded.capturing():
        yield
    # A capture enqueues nothing; here its operators ran, as the first replay.
    torch.cuda.current_stream().wait_stream(stream)


def install() -> None:
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, graph  # type: ignore[assignment,misc]
