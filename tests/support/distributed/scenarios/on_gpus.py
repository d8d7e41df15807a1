"""What only shows where processes have GPUs, which may be simulated."""

import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import (
    FSDP2Strategy,
    PipelineStrategy,
    SuperBatchDDPStrategy,
    pipeline,
)
from tests.support.models import Points, Regression, make_trainer
from tests.support.versions import weights_only

#: Its weights are most of the memory of a fit.
WIDTH = 1024


class Wide(Regression):
    """A layer of 4 MiB."""

    def __init__(self) -> None:
        super().__init__(lr=1e-3)
        generator = torch.Generator().manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def make(out: Path, strategy: Any, **options: Any) -> tuple[L.Trainer, MemmapDataModule]:
    data = MemmapDataModule(Points(32), store_dir=out / "stores", batch_size=4)
    return make_trainer(out, strategy=strategy, devices=2, **options), data


def offload(out: Path) -> dict[str, Any]:
    """Offload to the host, and resume."""
    found: dict[str, Any] = {}
    for name, epochs, checkpoint in (
        ("half", 1, None),
        ("whole", 2, None),
        ("resumed", 2, out / "half.ckpt"),
    ):
        strategy = FSDP2Strategy(cpu_offload=True, wrap_classes=["Linear"])
        trainer, data = make(out, strategy, max_epochs=epochs)
        module, largest = Wide(), Largest()
        with largest:
            trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint and True))
            trainer.save_checkpoint(out / f"{name}.ckpt")
        found[name] = largest.num_bytes
    found["backend"] = dist.get_backend()
    return found


class Largest:
    """The most that the optimizer's state takes on a device while it is loaded.

    Attributes:
        num_bytes: Of the GPU's memory, in `FSDP2Strategy.load_optimizer_state_dict`, beyond that
            before.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def __enter__(self) -> "Largest":
        self._load = FSDP2Strategy.load_optimizer_state_dict
        largest = self

        def load(strategy: FSDP2Strategy, checkpoint: Any) -> None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            largest._load(strategy, checkpoint)
            largest.num_bytes = torch.cuda.max_memory_allocated() - before

        FSDP2Strategy.load_optimizer_state_dict = load  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        FSDP2Strategy.load_optimizer_state_dict = self._load  # type: ignore[method-assign]


def pipelines(out: Path) -> dict[str, Any]:
    """Average gradients of two pipelines, and gather the state of two stages."""
    found: dict[str, Any] = {"waits": [], "pickled": []}
    average, describe = pipeline.average_gradients, dist.broadcast_object_list

    def averaging(*args: Any) -> None:
        from tests.programs.simulated_gpu import devices

        before = len(devices.reports)
        devices.noted.add("wait")
        average(*args)
        devices.noted.discard("wait")
        found["waits"].append([str(report) for report in devices.reports[before:]])
        del devices.reports[before:]

    def describing(sent: Any, *args: Any, **options: Any) -> None:
        found["pickled"].append(len(pickle.dumps(sent)))
        describe(sent, *args, **options)

    pipeline.average_gradients, dist.broadcast_object_list = averaging, describing
    trainer, data = make(out, PipelineStrategy(data_parallel_size=2))
    trainer.fit(Staged(), data)
    pipeline.average_gradients = average
    trainer, data = make(out, PipelineStrategy())
    trainer.fit(Staged(), data)
    trainer.save_checkpoint(out / "staged.ckpt")
    return found


class Rounded(nn.Module):
    """Gives 16 bits in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3, dtype=torch.uint16))

    def forward(self, y: Any) -> Any:
        return y if self.training else (y * 100).to(torch.int16)


class Numbered(nn.Module):
    """Gives rows in another order of memory, and a number of 16 bits for each."""

    def forward(self, x: Any) -> Any:
        return x.t().contiguous().t(), (x[:, 0] * 100).to(torch.int16)


class Checked(nn.Module):
    """Looks whether the numbers have arrived."""

    def forward(self, x: Any, numbers: Any) -> Any:
        assert torch.equal(numbers, Numbered()(x)[1])
        return x


class Short(Regression):
    """Has buffers, outputs, and what goes between stages, of dtypes that NCCL does not know."""

    def __init__(self) -> None:
        super().__init__()
        # Not those of the first process, on the others.
        first = 0 if os.environ.get("LOCAL_RANK", "0") == "0" else 100
        self.net[0].register_buffer("table", torch.arange(first, first + 7, dtype=torch.int16))
        self.net.append(Rounded())
        self.numbered, self.checked = Numbered(), Checked()

    def stages(self) -> list[nn.Module]:
        return [self.net[:2], self.numbered, self.checked, self.net[2:]]

    def forward(self, x: Any) -> Any:
        return self.net[2:](self.checked(*self.numbered(self.net[:2](x))))


def short(out: Path) -> dict[str, Any]:
    """Trains with tensors of 16 bits, and predicts them."""
    found = {}
    for name, strategy in (
        ("ddp", SuperBatchDDPStrategy()),
        ("fsdp2", FSDP2Strategy()),
        ("stages", PipelineStrategy()),
        ("pipelines", PipelineStrategy(data_parallel_size=2)),
    ):
        trainer, data = make(out, strategy)
        data.predict_dataset = Points(8)
        module = Short()
        trainer.fit(module, data)
        predicted = trainer.predict(module, data)
        table = None if name == "stages" else module.net[0].table.cpu()
        found[name] = (table, [batch["y"].dtype for batch in predicted])
    return found


class Staged(Wide):
    def stages(self) -> list[nn.Module]:
        return [self.net[:1], self.net[1:]]
