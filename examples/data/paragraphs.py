"""Prompts and answers from the help texts that come with Python (PSF licence)."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.utils.data import Dataset

#: What a label is where there is nothing to learn.
IGNORED = -100


class Paragraphs(Dataset[dict[str, Any]]):
    """Documents of bytes, of a topic as the prompt and one of its paragraphs as the answer.

    A sample has ``tokens``, uint8 of shape (T,); ``labels``, int16 of shape (T,), which are
    -100 in the prompt; and ``num_targets``, the number of all others. The last token is 0.

    Args:
        split: ``train``, or ``val``, which has every tenth paragraph.
        length: The most tokens of a document. Longer paragraphs are cut.

    Raises:
        ValueError: There is no such split.
    """

    def __init__(self, split: str, length: int = 512) -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split={split!r}: choose train or val")
        pairs = [
            (f"{topic}: ".encode(), paragraph.strip().encode()[: length - 32])
            for topic in sorted(topics)
            for paragraph in topics[topic].split("\n\n")
            if len(paragraph.strip()) > 20
        ]
        is_val = split == "val"
        self._pairs = [pair for row, pair in enumerate(pairs) if (row % 10 == 0) == is_val]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, row: int) -> dict[str, Any]:
        prompt, answer = self._pairs[row]
        tokens = torch.tensor([*prompt, *answer, 0], dtype=torch.uint8)
        labels = tokens.to(torch.int16)
        labels[: len(prompt)] = IGNORED
        return {"tokens": tokens, "labels": labels, "num_targets": len(answer) + 1}
