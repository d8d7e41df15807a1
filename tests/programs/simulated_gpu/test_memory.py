"""Memory of devices and pinned memory of the host, from one stage to the next."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import device_streams
from lightning_memmap.strategies.replicas.replicas import Replicas
from tests.programs.simulated_gpu import devices
from tests.support.models import make_trainer

ROOT, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
MIB = 2**20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no"),
]


class Wide(torch.utils.data.Dataset[Tensor]):
    """Rows of 64 KiB."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2**14,), float(index))


class Sum(L.LightningModule):
    """Trains a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch.mean() - self.bias).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        batch.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(path: Path, residency: str, **options: Any) -> tuple[L.Trainer, MemmapDataModule]:
    data = MemmapDataModule(
        Wide(),
        test_dataset=Wide(),
        store_dir=path / "stores",
        batch_size=8,
        residency=residency,
        **options,
    )
    return make_trainer(path, accelerator="gpu", strategy="memmap_superbatch"), data


def test_shards_of_a_stage_have_the_memory_of_the_stage_before(tmp_path: Path) -> None:
    """Where the data of both would not fit, and torch keeps what the first one has freed."""
    free, _ = torch.cuda.mem_get_info(ROOT)
    ballast = torch.empty(free - 16 * MIB, dtype=torch.uint8, device=ROOT)
    trainer, data = make(tmp_path, "auto", memory_fraction=0.7)
    # 6 MiB of rows, for which 11 MiB may be used.
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device=ROOT)
    del kept
    assert torch.cuda.memory_reserved(ROOT) > torch.cuda.memory_allocated(ROOT)
    found = []
    for stage in (trainer.fit, trainer.test):
        stage(Sum(), datamodule=data)
        assert data.placement is not None
        found += [{held.residency.value for held in data.placement.held_shards()}]
    assert found == [{"device"}, {"device"}]
    del ballast


@pytest.mark.parametrize("residency", ["device", "host", "stream"])
def test_memory_is_given_back_after_a_stage(tmp_path: Path, residency: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(ROOT), devices.page_locked_bytes()
    trainer, data = make(tmp_path, residency)
    most: list[tuple[int, int]] = []

    class Peak(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            most.append((torch.cuda.memory_reserved(ROOT), devices.page_locked_bytes()))

    trainer.callbacks.append(Peak())  # type: ignore[attr-defined]
    trainer.fit(Sum(), datamodule=data)
    after = torch.cuda.memory_reserved(ROOT), devices.page_locked_bytes()
    # Batches of the device come from pinned memory, and shards go through it.
    assert max(used for _, used in most) > before[1]
    assert max(used for used, _ in most) > before[0]
    assert after[0] <= before[0] + MIB
    assert after[1] == before[1]


def test_upload_holds_two_pieces_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_streams, "_PINNED_BYTES", MIB)
    torch._C._accelerator_emptyHostCache()  # type: ignore[attr-defined]
    before, held = devices.page_locked_bytes(), list[int]()
    rows, target = torch.arange(2**20), torch.zeros(2**20, dtype=torch.int64, device=ROOT)

    def parts() -> Iterator[Tensor]:
        # However short they are.
        for part in rows.split([1, 2**19, 2**10, 2**19 - 2**10 - 1]):
            yield part
            held.append(devices.page_locked_bytes() - before)

    with devices.operations_take(0.01):
        device_streams.upload(parts(), target)
    assert torch.equal(target.cpu(), rows)
    # Short ones beside them, which the allocator keeps for later.
    assert MIB < max(held) < 3 * MIB


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the bytes that are copied between devices."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            source, target = (args[0], result) if "_to_" in func.name() else (args[1], args[0])
            if isinstance(source, Tensor) and source.device != target.device:
                self.num_bytes += target.nbytes
        return result


def test_copies_to_and_from_replicas_are_counted() -> None:
    module = Sum()
    module.net = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    module.to(ROOT)
    replicas = Replicas(module, [ROOT, OTHER, ROOT, OTHER])
    values = [*module.parameters(), *module.buffers()]
    # They are made in the first call.
    replicas.follow_module(with_values=True)
    with CopyRecorder() as recorder:
        replicas.follow_module(with_values=True)
    num_bytes = sum(value.nbytes for value in values)
    # Two dtypes, each of which goes at once, and to both replicas of the device together.
    assert recorder.num_bytes == num_bytes
    for parameter in module.parameters():
        for own, scale in ((parameter, 1.0), (replicas.copies[0].tensors[parameter], 2.0)):
            own.grad = torch.full_like(own, scale)
    with CopyRecorder() as recorder:
        replicas.add_gradients()
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert recorder.num_bytes == num_bytes
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 3).all()


class Recurrent(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output, _ = self.lstm(batch[:, :8].view(-1, 2, 4))
        return (output.mean() - self.bias).square().mean()


def test_weights_of_a_recurrent_replica_are_laid_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuDNN wants them: it warns, and copies all of them in each step, where they are not."""
    made: list[int] = []

    def flatten_parameters(module: nn.RNNBase) -> None:
        weights: Any = module._flat_weights
        if all(weight.device == OTHER for weight in weights):
            made.append(id(module))
            flat = torch.cat([weight.detach().flatten() for weight in weights])
            parts = flat.split([weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part.view(weight.shape)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    data = MemmapDataModule(Wide(), store_dir=tmp_path / "stores", batch_size=8)
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=2, strategy="memmap_dp")
    trainer.fit(Recurrent(), datamodule=data)
    assert trainer.global_step > 1
    assert len(made) == 1
