"""A data module that combines the loaders of two of ours, as Lightning does it."""

from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import CombinedLoader

from lightning_memmap import MemmapDataModule
from tests.models import Points

LONG, SHORT = Points(48), Points(24, offset=100)


class CombinedData(L.LightningDataModule):
    """The loaders of two data modules, combined."""

    sets: ClassVar[dict[str, Points]] = {"long": LONG, "short": SHORT}

    def __init__(
        self, path: Path, mode: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "num_shards": 4}
        options["drop_last"] = drop_last
        self.mode = mode
        self.parts = {
            name: MemmapDataModule(rows, store_dir=path / name, **options)
            for name, rows in self.sets.items()
        }

    def prepare_data(self) -> None:
        for part in self.parts.values():
            part.prepare_data()

    def setup(self, stage: str) -> None:
        for part in self.parts.values():
            part.trainer = self.trainer
            part.setup(stage)

    def val_dataloader(self) -> list[Any]:
        return []

    def train_dataloader(self) -> CombinedLoader:
        loaders = {name: part.train_dataloader() for name, part in self.parts.items()}
        return CombinedLoader(loaders, self.mode)
