"""Losses whose gradients were computed before ``backward`` is called, as pipelines need."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def separate_gradients(
    parameters: Sequence[nn.Parameter],
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Collect the gradients that are computed within the context in a dict, and nowhere else."""
    # Separate from the gradients of other losses, because a backward pass may scale each loss.
    before = [parameter.grad for parameter in parameters]
    grads: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield grads
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                grads[parameter] = parameter.grad
            parameter.grad = grad


def loss_with_gradients(
    value: Tensor,
    grads: dict[nn.Parameter, Tensor],
    on_backward: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return a loss whose ``backward`` scales known gradients and accumulates them.

    Args:
        value: The loss.
        grads: Its gradients, by parameter. They may be overwritten.
        on_backward: Called once the gradients have been added.
    """
    remaining: dict[nn.Parameter, Tensor] | None = grads

    def accumulate(scale: Tensor) -> None:
        nonlocal remaining
        if remaining is None:
            raise RuntimeError("backward was called twice for one loss: compute the loss again")
        # As in any backward pass, a parameter that has been frozen since has no gradient.
        for parameter, grad in ((p, grad) for p, grad in remaining.items() if p.requires_grad):
            if scale.device.type != "cpu" or scale != 1:
                grad.mul_(scale.to(grad))
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        remaining = None
        on_backward()

    leaf = value.detach().requires_grad_()
    leaf.register_hook(accumulate)  # type: ignore[no-untyped-call]
    # A copy, which users may change in place, unlike a leaf.
    return leaf.clone()
