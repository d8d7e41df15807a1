"""A dataset whose rows are parts of one long stream of tokens."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.errors import check_integer, check_number
from lightning_memmap.integers import ceil_div
from lightning_memmap.schema.forms import Windows
from lightning_memmap.store.paths import local_path


class TokenStream(Dataset[dict[str, NDArray[Any]]]):
    """A map-style dataset of one long stream of tokens, to train on windows of it.

    The stream is cut into rows, each a sample ``{"tokens": array}``. With
    ``windows=Windows("tokens", length, stride)``, and the same length and stride here, each
    window of the stream appears exactly once: a row begins at a multiple of the stride, and
    repeats the last ``length - stride`` tokens of the row before. Shorter windows that begin in
    these tokens appear in both rows, and longer windows do not cross rows.

    Args:
        tokens: An array or tensor of one dimension; or a file, whose bytes are mapped.
        length: Tokens of a window, at least 1.
        stride: Tokens between the starts of successive windows; by default the length.
        dtype: The dtype of the tokens in a file, such as ``uint16``. By default, each byte is a
            token.
        start: The fraction of the stream before the first token, such as 0.9 for its last tenth.
        stop: The fraction of the stream before the end.
        row_tokens: Approximate number of tokens in a row. A build reads at least one row at once.

    Raises:
        OSError: The file cannot be read.
        TypeError: An argument is not a number.
        ValueError: A number is out of range, the tokens have more than one dimension, or there are
            fewer tokens than in a window.
    """

    def __init__(
        self,
        tokens: NDArray[Any] | Tensor | str | Path,
        length: int,
        stride: int | None = None,
        *,
        dtype: str = "uint8",
        start: float = 0.0,
        stop: float = 1.0,
        row_tokens: int = 2**20,
    ) -> None:
        stride = length if stride is None else stride
        length, stride, row_tokens = (
            check_integer(f"TokenStream: {name}", number, 1, "at least 1 token")
            for name, number in (("length", length), ("stride", stride), ("row_tokens", row_tokens))
        )
        for name, fraction in (("start", start), ("stop", stop)):
            check_number(f"TokenStream: {name}", fraction)
        if not 0 <= start < stop <= 1:
            raise ValueError(f"TokenStream: start={start}, stop={stop}: fractions from 0 to 1")
        stream: Any = tokens
        if isinstance(tokens, (str, Path)):
            stream = _map_file(local_path(tokens), dtype)
        elif isinstance(tokens, Tensor):
            stream = tokens.numpy()
        if not isinstance(stream, np.ndarray) or stream.ndim != 1:
            raise ValueError(
                f"TokenStream: tokens of shape {getattr(stream, 'shape', None)}: must be an array"
                " of one dimension, or the path of a file"
            )
        self.tokens = stream[int(start * len(stream)) : int(stop * len(stream))]
        self.length = length
        self.stride = stride
        if len(self.tokens) < length:
            raise ValueError(
                f"TokenStream: length={length}: the stream has only {len(self.tokens)} tokens: use"
                " shorter windows"
            )
        self._num_windows = (len(self.tokens) - length) // stride + 1
        self._row_windows = max(1, row_tokens // stride)

    def check_windows(self, windows: Windows) -> None:
        """Warn if the tokens are read in windows of another length or stride.

        A data module calls this method of every dataset that has it, at `setup`.

        Args:
            windows: The option of the data module.
        """
        if "tokens" not in windows.fields:
            return
        length = windows.length
        stride = windows.stride
        if (length, stride) != (self.length, self.stride) and len(self) > 1:
            warnings.warn(
                f"TokenStream(length={self.length}, stride={self.stride}) is read in windows of"
                f" length={length}, stride={stride}: where its {len(self)} rows meet, windows are"
                " missing or repeated; pass both the same length and stride",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return ceil_div(self._num_windows, self._row_windows)

    def __getitem__(self, row: int) -> dict[str, NDArray[Any]]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: the stream has {len(self)} rows")
        first = row * self._row_windows
        last = min(first + self._row_windows, self._num_windows) - 1
        stop = last * self.stride + self.length
        return {"tokens": np.asarray(self.tokens[first * self.stride : stop])}


def _map_file(path: Path, dtype: str) -> NDArray[Any]:
    try:
        with open(path, "rb") as file:
            return np.memmap(file, dtype, "r")
    except (TypeError, ValueError) as error:  # The dtype is unknown, or doesn't divide the file.
        raise ValueError(
            f"TokenStream: {path} has {path.stat().st_size} bytes, not a whole number of"
            f" tokens of dtype={dtype!r} ({error}): pass the dtype in which the file was written"
        ) from error
