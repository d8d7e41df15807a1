"""The bytes of rows, and the hashes by which rows are recognised."""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor


def leaf_bytes(leaf: Tensor | np.ndarray) -> np.ndarray:
    """Return the bytes of one leaf in the byte order of this machine.

    Args:
        leaf: A dense CPU tensor or numpy array.

    Returns:
        A flat uint8 array. It shares memory with the leaf where that is contiguous.
    """
    if isinstance(leaf, Tensor):
        # A single element counts as contiguous, whatever its stride is.
        flat = leaf.contiguous().as_strided((leaf.numel(),), (1,))
        return flat.view(torch.uint8).numpy()
    native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8)


def hash_row(leaves: Sequence[Tensor | np.ndarray]) -> str:
    """Hash a row: XXH3 over the shapes and bytes of all its leaves.

    Args:
        leaves: The leaves in the order of the fields, as dense CPU tensors or numpy arrays.

    Returns:
        64 bits in hexadecimal.
    """
    digest = xxhash.xxh3_64()
    for leaf in leaves:
        # Otherwise ("ab", "c") would be ("a", "bc").
        digest.update(np.array([leaf.ndim, *leaf.shape], np.int64).data)
        digest.update(leaf_bytes(leaf).data)
    return digest.hexdigest()
