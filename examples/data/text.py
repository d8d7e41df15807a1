"""Windows of a text: by default 750 KB that come with Python (PSF licence)."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset


def python_help() -> bytes:
    """Return the help texts of Python, by topic in alphabetical order."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


class Text(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text: 90 % for training, 5 % for validation, 5 % for testing.

    A sample is ``{"tokens": uint8 tensor of shape (length + 1,)}``. Each token but the last has the
    next one as its target. The last token of a window is the first of the next window.

    Args:
        split: ``train``, ``val`` or ``test``.
        length: Tokens to predict in a window.
        file: A text file. By default the help texts of Python, by topic in alphabetical order.

    Raises:
        ValueError: An unknown split, or a text that is too short for it.
    """

    def __init__(self, split: str, length: int = 64, file: str | Path | None = None) -> None:
        shares = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}
        if split not in shares:
            raise ValueError(f"split={split!r}: choose one of {', '.join(shares)}")
        text = python_help() if file is None else Path(file).read_bytes()
        first, last = (int(share * len(text)) for share in shares[split])
        rows = (last - first - 1) // length
        if rows < 1:
            raise ValueError(
                f"length={length}: the {last - first} bytes of the {split} split are fewer than the"
                f" {length + 1} of a window; use a smaller length or a longer text"
            )
        tokens = torch.frombuffer(bytearray(text[first:last]), dtype=torch.uint8)
        self.windows = tokens.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"tokens": self.windows[row]}
