"""CUDA streams in which stages on several devices work on several micro-batches at a time."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap._compat.tensors import tree_leaves
from lightning_memmap.loading.device_streams import (
    allow_gradients_across_streams,
    kept_stream,
    stream_module,
)
from lightning_memmap.strategies.model_stages.cut import Stage

#: Attributes of a module that its forward pass does not assign, and its parameters.
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"_buffers"}


class NoStreams:
    """For a device that runs micro-batches in the order of the calls."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of a step."""
        yield

    @contextmanager
    def microbatch(self, batch: Any) -> Iterator[None]:
        """Around the call of the module's step with one micro-batch.

        Args:
            batch: The micro-batch, on the root device.
        """
        yield


class MicroBatchStreams(NoStreams):
    """Lets stages run side by side, each on one micro-batch after the other.

    Every other device runs its stage in its current stream. The root device has one stream for the
    layers of its stage, and one per micro-batch for the rest of the step: with a single stream the
    first stage would wait for the loss of the previous micro-batch.

    So each stage runs the micro-batches in order. The rest of the step does so too, in two halves
    that do not wait for each other: what it computes until it has called its last layer, and what
    it computes from the output of the last stage. The backward pass of each operator runs in the
    stream of its forward pass.

    The streams are kept for the whole process, since the allocator keeps memory for each stream.

    Args:
        device: The root device.
    """

    def __init__(self, device: torch.device) -> None:
        # Parameters that are used outside of the stages are used by each micro-batch in its stream.
        allow_gradients_across_streams()
        self._device = device
        self._module = stream_module(device)
        self._layers = kept_stream(device, "layers")
        #: The streams of this step's micro-batches so far, the current one last.
        self._rest: list[Any] = []
        self._is_running = False
        #: Recorded when the current micro-batch called its latest layer.
        self._called: Any = None
        self._entered: list[AbstractContextManager[Any]] = []

    @contextmanager
    @override
    def step(self) -> Iterator[None]:
        outer = self._module.current_stream(self._device)
        self._rest, self._called = [], None
        try:
            yield
        finally:
            for stream in (self._layers, *self._rest):
                outer.wait_stream(stream)

    @contextmanager
    @override
    def microbatch(self, batch: Any) -> Iterator[None]:
        stream = kept_stream(self._device, f"micro-batch {len(self._rest)}")
        stream.wait_stream(self._module.current_stream(self._device))
        if self._called is not None:
            self._called.wait(stream)
        elif self._rest:
            stream.wait_stream(self._rest[-1])
        # The backward pass reads it there, and drops it before the step's stream waits for that.
        _use(stream, batch)
        self._rest.append(stream)
        self._entered, self._called = [], None
        with self._module.stream(stream):
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False
                self._follow()

    def connect(self, stages: Sequence[Stage]) -> list[RemovableHandle]:
        """Let layers run in their streams. Call it after the hooks that move their inputs.

        Args:
            stages: The stages of the module, the last one last.

        Returns:
            The hooks that do this.
        """
        handles = []
        for stage in stages:
            for layer in dict.fromkeys(stage.layers):
                if stage.device == self._device:
                    handles += [
                        layer.register_forward_pre_hook(self._enter, with_kwargs=True),
                        layer.register_forward_hook(self._leave),
                    ]
                else:
                    handles.append(layer.register_forward_pre_hook(self._mark))
        last = stages[-1].layers[-1]
        return [*handles, last.register_forward_hook(lambda *call: self._follow())]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mark(self, layer: nn.Module, args: Any) -> None:
        if self._is_running:
            self._called = self._module.Event()
            self._called.record(self._rest[-1])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_running:
            return
        self._mark(layer, args)
        self._called.wait(self._layers)
        _use(self._layers, args, kwargs)
        self._entered.append(self._module.stream(self._layers))
        self._entered[-1].__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        if not self._is_running:
            return
        self._entered.pop().__exit__(None, None, None)
        self._rest[-1].wait_stream(self._layers)
        # The rest of the step may read what the layer keeps, and the next micro-batch replaces it.
        _use(self._rest[-1], output, list(_attributes(layer)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow(self) -> None:
        """Wait for everything that the previous micro-batch computes."""
        if self._is_running and len(self._rest) > 1:
            self._rest[-1].wait_stream(self._rest[-2])


def _attributes(layer: nn.Module) -> Iterator[Any]:
    """The buffers of a layer and its submodules, and other attributes that may hold tensors."""
    for module in layer.modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and isinstance(value, (Tensor, list, tuple, dict)):
                yield value


def _use(stream: Any, *values: Any) -> None:
    """Keep the memory of tensors from being reused before a stream has finished its work."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.device == stream.device:
            value.record_stream(stream)
