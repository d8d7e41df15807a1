"""The counter-based generator Philox4x32-10, on arrays of numpy and tensors of torch.

J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel random numbers: as easy as 1, 2, 3. SC'11.
A block of four 32-bit words is a function of a counter of four words and a key of two. Words are
held in int64, whose products wrap around modulo 2**64, so their upper and lower halves are exact.
Both libraries run the same operators: on the CPU, numpy is several times faster on small arrays.
"""

from typing import Any

import torch
from torch import Tensor

#: The bits of a word.
MASK = 2**32 - 1
#: Multipliers of words 0 and 2.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
#: Added to the two words of the key after each round.
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
#: Blocks that numpy computes at once, so that they stay in the processor's cache.
_BLOCKS_AT_ONCE = 2**13


def philox(counter: Tensor, key: int) -> Tensor:
    """Compute one block of random words for each counter.

    Args:
        counter: int64 of shape (4, N), values in ``[0, 2**32)``.
        key: The key of all counters, ``0 <= key < 2**64``; word 0 is its lower half.

    Returns:
        Random words, int64 of shape (4, N) with values in ``[0, 2**32)``, on the device of
        ``counter``.
    """
    words = torch.empty_like(counter)
    key_words = key & MASK, key >> 32
    round_keys = [
        [(word + number * step) & MASK for word, step in zip(key_words, _INCREMENTS, strict=True)]
        for number in range(_ROUNDS)
    ]
    keys = torch.tensor(round_keys)[..., None]
    multipliers = torch.tensor(_MULTIPLIERS)[:, None]
    if not _is_on_cpu(counter):
        keys = keys.to(counter.device)
        multipliers = multipliers.to(counter.device)
        words[::2], words[1::2] = _rounds(counter[::2], counter[1::2], multipliers, keys)
        return words
    source = counter.numpy()
    target = words.numpy()
    for start in range(0, counter.shape[1], _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        target[::2, part], target[1::2, part] = _rounds(
            source[::2, part], source[1::2, part], multipliers.numpy(), keys.numpy()
        )
    return words


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _rounds(even: Any, odd: Any, multipliers: Any, keys: Any) -> tuple[Any, Any]:
    """Run all rounds on words 0 and 2, and on words 1 and 3, each of shape (2, N)."""
    for round_key in keys:
        products = even * multipliers
        # Words 0 and 2 receive the upper halves of each other's products, and words 1 and 3 the
        # lower halves. The upper bits of `odd` are masked after they have been combined.
        even = _flipped(products >> 32)
        even ^= odd
        even ^= round_key
        even &= MASK
        odd = _flipped(products)
    return even, odd & MASK


def _flipped(words: Any) -> Any:
    return words.flip(0) if isinstance(words, Tensor) else words[::-1]
