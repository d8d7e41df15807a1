"""Private names of FSDP2: what a sharded module holds beside its parameters."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn


def _states(units: Iterable[Any]) -> list[Any]:
    getters = (getattr(unit, "_get_fsdp_state", lambda: None) for unit in units)
    return [state for get in getters if (state := get()) is not None]


def _parameters(units: Iterable[Any]) -> list[Any] | None:
    """The parameters of units as FSDP2 knows them; None where its names are others."""
    try:
        found: list[Any] = []
        for state in _states(units):
            # Older versions have one group.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                found += [] if group is None else group.fsdp_params
        return found
    except AttributeError:
        return None


def is_gathered_otherwise(unit: nn.Module) -> bool:
    """Whether a parameter of a unit has been frozen or thawed since it was gathered."""
    params = _parameters([unit])
    if params is None:
        return True
    for param in params:
        gathered, sharded = getattr(param, "_unsharded_param", None), param.sharded_param
        if gathered is not None and gathered.requires_grad != sharded.requires_grad:
            return True
    return False


def can_keep_gradients(units: Iterable[Any]) -> bool:
    """Whether the gradients that FSDP2 has not reduced yet can be dropped, and reduced later."""
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
    """Let sharded modules forget a step that an exception has ended."""
    for unit in units:
        (state,) = _states([unit])
        # Older versions have no such method.
        if getattr(state, "_is_root", False) and hasattr(unit, "reset_iter_state"):
            unit.reset_iter_state()
