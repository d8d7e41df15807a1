"""A training step before its pipeline has run: what stands for the output and the gradients."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_memmap.errors import with_article

_PENDING = (
    "under memmap_pipeline the output of the module in training_step can only be passed to"
    " self.loss(output, batch), which runs on the last stage: compute there what the loss needs"
)


class PendingOutput:
    """What ``self(inputs)`` returns in a ``training_step``: an output that is not computed yet.

    ``self.loss(output, batch)`` runs the pipeline; until then no process has the output.

    Args:
        args: The inputs.
        num_rows: Their number of rows.
    """

    def __init__(self, args: Sequence[Tensor], num_rows: int) -> None:
        self.args = args
        self.num_rows = num_rows

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_PENDING)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_PENDING}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_PENDING)


class KnownGradients:
    """Adds gradients that are already computed when ``backward`` reaches their loss.

    Args:
        grads: By parameter, the gradient of the loss.
    """

    def __init__(self, grads: dict[nn.Parameter, Tensor]) -> None:
        self._grads: dict[nn.Parameter, Tensor] | None = grads

    def __call__(self, scale: Tensor) -> None:
        """Add the gradients, scaled by the gradient of the loss."""
        if self._grads is None:
            raise RuntimeError(
                "backward was called twice for one loss of memmap_pipeline: compute the loss again"
            )
        for parameter, grad in self._grads.items():
            if scale.device.type != "cpu" or scale != 1:
                grad.mul_(scale.to(grad.dtype))
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        self._grads = None


def num_rows_of(args: Sequence[Any]) -> int:
    """The rows of what the module was called with.

    Args:
        args: The inputs.

    Raises:
        TypeError: One of them is not a tensor with rows.
        ValueError: There are none, or they differ in their number of rows.
    """
    for arg in args:
        if not isinstance(arg, Tensor) or not arg.ndim:
            raise TypeError(
                f"memmap_pipeline: the module was called with {with_article(type(arg).__name__)};"
                " call it with tensors whose first dimension is the rows, as its first stage takes"
                " them"
            )
    rows = {len(arg) for arg in args}
    if len(rows) != 1 or not all(rows):
        raise ValueError(
            f"memmap_pipeline: the module was called with tensors of {sorted(rows)} rows: give it"
            " at least one tensor, all with the same rows"
        )
    return rows.pop()
