"""The data of members that are tested in one process."""

from pathlib import Path
from typing import Any

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import KFold
from tests.models import Points


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    """A data module of two folds, or one with a validation set where ``subset`` is None.

    Args:
        path: Where its stores are.
        options: Arguments of the data module.
    """
    defaults: dict[str, Any] = {
        "train_dataset": Points(63),
        "test_dataset": Points(20, 100),
        "predict_dataset": Points(25, 200),
        "store_dir": path / "stores",
        "batch_size": 5,
        "subset": KFold(2, shuffle=False),
    }
    if options.get("subset", 2) is None:
        defaults["val_dataset"] = Points(10, 300)
    return MemmapDataModule(**{**defaults, **options})
