"""Train while the store is built, or from a finished one, in several processes."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.store.remote.cache import DIRECTORY
from tests.datasets import Logged
from tests.models import Points, Regression, make_trainer

ROWS = 151


class Slow(Logged):
    """Sleeps before each row."""

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(row)


def fit(
    out: Path,
    strategy: str,
    devices: int,
    batch_size: int,
    build: str,
    url: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train for three epochs, on datasets or on their stores at a URL."""
    if url is None:
        datasets = [Slow(Points(ROWS), out / "log"), Points(40, 5000)]
        options |= {"num_workers": 2, "fingerprint": "1"}
    else:
        datasets = []
        os.environ[DIRECTORY] = str(out / "cache")
    data = MemmapDataModule(
        *datasets,
        store_dir=url or out / "stores",
        batch_size=batch_size,
        build=build,
        **options,
    )
    trainer = make_trainer(out, strategy=strategy, devices=devices, max_epochs=3)
    module = Regression()
    trainer.fit(module, data)
    return {"seen": module.seen, "weights": local_weights(module)}


def local_weights(module: nn.Module) -> Tensor:
    """The parameters, or the parts of them, that this process has."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([each.detach().flatten() for each in local if not each.is_meta])
