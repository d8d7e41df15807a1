"""Texts of one row: how several, or none, are kept as one string of bytes.

Their number and the length of each in bytes come first, as uint32 in little-endian order, and then
the texts one after the other. Where there is none, there are no bytes.
"""

from collections.abc import Sequence

import numpy as np

_LENGTH = np.dtype("<u4")
_MAX_BYTES = np.iinfo(_LENGTH).max


def join_texts(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the bytes of texts.

    Args:
        texts: uint8 of shape (bytes,), one for each text.

    Returns:
        What `split_texts` takes, uint8 of shape (bytes,).

    Raises:
        ValueError: A text has 2**32 bytes or more.
    """
    if not texts:
        return np.empty(0, np.uint8)
    numbers = [len(texts), *map(len, texts)]
    if max(numbers) > _MAX_BYTES:
        raise ValueError(
            f"a text of {max(numbers)} bytes is too long for a list: at most 2**32 - 1"
        )
    return np.concatenate([np.array(numbers, _LENGTH).view(np.uint8), *texts])


def split_texts(data: bytes) -> list[bytes]:
    """Divide what `join_texts` has joined.

    Args:
        data: The bytes, which have not been checked.

    Returns:
        The bytes of each text.

    Raises:
        ValueError: They are no texts that were joined.
    """
    if not data:
        return []
    size = _LENGTH.itemsize
    count = int(np.frombuffer(data, _LENGTH, 1)[0]) if len(data) >= size else 0
    first = (1 + count) * size
    if not count or first > len(data):
        raise ValueError("they end before their lengths do")
    lengths = np.frombuffer(data, _LENGTH, count, offset=size)
    ends = first + np.cumsum(lengths, dtype=np.int64)
    if ends[-1] != len(data):
        raise ValueError("their lengths do not add up")
    starts = [first, *ends[:-1].tolist()]
    return [data[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
