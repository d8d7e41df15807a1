"""Fits on simulated GPUs have the bits of fits on as many logical CPU devices, without a race."""

from collections.abc import Callable, Sequence
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
from lightning_memmap.loading.device_streams import SideStreams
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.placement import topology
from lightning_memmap.schema import Pad
from lightning_memmap.schema.forms import Jagged
from lightning_memmap.store import build_store
from lightning_memmap.strategies import (
    DataParallelStrategy,
    LocalModelParallelStrategy,
    SuperBatchStrategy,
)
from lightning_memmap.transforms import OnSuperBatch, RowRandom
from tests.loading.test_gpu import gpu_loader
from tests.programs.simulated_gpu import devices
from tests.support.datasets import Ragged
from tests.support.models import Points, make_trainer, weights
from tests.support.versions import weights_only

#: Two steps of 24 rows, and one of 41.
TRAIN, VAL, TEST = Points(89), Points(31, 100), Points(29, 200)
GLOBAL_BATCH = 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You called `self.log.*but have no logger configured"),
    # The resumed run does not save.
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


def row_noisy(batch: Any, random: RowRandom) -> Any:
    """Add random numbers of each row, drawn on the device."""
    noise = random.uniform(8) + random.randint(8, high=5) + random.uniform()[:, None]
    return {**batch, "x": batch["x"] + torch.where(random.bernoulli(8, p=0.3), noise, 0.0)}


def noisy(batch: Any, generator: torch.Generator) -> Any:
    """A transform with random numbers of its data device, and work enough to be late."""
    x = batch["x"]
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    return {**batch, "x": x + 0.1 * noise}


def run(
    path: Path,
    stores: Path,
    accelerator: str,
    make: Callable[[], Any],
    num_devices: int,
    num_batches: int,
    **options: Any,
) -> dict[str, Any]:
    """All that can be seen of a fit, a test and a prediction; and see that a resume equals it."""
    found: dict[str, Any] = {}
    module, strategy = Net(), make()
    data = MemmapDataModule(
        TRAIN,
        VAL,
        TEST,
        VAL,
        store_dir=stores,
        batch_size=GLOBAL_BATCH // num_batches,
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
    again.fit(resumed, datamodule=data, ckpt_path=checkpoint, **weights_only(False))
    assert torch.equal(weights(resumed), found["weights"])
    return found


class Check:
    """Compares runs on simulated GPUs with runs on the CPU, each of which is made once.

    Args:
        path: For stores and checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self._stores = path / "stores"
        self._path = path
        self._on_cpu: dict[Any, dict[str, Any]] = {}

    def __call__(
        self,
        path: Path,
        make: Callable[..., Any],
        names: Sequence[str] = (),
        *,
        transform: Any = None,
        shuffle_block: int | None = None,
        **options: Any,
    ) -> None:
        """Compare a run with that on the CPU.

        Args:
            path: For the checkpoints of this run.
            make: Makes the strategy; is given ``data_devices`` if they are named.
            names: The data devices; by default two GPUs, or two logical CPU devices.
            transform: Of the data module.
            shuffle_block: Of the data module.
            options: Of the data module on GPUs. On the CPU its rows are in the mapping.
        """
        data = {"transform": transform, "shuffle_block": shuffle_block}
        found = self._run(path, "gpu", make, names, **data, **options)
        key = make, len(names), transform, shuffle_block
        if key not in self._on_cpu:
            own = self._path / str(len(self._on_cpu))
            logical = ["cpu"] * len(names)
            self._on_cpu[key] = self._run(own, "cpu", make, logical, residency="mmap", **data)
        expected = self._on_cpu[key]
        for name in ("rows", "logged", "test"):
            assert found[name] == expected[name], name
        for name in ("weights", "predicted"):
            assert torch.equal(found[name], expected[name]), name
        assert all(map(torch.equal, found["buffers"], expected["buffers"]))

    def _run(
        self, path: Path, accelerator: str, make: Any, names: Sequence[str], **options: Any
    ) -> dict[str, Any]:
        if names:
            make = partial(make, data_devices=list(names))
        num_batches = len(names) or 2
        num_devices = 1 if names else 2
        return run(path, self._stores, accelerator, make, num_devices, num_batches, **options)


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return Check(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize(
    ("residency", "prefetch"),
    [("device", 0), ("device", 2), ("host", 4), ("mmap", 2), ("stream", 0), ("stream", 2)],
)
def test_superbatch_has_the_bits_of_the_cpu(
    tmp_path: Path, check: Check, residency: str, prefetch: int
) -> None:
    window = 2 if residency == "stream" else None
    check(
        tmp_path,
        SuperBatchStrategy,
        transform=noisy,
        shuffle_block=window,
        prefetch=prefetch,
        residency=residency,
    )


@pytest.mark.parametrize(
    ("names", "transform"),
    [
        (["cuda:0"] * 3, None),
        (["cuda:0"] * 3, noisy),
        (["cuda:1", "cuda:0", "cuda:1"], noisy),
        (["cuda:1", "cuda:0", "cuda:1"], OnSuperBatch(noisy)),
        (["cuda:1"], OnSuperBatch(noisy)),
        (["cuda:1", "cuda:0", "cuda:1"], row_noisy),
        (["cuda:0"] * 3, OnSuperBatch(row_noisy)),
    ],
)
def test_superbatch_on_named_devices_has_the_bits_of_the_cpu(
    tmp_path: Path, check: Check, names: list[str], transform: Any
) -> None:
    check(tmp_path, SuperBatchStrategy, names, transform=transform, residency="device")


@pytest.mark.parametrize("host_bytes", [2**40, 2**20])
def test_shards_of_a_device_in_several_places_have_the_bits_of_the_cpu(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    """A budget of some shards: the others stay in host memory, or in the mapping."""
    monkeypatch.setattr(topology, "available_bytes", lambda: host_bytes)
    options: dict[str, Any] = {"residency": "auto", "memory_fraction": 2e-6}
    check(tmp_path, SuperBatchStrategy, transform=noisy, **options)


@pytest.mark.parametrize("residency", ["device", "mmap"])
def test_data_parallel_has_the_bits_of_the_cpu(
    tmp_path: Path, check: Check, residency: str
) -> None:
    check(tmp_path, DataParallelStrategy, transform=noisy, residency=residency)


def test_model_parallel_has_the_bits_of_the_cpu(tmp_path: Path, check: Check) -> None:
    check(tmp_path, LocalModelParallelStrategy, residency="device")


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
        strategy=SuperBatchStrategy(),
        callbacks=[Noting()],
    )
    trainer.fit(Net(), datamodule=data)
    assert not Noting.waits
    # Between steps it waits once a step, from the fourth on, for the step that is three behind.
    waits = [report for report in devices.reports if report.kind == "wait"]
    in_epoch = [r for r in waits if any(frame.name == "prefetched" for frame in r.stack)]
    assert {report.text for report in in_epoch} == {"synchronize an event"}
    devices.reports.clear()


def test_rows_that_differ_in_length_are_fetched_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build_store(Ragged(96), tmp_path / "s", progress=False)
    collate = LayoutCollate(store.schema, {"ids": Jagged(), "image": Pad(value=7)})
    loader = gpu_loader(store, "device", collate=collate)
    root = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "noted", {"race", "generator", "wait"})
    # Each step counts, for a pad or a list would wait only for its own rows.
    assert sum(len(batch["row"]) for batch in loader.assembled(root)) == 96
    assert "copy to the host" not in {report.text for report in devices.reports}
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


class Noting(nn.Linear):
    """Notes the current device, also in the backward pass, and the device of its weights."""

    seen: set[tuple[int | None, int]]

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        output: Tensor = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda grad: self.note())  # type: ignore[no-untyped-call]
        return output

    def note(self) -> None:
        self.seen.add((self.weight.device.index, torch.cuda.current_device()))


class Failing(L.Callback):
    """Lets the second stage fail in one step, which goes on without it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        with pytest.raises(RuntimeError):
            pl_module.net(batch["x"][:, :3])
        with pytest.raises(TypeError):
            pl_module.net[1]()
        assert torch.cuda.current_device() == 0


def test_device_of_a_stage_is_the_current_one_while_it_computes(tmp_path: Path) -> None:
    module = Net()
    Noting.seen = set()
    module.net = nn.Sequential(Noting(8, 16), nn.Tanh(), Noting(16, 16), Noting(16, 1))
    data = MemmapDataModule(TRAIN, VAL, store_dir=tmp_path / "stores", batch_size=12)
    trainer = make_trainer(
        tmp_path,
        accelerator="gpu",
        devices=2,
        strategy=LocalModelParallelStrategy(),
        callbacks=[Failing()],
    )
    trainer.fit(module, datamodule=data)
    assert Noting.seen == {(0, 0), (1, 1)}
    # Nothing of it stays.
    assert all("forward" not in vars(layer) for layer in module.net)


@pytest.mark.parametrize("make", [SuperBatchStrategy, DataParallelStrategy])
def test_transform_of_a_super_batch_may_move_a_tensor(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    def moved(batch: Any) -> Any:
        return {**batch, "x": batch["x"].to("cuda:1") * 2}

    def doubled(batch: Any) -> Any:
        return {**batch, "x": batch["x"] * 2}

    found = []
    for transform in (moved, doubled):
        module = Net()
        data = MemmapDataModule(
            TRAIN,
            store_dir=tmp_path / "stores",
            batch_size=12,
            transform=OnSuperBatch(transform),
            prefetch=2,
        )
        make_trainer(tmp_path, accelerator="gpu", devices=2, strategy=make()).fit(module, data)
        found.append(weights(module))
    assert torch.equal(*found)


def test_root_device_is_the_current_one_where_steps_are_made_ahead() -> None:
    root, other = torch.device("cuda", 0), torch.device("cuda", 1)
    before = [torch.cuda.current_stream(device) for device in (root, other)]
    # torch takes the last device that was entered for the current one.
    with SideStreams([root], [other, root, other]).entered():
        assert torch.cuda.current_device() == root.index
        for device, stream in zip((root, other), before, strict=True):
            assert torch.cuda.current_stream(device) != stream
    assert [torch.cuda.current_stream(device) for device in (root, other)] == before


def test_devices_that_only_hold_data_are_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def num_notes() -> int:
        found = sum("memmap_superbatch_ddp" in record.getMessage() for record in caplog.records)
        caplog.clear()
        return found

    data = MemmapDataModule(TRAIN, store_dir=tmp_path / "stores", batch_size=8)
    caplog.set_level("INFO", logger="lightning.pytorch")
    first = torch.device("cuda", 0)
    for strategy, num_devices, expected in [
        ("memmap_superbatch", 2, 1),
        ("memmap_superbatch", 1, 0),
        ("memmap_dp", 2, 0),
        # Whoever names the devices knows what they do.
        (SuperBatchStrategy(data_devices=[first, "cuda:1"]), 2, 0),
    ]:
        trainer = make_trainer(tmp_path, accelerator="cuda", strategy=strategy, devices=num_devices)
        trainer.fit(Net(), data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Net(), data)
        assert num_notes() == expected
