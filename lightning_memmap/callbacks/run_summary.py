"""A table at the end of a run: what was stored, where it was placed, and the throughput."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from rich import get_console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.errors import with_article
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.placement.plan import HeldShards, Residency
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.manifest import Manifest


class RunSummary(L.Callback):
    """Prints what was stored, where it was placed, and how fast it was used.

    There is one table after ``fit`` and one after ``test``.

    The table has the contents of the store of each split, the shards of each data device, the
    throughput of training, and the logged metrics. The table of a test includes the fit before it,
    so that the last table of a program is complete.

    Throughput is rows per second over all processes: the rows of an epoch's training steps divided
    by the wall time of the epoch without its validation. The first epoch of a fit is a warm-up and
    is shown separately; of the others the table shows the median, the slowest and the fastest.

    All ranks run this callback and wait for their own device once per epoch. Rank zero prints the
    table, with the data devices of its own process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._manifests: dict[str, Manifest] = {}
        self._held: list[HeldShards] = []
        self._rates: list[float] = []
        self._rows_at_start = 0
        self._epoch_start_s = self._validation_start_s = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note what the data module stored and placed for this stage.

        Raises:
            TypeError: The Trainer runs without a `MemmapDataModule`.
        """
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, MemmapDataModule) or data.placement is None:
            raise TypeError(
                f"RunSummary: the Trainer's data module is {with_article(type(data).__name__)}, and"
                " the summary is about stores and shards: pass datamodule=MemmapDataModule(...),"
                " or leave the callback out"
            )
        if stage == "fit":
            self._manifests, self._held, self._rates = {}, [], []
        self._manifests |= {name: store.manifest for name, store in data.stores.items()}
        held = [shards for shards in self._held if shards.split not in data.stores]
        self._held = [*held, *data.placement.held()]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A fit that goes on inside of an epoch starts none.
        self.on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows_at_start = _rows_until_now(trainer)
        self._epoch_start_s = _now_s(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start_s = _now_s(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Shifts the start of the epoch by the validation. Outside of an epoch it has no effect.
        self._epoch_start_s += _now_s(trainer) - self._validation_start_s

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if rows := _rows_until_now(trainer) - self._rows_at_start:
            self._rates.append(rows / (_now_s(trainer) - self._epoch_start_s))

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(trainer, "fit")

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(trainer, "test")

    def _print(self, trainer: L.Trainer, stage: str) -> None:
        # On every rank, because a metric that is computed here for the first time synchronises.
        metrics = dict(trainer.callback_metrics)
        if trainer.is_global_zero:
            # The console of Lightning's rich progress bar: another one would disturb the bar.
            get_console().print(self._table(stage, metrics))

    def _table(self, stage: str, metrics: Mapping[str, Tensor]) -> Table:
        table = Table(title="Run summary", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_column(overflow="fold")
        sections = {
            "stored": self._stored(),
            "placed": self._placed(),
            "samples/s": self._throughput(),
            stage: {name: f"{float(value):.4g}" for name, value in metrics.items()},
        }
        for section, lines in sections.items():
            for index, (name, value) in enumerate(lines.items()):
                table.add_row(section if index == 0 else "", name, value)
            table.add_section()
        return table

    def _stored(self) -> dict[str, str]:
        lines = {}
        for name, manifest in self._manifests.items():
            fields = "; ".join(f"{field.name} {field}" for field in manifest.schema.fields)
            size = format_bytes(manifest.num_bytes)
            lines[name] = f"{manifest.num_rows:,} rows, {size}: {fields}"
        return lines

    def _placed(self) -> dict[str, str]:
        """By data device, the shards of all splits by residency."""
        lines: dict[str, dict[Residency, list[HeldShards]]] = defaultdict(lambda: defaultdict(list))
        for shards in sorted(self._held, key=lambda shards: shards.device_index):
            lines[shards.device_name][shards.residency].append(shards)
        return {
            device: "; ".join(
                f"{residency.value}: {_held_text(held)}" for residency, held in by_residency.items()
            )
            for device, by_residency in lines.items()
        }

    def _throughput(self) -> dict[str, str]:
        lines = {}
        if self._rates:
            lines["first epoch"] = f"{self._rates[0]:,.0f} (warm-up)"
        if later := self._rates[1:]:
            lines["later epochs"] = (
                f"{median(later):,.0f} (median of {len(later)}; {min(later):,.0f} to"
                f" {max(later):,.0f})"
            )
        return lines


def _held_text(held: Sequence[HeldShards]) -> str:
    splits = ", ".join(f"{len(shards.shards)} {shards.split}" for shards in held)
    return f"{splits} shards, {format_bytes(sum(shards.num_bytes for shards in held))}"


def _rows_until_now(trainer: Any) -> int:
    """The rows of the epoch that were trained on over all processes, those before a resume too."""
    # A subclass may save another state, or train on a loader of its own.
    if not (found := MemmapDataModule.state_dict(trainer.datamodule)):
        return 0
    state = LoaderState.read(found["train"])
    # That of a checkpoint may stand at the end of the epoch before.
    return state.num_rows if state.epoch == trainer.current_epoch else 0


def _now_s(trainer: L.Trainer) -> float:
    """The time in seconds, once the root device has finished its work."""
    if trainer.strategy.root_device.type != "cpu":
        torch.accelerator.synchronize(trainer.strategy.root_device)
    return perf_counter()
