"""Row hashes: they add up from data devices to processes to the global batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lightning_memmap.callbacks.memory_trace import batches_of
from lightning_memmap.loading import Padded, RowList
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.transform import takes_generator

MODULUS = 2**64


def hash_rows(leaves: Sequence[Tensor | list[Tensor]]) -> int:
    """Sum, modulo 2**64, the XXH3 of each row over the bytes of all its leaves.

    The sum does not depend on the order of rows, and the sums of two halves of a batch add up to
    that of the batch. A row that is repeated or missing changes it.

    Args:
        leaves: Tensors of shape (B, ...), on any device, or where rows differ in length, lists of
            ``B`` tensors.

    Returns:
        The sum; 0 where there are no bytes.
    """
    columns: list[Any] = [
        [_bytes(row[None])[0] for row in leaf] if isinstance(leaf, list) else _bytes(leaf)
        for leaf in leaves
        if isinstance(leaf, list) or leaf.numel()
    ]
    total = 0
    for row in range(len(columns[0]) if columns else 0):
        digest = xxhash.xxh3_64()
        for column in columns:
            digest.update(column[row].data)
        total += digest.intdigest()
    return total % MODULUS


def _bytes(leaf: Tensor) -> np.ndarray:
    plain = leaf.detach().cpu().as_subclass(Tensor).contiguous()
    # A row may be empty.
    flat: np.ndarray = plain.view(len(plain), plain[0].numel()).view(torch.uint8).numpy()
    return flat


def leaves_of(batch: Any) -> list[Tensor | list[Tensor]]:
    """List the leaves of a batch that have rows, in the order of its containers.

    Args:
        batch: Any nesting of tensors; those without dimensions are left out.

    Returns:
        The tensors, each of shape (B, ...), on the device that they were on; for rows that differ
        in length, a list of them, without their padding.
    """
    found = list[Tensor | list[Tensor]]()
    for _, leaf in named_leaves(batch, whole=(Padded,)):
        if isinstance(leaf, Padded):
            found.append(leaf.rows())
        elif isinstance(leaf, RowList):
            found.append([_tensor(row) for row in leaf])
        elif isinstance(leaf, Tensor) and leaf.ndim:
            found.append(list(leaf.unbind()) if leaf.is_nested else leaf)
    return found


def _tensor(row: Tensor | str | bytes) -> Tensor:
    if isinstance(row, Tensor):
        return row
    data = row.encode("utf-8", "surrogatepass") if isinstance(row, str) else row
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def hash_batch(batch: Any) -> int:
    """Hash the rows of a batch, or of all batches of a super-batch together, by `hash_rows`.

    Args:
        batch: What a loader yields or a model is given.

    Returns:
        The sum of the hashes of all rows, modulo `MODULUS`.
    """
    return sum(hash_rows(leaves_of(part)) for part in batches_of(batch)) % MODULUS


class MappedLoader:
    """A loader whose batches pass through a function.

    Args:
        loader: What gives the batches.
        function: Given a batch, returns the batch to yield.
    """

    def __init__(self, loader: Any, function: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._function = function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler, whose epoch it sets, and for the state.
        return getattr(self._loader, name)


class HashedTransform(nn.Module):
    """A batch transform that records the hash of its rows before it changes them.

    Args:
        transform: The transform to apply.
        hashes: The hash of each call is appended to this list.
    """

    def __init__(self, transform: Callable[..., Any], hashes: list[int]) -> None:
        super().__init__()
        # As an attribute, a module is copied to the data device with this one.
        self.transform = transform
        self._note = hashes.append
        self._takes_generator = takes_generator(transform)

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        """Record the hash of the rows, and transform them.

        Args:
            batch: A batch of one data device.
            generator: Random generator on the batch's device; passed on to a transform that takes
                it.
        """
        self._note(hash_batch(batch))
        if self._takes_generator:
            return self.transform(batch, generator=generator)
        return self.transform(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HashedTransform":
        # All copies, one for each data device, append to one list.
        other = HashedTransform(copy.deepcopy(self.transform, memo), [])
        other._note = self._note
        return other
