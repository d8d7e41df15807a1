"""A graph on the CPU: the operators of a step, noted once and done again on the same memory.

As with a CUDA graph nothing of the program itself runs in a replay: Python numbers stay what they
were, and an operator that would wait for the device cannot be captured.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memmap.strategies._cuda_graph import CUDAGraph


class RecordedGraph(CUDAGraph):
    """Takes the place of `lightning_memmap.strategies._cuda_graph.CUDAGraph`.

    Attributes:
        counts: How often each method was called.
        generators: Those that the captured step was said to draw from.
    """

    def __init__(self) -> None:
        self.counts = {"warm_up": 0, "capture": 0, "replay": 0}
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._is_done = False

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.counts["warm_up"] += 1
        return run()

    def capture(self, run: Callable[[], Any], generators: Iterable[torch.Generator] = ()) -> Any:
        self.generators = list(generators)
        with self.capturing():
            return run()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What runs inside is noted."""
        self.counts["capture"] += 1
        with _Noting(self._calls):
            yield
        # The operators were done while they were noted: the first replay is over.
        self._is_done = True

    def replay(self) -> None:
        self.counts["replay"] += 1
        if self._is_done:
            self._is_done = False
            return
        with torch.no_grad():
            for function, args, kwargs, results in self._calls:
                again = _tensors(function(*args, **kwargs))
                for result, new in zip(results, again, strict=True):
                    # What an operator writes to, or is a view of, is there already.
                    if new.data_ptr() != result.data_ptr():
                        result.copy_(new)


class _Noting(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
