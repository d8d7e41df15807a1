"""Fits on simulated GPUs have the bits of fits on as many logical CPU devices, without a race."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.placement import budgets
from lightning_memmap.strategies import (
    DataParallelStrategy,
    IndependentStrategy,
    LocalModelParallelStrategy,
    SuperBatchStrategy,
)
from lightning_memmap.transforms import OnSuperBatch
from tests.models import Points, make_trainer, weights
from tests.simulated_gpu import devices

#: Two steps of 24 rows, and one of 41.
TRAIN, VAL, TEST = Points(89), Points(31, 100), Points(29, 200)
GLOBAL_BATCH = 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You called `self.log.*but have no logger configured"),
    # The resumed run does not save.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]


class Net(L.LightningModule):
    """Reads nothing from the device in a step: a wait would hide a race."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)
        )
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.mean = MeanMetric()
        self.rows: list[Tensor] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.rows.append(batch["row"].clone())
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch["x"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.mean(self.loss(batch), weight=len(batch["x"]))
        self.log("val", self.mean)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.mean(self.loss(batch), weight=len(batch["x"]))
        self.log("test", self.mean)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def noisy(batch: Any, generator: torch.Generator) -> Any:
    """A transform with random numbers of its data device, and work enough to be late."""
    x = batch["x"]
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    return {**batch, "x": x + 0.1 * noise}


def run(
    path: Path, accelerator: str, make: Callable[[], Any], num_devices: int, **options: Any
) -> dict[str, Any]:
    """All that can be seen of a fit, a test and a prediction; and see that a resume equals it."""
    found: dict[str, Any] = {}
    module, strategy = Net(), make()
    data = MemmapDataModule(
        TRAIN,
        VAL,
        TEST,
        VAL,
        store_dir=path / "stores",
        batch_size=GLOBAL_BATCH // (len(options.pop("names", ())) or num_devices),
        **options,
    )
    saved = ModelCheckpoint(path / accelerator, "{step}", every_n_train_steps=2, save_top_k=-1)
    common: dict[str, Any] = {"accelerator": accelerator, "devices": num_devices, "max_epochs": 2}
    trainer = make_trainer(
        path, strategy=strategy, callbacks=[saved], enable_checkpointing=True, **common
    )
    trainer.fit(module, datamodule=data)
    found["weights"], found["rows"] = weights(module), [rows.tolist() for rows in module.rows]
    found["buffers"] = [buffer.cpu() for buffer in module.net.buffers()]
    found["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, datamodule=data, verbose=False)
    predicted = trainer.predict(module, datamodule=data)
    found["predicted"] = torch.cat([each.cpu() for each in predicted])  # type: ignore[union-attr,misc]
    resumed = Net()
    again = make_trainer(path, strategy=make(), **common)
    checkpoint = path / accelerator / "step=2.ckpt"
    again.fit(resumed, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    assert torch.equal(weights(resumed), found["weights"])
    return found


def check(
    path: Path,
    make: Callable[..., Any],
    options: dict[str, Any],
    names: list[str] | None = None,
) -> None:
    """Compare a run on simulated GPUs with one on the CPU.

    Args:
        path: For stores and checkpoints.
        make: Makes the strategy; is given ``data_devices`` if they are named.
        options: Of the data module.
        names: The data devices; by default two GPUs, or two logical CPU devices.
    """
    runs = []
    for accelerator in ("gpu", "cpu"):
        given = dict(options)
        if accelerator == "cpu" and options.get("residency") in ("device", "host"):
            given["residency"] = "mmap"
        if names is None:
            runs.append(run(path, accelerator, make, 2, **given))
        else:
            devices_ = names if accelerator == "gpu" else ["cpu"] * len(names)
            made = partial(make, data_devices=devices_)
            runs.append(run(path, accelerator, made, 1, names=names, **given))
    found, expected = runs
    if make is DataParallelStrategy:
        # Replicas on two devices note their rows side by side.
        found["rows"].sort()
        expected["rows"].sort()
    for name in ("rows", "logged", "test"):
        assert found[name] == expected[name], name
    for name in ("weights", "predicted"):
        assert torch.equal(found[name], expected[name]), name
    assert all(map(torch.equal, found["buffers"], expected["buffers"]))


@pytest.mark.parametrize(
    ("residency", "prefetch"),
    [("device", 0), ("device", 2), ("host", 4), ("mmap", 2), ("stream", 0), ("stream", 2)],
)
def test_superbatch_has_the_bits_of_the_cpu(tmp_path: Path, residency: str, prefetch: int) -> None:
    options: dict[str, Any] = {"residency": residency, "transform": noisy}
    if residency == "stream":
        options["shuffle_window"] = 2
    check(tmp_path, partial(SuperBatchStrategy, prefetch=prefetch), options)


@pytest.mark.parametrize(
    ("names", "transform"),
    [
        (["cuda:0"] * 3, None),
        (["cuda:0"] * 3, noisy),
        (["cuda:1", "cuda:0", "cuda:1"], noisy),
        (["cuda:1", "cuda:0", "cuda:1"], OnSuperBatch(noisy)),
        (["cuda:1"], OnSuperBatch(noisy)),
    ],
)
def test_superbatch_on_named_devices_has_the_bits_of_the_cpu(
    tmp_path: Path, names: list[str], transform: Any
) -> None:
    options = {"residency": "device", "transform": transform}
    check(tmp_path, SuperBatchStrategy, options, names)


@pytest.mark.parametrize("host_bytes", [2**40, 2**20])
def test_shards_of_a_device_in_several_places_have_the_bits_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    """A budget of some shards: the others stay in host memory, or in the mapping."""
    monkeypatch.setattr(budgets, "available_bytes", lambda: host_bytes)
    options = {"residency": "auto", "memory_fraction": 2e-6, "transform": noisy}
    check(tmp_path, SuperBatchStrategy, options)


@pytest.mark.parametrize("residency", ["device", "mmap"])
def test_data_parallel_has_the_bits_of_the_cpu(tmp_path: Path, residency: str) -> None:
    options = {"residency": residency, "transform": noisy}
    check(tmp_path, DataParallelStrategy, options)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_model_parallel_has_the_bits_of_the_cpu(tmp_path: Path, num_microbatches: int) -> None:
    make = partial(LocalModelParallelStrategy, num_microbatches=num_microbatches)
    check(tmp_path, make, {"residency": "device"})


def test_members_in_sequence_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    runs = []
    for accelerator in ("gpu", "cpu"):
        strategy = IndependentStrategy(num_members=2, processes=False)
        data = MemmapDataModule(
            TRAIN, VAL, store_dir=tmp_path / "stores", batch_size=12, num_parts=2, transform=noisy
        )
        path = tmp_path / accelerator
        trainer = make_trainer(path, accelerator=accelerator, devices=2, strategy=strategy)
        trainer.fit(Net(), datamodule=data)
        runs.append([weights(each.lightning_module) for each in strategy.trainers.values()])
    found, expected = runs
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(*found)


def test_step_waits_for_the_device_only_where_the_program_is_too_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "noted", {"race", "generator", "wait"})

    class Noting(L.Callback):
        waits: list[str] = []  # noqa: RUF012

        def on_train_batch_start(self, *args: Any) -> None:
            self.before = len(devices.reports)

        def on_train_batch_end(self, *args: Any) -> None:
            self.waits += [str(report) for report in devices.reports[self.before :]]

    data = MemmapDataModule(
        TRAIN, VAL, store_dir=tmp_path / "stores", batch_size=4, transform=noisy
    )
    trainer = make_trainer(
        tmp_path,
        accelerator="gpu",
        devices=2,
        strategy=SuperBatchStrategy(prefetch=2),
        callbacks=[Noting()],
    )
    trainer.fit(Net(), datamodule=data)
    assert not Noting.waits
    # Between steps it waits once a step, from the fourth on, for the step that is three behind.
    waits = [report for report in devices.reports if report.kind == "wait"]
    in_epoch = [r for r in waits if any(frame.name == "prefetched" for frame in r.stack)]
    assert {report.text for report in in_epoch} == {"synchronize an event"}
    devices.reports.clear()


def test_transform_runs_with_its_device_current(tmp_path: Path) -> None:
    found: set[tuple[int, int]] = set()

    def noting(batch: Any) -> Any:
        found.add((batch["x"].device.index, torch.cuda.current_device()))
        # A device without an index is the current one.
        return {**batch, "x": batch["x"] + torch.rand(batch["x"].shape, device="cuda")}

    options: dict[str, Any] = {"batch_size": 4, "transform": noting}
    data = MemmapDataModule(TRAIN, VAL, store_dir=tmp_path / "stores", **options)
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=2, strategy=SuperBatchStrategy())
    trainer.fit(Net(), datamodule=data)
    assert found == {(0, 0), (1, 1)}
