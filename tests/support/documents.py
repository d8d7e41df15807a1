"""Documents that are trained on in packs, and a module that logs a value of each of them."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.results import RowLog, read_row_results
from lightning_memmap.sampling import Packed
from tests.support.models import Regression

NUM_DOCUMENTS = 97


class Documents(Dataset[dict[str, Any]]):
    """Documents of 1 to 9 tokens, each of which is the number of its document."""

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.full((1 + index * 7 % 9,), index)}


class PerDocument(RowLog, Regression):
    """Logs the first token and the length of each document.

    Args:
        fails: The step that fails, counted from 0.
    """

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails:
            raise InterruptedError
        packing = batch["packing"]
        is_first = packing.position_ids == 0
        self.log_rows("document", packing.document_sums(batch["tokens"] * is_first))
        self.log_rows("length", packing.document_sums((packing.document_ids >= 0).long()))
        return self.net(torch.ones(1, 8)).mean()


#: What `PerDocument` logs.
KEYS = ["document", "length"]


def make_packs(path: Path, devices: int) -> MemmapDataModule:
    """Return the documents in packs, in the same steps on any number of devices."""
    return MemmapDataModule(
        Documents(),
        store_dir=path / "stores",
        batch_size=4 // devices,
        num_shards=2,
        sampler=Packed("tokens", length=16),
    )


def check_documents(results: Path) -> None:
    """Check that in both epochs each document has its own values."""
    table = read_row_results(results, "all")
    numbers = torch.arange(NUM_DOCUMENTS)
    assert table["seen"].all()
    assert torch.equal(table["document"], numbers.expand(2, -1))
    assert torch.equal(table["length"], (1 + numbers * 7 % 9).expand(2, -1))
