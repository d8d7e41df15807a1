"""The only user of names that torch and Lightning keep to themselves."""

import torch
from torch import Tensor


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and storages, in Python and in C++, share the memory of a tensor.

    Views, tensors saved for backward, numpy arrays and DLPack capsules all count.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
