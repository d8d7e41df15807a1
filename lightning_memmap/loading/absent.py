"""Fields of a batch whose rows this process does not hold."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class AbsentRows(Tensor):
    """A tensor on the meta device for rows of a field that this process does not hold."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.to and isinstance(args[0], cls):
            # There is nothing to copy to another device: only the dtype may change.
            given = (*args[1:], *(kwargs or {}).values())
            dtypes = [each.dtype if isinstance(each, Tensor) else each for each in given]
            dtypes = [each for each in dtypes if isinstance(each, torch.dtype)]
            args, kwargs = (args[0], *(dtypes[:1] or ["meta"])), {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, cls) and not leaf.is_meta:
                raise RuntimeError(
                    f"{getattr(func, '__name__', func)}: this process does not hold the field that"
                    " one of the tensors stands for. Under memmap_pipeline only the first process"
                    " holds the input_fields of the module, and only the last one its loss_fields:"
                    " name the field there, or use it in the first stage or in loss(output, batch)"
                )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def absent_rows(num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Stand-ins for rows of a field."""
    return torch.empty((num_rows, *shape), dtype=dtype, device="meta").as_subclass(AbsentRows)
