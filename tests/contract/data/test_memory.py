"""Memory of several processes on one machine: a store is mapped once by each and its pages are
shared, and a process reads the shards that are its own."""

import gc
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.datasets import Made
from tests.support.models import make_trainer
from tests.support.processes import in_processes

pytestmark = pytest.mark.slow


ROW_BYTES = 64 * 2**10
#: A page that is there, in the words of /proc/<pid>/pagemap.
_PRESENT = np.uint64(1 << 63)


class Blocks(Made):
    """Row ``i``: 64 KiB of the number ``i``."""

    def sample(self, row: int) -> Any:
        return torch.full((ROW_BYTES,), row % 251, dtype=torch.uint8)


class Mean(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * batch[:, 0].float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Mapping:
    """One mapping of a file into this process, by /proc/self/smaps.

    Args:
        start: Its first address.
        end: The address after its last one.
        bytes_of: By name (``Rss``, ``Pss``, ``Private_Dirty``, ...), the bytes.
    """

    start: int
    end: int
    bytes_of: dict[str, int]

    def present(self) -> Tensor:
        """Whether this process has read each page, or had it mapped with one that it read."""
        size = os.sysconf("SC_PAGE_SIZE")
        count = (self.end - self.start) // size
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            data = os.pread(file.fileno(), 8 * count, self.start // size * 8)
        return torch.from_numpy((np.frombuffer(data, np.uint64) & _PRESENT) != 0)


def mappings_of(path: Path) -> list[Mapping]:
    """The mappings of a file into this process."""
    found: list[Mapping] = []
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)", line):
            mine = head[3] == str(path)
            if mine:
                found.append(Mapping(int(head[1], 16), int(head[2], 16), {}))
        elif mine and (size := re.match(r"(\w+): +(\d+) kB", line)):
            found[-1].bytes_of[size[1]] = int(size[2]) * 1024
    return found


ROWS, SHARDS, PROCESSES = 1024, 8, 2
STORE_BYTES = ROWS * ROW_BYTES
#: What the kernel maps with a page that is read: at most one huge page.
AROUND_BYTES = 2 * 2**20


class Watch(L.Callback):
    """Looks at the mappings of the training store while all processes train."""

    def on_train_epoch_end(self, trainer: Any, _: L.LightningModule) -> None:
        store = trainer.datamodule.stores["train"]
        path = store.files / "value.memmap"
        trainer.strategy.barrier()
        (trained,) = mappings_of(path)
        assert_own_shards(trained.present(), trainer.global_rank)
        trainer.strategy.barrier()
        store.mapped_columns[0].tensor.sum()
        trainer.strategy.barrier()
        (read_whole,) = mappings_of(path)
        assert_shared(read_whole.bytes_of)
        trainer.strategy.barrier()


def assert_own_shards(present: Tensor, rank: int) -> None:
    """All pages of its own shards were read while it loaded or trained, and no others."""
    present = present.view(SHARDS, -1)
    own = torch.arange(SHARDS) % PROCESSES == rank
    assert present[own].all()
    margin = AROUND_BYTES // os.sysconf("SC_PAGE_SIZE")
    assert present.shape[1] > 3 * margin
    assert not present[~own][:, margin:-margin].any()


def assert_shared(size: dict[str, int]) -> None:
    """Once both processes have read all, each has half of one copy, in one mapping, unchanged."""
    assert size["Size"] == size["Rss"] == STORE_BYTES
    assert size["Pss"] == pytest.approx(STORE_BYTES / PROCESSES, rel=0.01)
    assert size["Private_Dirty"] == size["Anonymous"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps and pagemap")
@in_processes(PROCESSES)
def test_ddp_processes_share_pages_and_read_their_own_shards_alone(tmp_path: Path) -> None:
    for residency in ("device", "mmap"):
        data = MemmapDataModule(
            Blocks(ROWS),
            store_dir=tmp_path / "stores",
            batch_size=8,
            num_shards=SHARDS,
            residency=residency,
        )
        trainer = make_trainer(tmp_path, strategy="ddp", devices=PROCESSES, callbacks=[Watch()])
        trainer.fit(Mean(), data)
        # The Trainer, its loops and the data module hold each other.
        del trainer, data
        gc.collect()
