"""Random numbers for each row of a batch, whichever device or process has it."""

import copy
import math
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import check_integer
from lightning_memmap.integers import ceil_div
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.philox import MASK, philox
from lightning_memmap.sampling.sampler import Sampler, check_seed, derive_seed

#: Returns the key of the generator for one call, from the seed, the epoch and the call.
_derive_key = lru_cache(maxsize=256)(derive_seed)
#: Words of a block of the generator.
_BLOCK = 4
#: Values of a word.
_RANGE = 2**32
#: The most values of `RowRandom.randint`: a product with a word stays below 2**63.
_MAX_SPAN = 2**31


class RowRandom:
    """Random numbers for the rows of a batch, for a transform with a parameter named ``random``.

    Each method returns a tensor of shape (B, \\*shape) on the device of the batch. The numbers of a
    row depend only on the seed, the epoch, the row of the dataset, and the number of the call: the
    first, second, third ... on this object. So a row is augmented identically on any number of
    devices, under every strategy, and after a resume. Orders that may draw a row several times in
    an epoch, such as `lightning_memmap.sampling.Weighted`, add the position in the epoch, so that
    each time has other numbers. In one dimension, more numbers continue fewer: ``uniform(9)``
    begins with ``uniform(5)``, so padding to another length changes no mask of tokens.

    The generator is Philox4x32-10. CPUs and GPUs compute the same numbers, but `normal` may
    differ by rounding. The calls of a transform must not depend on the rows of
    its batch, or the same call would have another number on another number of devices.

    Args:
        rows: Rows of the dataset, integers of shape (B,), 0 or greater.
        seed: Seed, ``0 <= seed < 2**63``.
        epoch: Epoch, counted from 0.
        positions: Positions in the epoch, integers of shape (B,), where a row may come several
            times; None where each row comes once.
        device: The device that computes the numbers.

    Raises:
        TypeError: A row or a position isn't an integer.
        ValueError: A row or a position is negative, or their numbers differ.

    Examples:
        >>> random, other = RowRandom([7, 3]), RowRandom([3])
        >>> shift = random.randint(2, low=-4, high=5)
        >>> shift.shape, bool((shift[1] == other.randint(2, low=-4, high=5)[0]).all())
        (torch.Size([2, 2]), True)
    """

    def __init__(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        *,
        seed: int = 0,
        epoch: int = 0,
        positions: Sequence[int] | NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self._rows = _check_rows("rows", rows)
        self._positions = np.zeros_like(self._rows)
        if positions is not None:
            self._positions = _check_rows("positions", positions)
        if self._rows.ndim != 1 or self._rows.shape != self._positions.shape:
            raise ValueError(
                f"rows of shape {self._rows.shape}, positions of shape {self._positions.shape}:"
                " pass one integer per row for each"
            )
        self._seed = check_seed(seed)
        self._epoch = check_integer("epoch", epoch, 0, "epochs are counted from 0")
        self._num_calls = 0
        #: The blocks of the last group of calls for single numbers, and the number of the group.
        self._group: tuple[int, Tensor] | None = None

    @classmethod
    def at(cls, order: Sampler, epoch: int, positions: range, seed: int) -> "RowRandom":
        """Return the random numbers of the rows at some positions of an epoch.

        Args:
            order: The order of the rows.
            epoch: Epoch, counted from 0.
            positions: Ascending positions; see `Sampler.locate`.
            seed: Seed of the numbers.
        """
        rows = order.padded_dataset_rows(epoch, positions)
        if rows.ndim > 1:
            # A pack of several rows has the numbers of its position.
            rows = np.array(positions)
        # A row that is drawn again has other numbers each time.
        drawn_at = None if order.draws_each_row_once else np.array(positions)
        return cls(rows, seed=seed, epoch=epoch, positions=drawn_at)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} rows, epoch={self._epoch}, call={self._num_calls})"
        )

    def restarted(
        self, device: torch.device | None = None, rows: slice = slice(None)
    ) -> "RowRandom":
        """Return the random numbers of these rows, or some of them, from the first call on."""
        other = copy.copy(self)
        other.device = self.device if device is None else device
        other._rows = self._rows[rows]
        other._positions = self._positions[rows]
        other._num_calls = 0
        other._group = None
        # The cached counter of the rows.
        vars(other).pop("_counter", None)
        return other

    def uniform(self, *shape: int, low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
        """Draw numbers that are uniformly distributed in ``[low, high)``.

        Args:
            *shape: Shape of the numbers of a row; one number by default.
            low: Lower bound: a number, or a float32 tensor that broadcasts to (B, \\*shape).
            high: Upper bound, like ``low``.

        Returns:
            float32 of shape (B, \\*shape), multiples of 2**-24 before they are scaled.

        Raises:
            ValueError: ``low`` is above ``high``, or the shape is negative.
        """
        self._check_broadcast(shape, low=low, high=high)
        have_tensors = isinstance(low, Tensor) or isinstance(high, Tensor)
        if not have_tensors and not low <= high:
            raise ValueError(f"uniform: low={low}, high={high}: low must not be above high")
        numbers = (self._words(shape) >> 8).float().mul_(2.0**-24)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            bottom, top = (
                torch.as_tensor(bound, device=self.device).float() for bound in (low, high)
            )
            numbers = numbers * (top - bottom) + bottom
            return torch.minimum(numbers, torch.nextafter(top, bottom))
        if (low, high) == (0, 1):
            return numbers
        largest = float(np.nextafter(np.float32(high), np.float32(low)))
        # Rounded, a sum may reach `high`.
        return numbers.mul_(high - low).add_(low).clamp_(max=largest)

    def normal(self, *shape: int, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
        """Draw numbers that are normally distributed (Box and Muller 1958).

        Args:
            *shape: Shape of the numbers of a row; one number by default.
            mean: Mean: a number, or a tensor that broadcasts to (B, \\*shape).
            std: Standard deviation, like ``mean``.

        Returns:
            float32 of shape (B, \\*shape), at most 6.7 standard deviations from the mean. It is the
            same on CPUs and GPUs up to rounding.

        Raises:
            ValueError: The shape is negative.
        """
        _check_shape(shape)
        self._check_broadcast(shape, mean=mean, std=std)
        count = math.prod(shape)
        # Two words make two numbers.
        first, second = self._words((ceil_div(count, 2), 2)).unbind(-1)
        # In (0, 1].
        radius = (first + 1).float().mul_(1 / _RANGE).log_().mul_(-2).sqrt_()
        angle = second.float().mul_(2 * math.pi / _RANGE)
        numbers = torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)], -1)
        numbers = numbers.flatten(1)[:, :count].reshape(len(self), *shape)
        return numbers if _is_number(mean, 0) and _is_number(std, 1) else numbers * std + mean

    def randint(self, *shape: int, low: int | Tensor = 0, high: int | Tensor) -> Tensor:
        """Draw integers that are uniformly distributed in ``[low, high)``.

        Args:
            *shape: Shape of the numbers of a row; one number by default.
            low: Lower bound: an integer, or an int64 tensor that broadcasts to (B, \\*shape).
            high: Upper bound, like ``low``.

        Returns:
            int64 of shape (B, \\*shape). Probabilities differ by less than 2**-32.

        Raises:
            ValueError: ``high`` isn't above ``low``, by at most 2**31, or the shape is negative.
        """
        self._check_broadcast(shape, low=low, high=high)
        span = high - low
        if not isinstance(span, Tensor) and not 1 <= operator.index(span) <= _MAX_SPAN:
            raise ValueError(
                f"randint: low={low}, high={high}: high must be above low, by at most 2**31"
            )
        numbers = (self._words(shape) * span) >> 32
        return numbers if _is_number(low, 0) else numbers + low

    def bernoulli(self, *shape: int, p: float | Tensor = 0.5) -> Tensor:
        """Draw bools that are True with a probability.

        Args:
            *shape: Shape of the bools of a row; one by default.
            p: The probability: a number, or a tensor that broadcasts to (B, \\*shape); for one
                value per row, of shape (B, 1, ...).

        Returns:
            bool of shape (B, \\*shape).

        Raises:
            ValueError: ``p`` isn't in [0, 1], or the shape is negative.
        """
        self._check_broadcast(shape, p=p)
        if isinstance(p, Tensor):
            return self._words(shape) < (p.float() * _RANGE).long()
        if not 0 <= p <= 1:
            raise ValueError(f"bernoulli: p={p}: pass a probability from 0 to 1")
        return self._words(shape) < round(p * _RANGE)

    def permutation(self, num: int) -> Tensor:
        """Draw a permutation of ``0 .. num - 1`` for each row.

        Args:
            num: Numbers to permute, at least 0.

        Returns:
            int64 of shape (B, num).

        Raises:
            ValueError: ``num`` is negative.
        """
        high, low = self._words((num, 2)).unbind(-1)
        return ((high << 31) | (low >> 1)).argsort(dim=-1, stable=True)

    def generators(self) -> Iterator[np.random.Generator]:
        """Yield a generator of numpy for each row, which counts as one call."""
        key = self._key(2 * self._next_call())
        for row, position in zip(self._rows.tolist(), self._positions.tolist(), strict=True):
            yield np.random.Generator(np.random.Philox(key=[key, row], counter=[0, 0, 0, position]))

    def _check_broadcast(self, shape: tuple[int, ...], **parameters: Any) -> None:
        """Check that parameters don't change the shape of the numbers by broadcasting."""
        expected = len(self), *shape
        for name, value in parameters.items():
            if not isinstance(value, Tensor):
                continue
            sizes = tuple(value.shape)
            fitting = expected[len(expected) - len(sizes) :]
            if len(sizes) > len(expected) or any(
                size not in (1, other) for size, other in zip(sizes, fitting, strict=True)
            ):
                raise ValueError(
                    f"{name}: its shape {sizes} doesn't broadcast to {expected}: for one value per"
                    f" row, pass the shape {(len(self), *[1] * len(shape))}"
                )

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next random words, int64 of shape (B, *shape) with values below 2**32."""
        _check_shape(shape)
        call = self._next_call()
        count = math.prod(shape)
        if not shape:
            # Four calls for a number per row share a block.
            group, word = divmod(call, _BLOCK)
            if self._group is None or self._group[0] != group:
                self._group = group, self._blocks(1, self._key(2 * group + 1))
            return self._group[1][word]
        num_blocks = ceil_div(count, _BLOCK)
        blocks = self._blocks(num_blocks, self._key(2 * call))
        words = blocks.view(_BLOCK, len(self), num_blocks).permute(1, 2, 0).flatten(1)
        return words[:, :count].reshape(len(self), *shape)

    def _blocks(self, num: int, key: int) -> Tensor:
        """Compute blocks for each row, int64 of shape (4, B * num)."""
        if num == 1:
            return philox(self._counter, key)
        counter = self._counter.repeat_interleave(num, dim=1)
        counter[2] = torch.arange(num, device=self.device).repeat(len(self))
        return philox(counter, key)

    @cached_property
    def _counter(self) -> Tensor:
        """The counter of the first block of each row, int64 of shape (4, B)."""
        words = [self._rows & MASK, self._rows >> 32, np.zeros_like(self._rows)]
        counter = np.stack([*words, self._positions & MASK])
        return send(torch.from_numpy(counter), self.device)

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls - 1

    def _key(self, stream: int) -> int:
        return _derive_key(self._seed, self._epoch, stream)


def _check_rows(name: str, rows: Any) -> NDArray[np.int64]:
    """Return rows or positions as an array, int64 of shape (B,)."""
    array = np.asarray(rows)
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: pass integers, not {array.dtype}")
    numbers = array.astype(np.int64, copy=False)
    # Larger numbers than int64 has become negative.
    if (is_wrong := numbers < 0).any():
        raise ValueError(f"{name}: {array[is_wrong][0]}: pass numbers from 0 to 2**63 - 1")
    return numbers


def _check_shape(shape: tuple[int, ...]) -> None:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape={shape}: pass integers of at least 0, such as uniform(2, 3)")


def _is_number(value: object, number: int) -> bool:
    return not isinstance(value, Tensor) and value == number
