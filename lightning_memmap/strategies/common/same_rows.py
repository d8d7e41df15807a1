"""Finds loaders that serve the same rows in every process."""

from typing import Any

import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

#: A digest is sent as a signed integer of 64 bits.
_DIGEST_BITS = 63


def may_repeat_rows(loader: object) -> bool:
    """Return whether a loader's rows may be the same in every process.

    Lightning divides the rows of a map-style dataset between processes. Only an ``IterableDataset``
    itself can do so.
    """
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def batch_digest(batch: Any) -> Tensor:
    """Return a digest of a batch's tensors: an int64 tensor without dimensions, on the CPU."""
    hasher = xxhash.xxh3_64()

    def update(tensor: Tensor) -> None:
        values = tensor.detach().cpu()
        hasher.update(f"{values.dtype} {tuple(values.shape)}".encode())
        if values.layout is torch.strided:
            hasher.update(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    apply_to_collection(batch, Tensor, update)
    return torch.tensor(hasher.intdigest() >> (64 - _DIGEST_BITS))


def warn_if_equal(digests: Tensor, ranks: Tensor) -> None:
    """Warn if processes of several data-parallel ranks have equal batches.

    Args:
        digests: A digest of the first batch of each process, of shape (P,).
        ranks: Their data-parallel ranks, of shape (P,).
    """
    num_ranks = len(set(ranks.tolist()))
    num_batches = len(set(digests.tolist()))
    if num_batches < num_ranks:
        rank_zero_warn(
            f"train_dataloaders: the first batches of {num_ranks} processes are {num_batches}"
            " different ones: an IterableDataset serves all its rows in each process, unless it"
            " divides them itself. Divide them by torch.distributed.get_rank(), or store the"
            " dataset by a MemmapDataModule"
        )
