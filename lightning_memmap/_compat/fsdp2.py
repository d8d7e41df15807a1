"""Private names of FSDP2: the state of a sharded module apart from its parameters."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn


def _states(units: Iterable[Any]) -> list[Any]:
    getters = (getattr(unit, "_get_fsdp_state", lambda: None) for unit in units)
    return [state for get in getters if (state := get()) is not None]


def _parameters(units: Iterable[Any]) -> list[Any] | None:
    """Return FSDP2's records of the parameters of units; None if its private names have changed."""
    try:
        params: list[Any] = []
        for state in _states(units):
            # Older versions have one group.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                params += [] if group is None else group.fsdp_params
        return params
    except AttributeError:
        return None


def is_gathered_otherwise(unit: nn.Module) -> bool:
    """Return whether a parameter of a unit has been frozen or thawed since it was gathered."""
    params = _parameters([unit])
    if params is None:
        return True
    for param in params:
        gathered = getattr(param, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad != param.sharded_param.requires_grad:
            return True
    return False


def can_keep_gradients(units: Iterable[Any]) -> bool:
    """Return whether gradients that FSDP2 has not reduced yet can be dropped, and reduced later."""
    params = _parameters(units)
    return (
        params is not None
        and all(hasattr(param, "unsharded_accumulated_grad") for param in params)
        and all(hasattr(state, "_root_post_backward_final_callback") for state in _states(units))
    )


def drop_kept_gradients(
    units: Iterable[Any], parameters: Collection[nn.Parameter] | None = None
) -> None:
    """Drop the gradients of parameters, or of all, that FSDP2 has not reduced yet."""
    for param in _parameters(units) or []:
        if parameters is not None and param.sharded_param not in parameters:
            continue
        param.unsharded_accumulated_grad = None
        if (gathered := getattr(param, "_unsharded_param", None)) is not None:
            gathered.grad = None


def reduce_kept_gradients(units: Iterable[Any]) -> None:
    """Reduce the gradients that FSDP2 has not reduced yet, as the next backward pass would."""
    for state in _states(units):
        if getattr(state, "_is_root", False):
            reduce: Callable[[], None] = state._root_post_backward_final_callback
            reduce()


def forget_interrupted_step(units: Iterable[Any]) -> None:
    """Reset sharded modules after a step that an exception has ended."""
    for unit in units:
        (state,) = _states([unit])
        # Older versions have no such method.
        if getattr(state, "_is_root", False) and hasattr(unit, "reset_iter_state"):
            unit.reset_iter_state()
