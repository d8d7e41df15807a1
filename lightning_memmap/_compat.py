"""The only user of names that torch and Lightning keep to themselves."""

import sys

import torch
from torch import Tensor


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and storages, in Python and in C++, share the memory of a tensor.

    Views, tensors saved for backward, numpy arrays and DLPack capsules all count.
    """
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    # All who ask for the storage itself share one Python object, which C++ counts once.
    return count + sys.getrefcount(storage)
