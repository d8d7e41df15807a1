"""What two processes do on two GPUs, real or simulated, that they do not do on a CPU.

The strategies of this pack run the contract of `test_contract_in_processes` on them, too.
"""

import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
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
from tests.compare import test_in_processes as comparing
from tests.compare.runs import STEPS, check_runs_parity, result_of
from tests.contract.strategies import test_tensor_parallel as tensor_parallel
from tests.contract.strategies.cases import DEVICES
from tests.contract.strategies.test_tensor_parallel import fit_and_resume
from tests.support.models import IS_SIMULATED, Points, Regression, make_trainer
from tests.support.processes import in_processes, launch
from tests.support.versions import weights_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < DEVICES, reason="needs two CUDA devices"),
]


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


class Staged(Wide):
    def stages(self) -> list[nn.Module]:
        return [self.net[:1], self.net[1:]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return out, fit_and_resume(out)


#: Lightning wraps the module in a stream of its own, for which the first forward and backward pass
#: do not wait: they read weights that DDP's broadcast may still be writing there.
RACE_OF_LIGHTNING_DDP = re.compile(
    r"race: aten::(?P<reads>\w+)\.out reads on (?P<device>cuda:\d)/stream 0 without waiting"
    r" what copy_ on (?P=device)/stream [1-9]\d* writes"
)
#: By strategy, the operators that race. There is no other report, and none on real GPUs.
RACING = {"ddp": {"addmm", "mm"} if IS_SIMULATED else set(), "fsdp": set()}


@pytest.mark.parametrize("name", RACING)
def test_strategy_of_lightning_trains_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], name: str
) -> None:
    ranks = tensor_parallel.check(tmp_path, one, name, 2, 1, accelerator="gpu")
    for rank in ranks:
        known = [RACE_OF_LIGHTNING_DDP.match(report) for report in rank["reports"]]
        assert all(known), rank["reports"]
        assert {match["reads"] for match in known if match} == RACING[name]


def test_strategies_on_gpus_are_found_to_agree(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    launch(comparing.check_each, path, processes=2, accelerator="gpu")
    checks = {name: result_of(path / f"{name}-check") for name in comparing.STRATEGIES}
    for name, parity in check_runs_parity(path, checks).items():
        assert (name, parity.problems) == (name, [])
        assert parity.steps_with_equal_rows == [STEPS, STEPS]


def test_tensor_parallel_of_lightning_trains_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]]
) -> None:
    tensor_parallel.check(tmp_path, one, "model_parallel", 1, 2, accelerator="gpu")


def test_offloading_keeps_the_state_of_optimizers_in_host_memory(tmp_path: Path) -> None:
    ranks = launch(offload, tmp_path, processes=2, accelerator="gpu")
    whole, resumed = (torch.load(tmp_path / f"{name}.ckpt") for name in ("whole", "resumed"))
    for key, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key])
    for rank in ranks:
        assert rank["backend"] == "cpu:gloo,cuda:nccl"
        # The optimizer's state stays in the host's memory.
        assert rank["resumed"] == 0


@pytest.mark.parametrize(
    ("make_strategy", "has_table"),
    [
        (SuperBatchDDPStrategy, True),
        (FSDP2Strategy, True),
        # Each process has some of the stages.
        (PipelineStrategy, False),
        (partial(PipelineStrategy, data_parallel_size=2), True),
    ],
    ids=["superbatch_ddp", "fsdp2", "pipeline", "two pipelines"],
)
@in_processes(2, accelerator="gpu")
def test_tensors_of_16_bits_are_sent(tmp_path: Path, make_strategy: Any, has_table: bool) -> None:
    trainer, data = make(tmp_path, make_strategy())
    data.predict_dataset = Points(8)
    module = Short()
    trainer.fit(module, data)
    assert {batch["y"].dtype for batch in trainer.predict(module, data)} == {torch.int16}
    assert not has_table or module.net[0].table.tolist() == list(range(7))
