"""memmap_pipeline: schedules, and several pipelines, against one device with the same batches.

Weights are compared as a user would load them: from a checkpoint into the plain module.
"""

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.ranks import gather_from_ranks
from lightning_memmap.strategies import PipelineStrategy
from lightning_memmap.strategies.common.split_rows import even_ranges
from tests.support.models import (
    ByLbfgs,
    LossesByHand,
    Penalised,
    PlayersByHand,
    Points,
    Thaws,
    make_trainer,
    weights,
)
from tests.support.processes import in_processes, launch, mean_losses
from tests.support.reports import Reports
from tests.support.versions import EMAWeightAveraging

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`", "ignore:`weights_only` was not set"
    ),
]

GLOBAL_BATCH = 10
#: Seven steps of an epoch: five of 10 rows, and the last two, of 7 and 6.
TRAIN = Points(63)
VAL, TEST = Points(37, 100), Points(25, 200)


class Staged(L.LightningModule):
    """A network of four stages that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        layers: list[nn.Module] = []
        for width, out in ((8, 16), (16, 16), (16, 16), (16, 1)):
            layers += [nn.Linear(width, out), nn.Tanh()]
        self.net = nn.Sequential(*layers[:-1])
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.seen: dict[str, list[list[int]]] = {}
        self.losses: list[float] = []
        self.total = SumMetric()

    def stages(self) -> list[nn.Module]:
        return [self.net[start : start + 2] for start in range(0, 8, 2)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "train")

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        loss = self.loss(self(batch["x"]), batch)
        self.losses.append(loss.item())
        self.log(f"{stage}_loss", loss, batch_size=len(batch["row"]), on_epoch=True, sync_dist=True)
        return loss

    def evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        output = self(batch["x"])
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        self.total.update((output - batch["y"]).square())
        self.log(f"{stage}_sum", self.total)
        self.log(f"{stage}_rows", float(len(batch["row"])), reduce_fx="sum", sync_dist=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"row": batch["row"], "y": self(batch["x"])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(
            [
                {"params": [p for n, p in self.named_parameters() if "bias" in n], "lr": 0.02},
                {"params": [p for n, p in self.named_parameters() if "bias" not in n]},
            ],
            lr=0.05,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Sgd(Staged):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fused(Staged):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05, fused=True)


class Double(Staged):
    """Has layers in float64: the default dtype and that of the module stay float32."""

    def __init__(self) -> None:
        super().__init__()
        self.net.double()

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        loss = super().step({**batch, "x": batch["x"].double(), "y": batch["y"].double()}, stage)
        assert loss.dtype == torch.float64
        return loss

    def evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        super().evaluate({**batch, "x": batch["x"].double()}, stage)


class Manual(Staged):
    """Two alternating optimizers, each on some stages, which freeze each other's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.step(batch, "train") / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.05)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[:4].parameters(), lr=0.05),
            torch.optim.SGD(self.net[4:].parameters(), lr=0.1, momentum=0.9),
        ]


class SeveralLosses(LossesByHand, Staged):
    pass


class Players(PlayersByHand, Staged):
    """Two optimizers, each of some stages."""

    def configure_optimizers(self) -> Any:
        return Manual.configure_optimizers(self)  # type: ignore[arg-type]


class Frozen(Sgd):
    """Freezes a parameter in the steps that average gradients, which it has from those before, and
    another one between forward and backward pass; and has buffers that a stage shares with the
    module, or with a view, and tensors whose memory has another order, or one value for many."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.net[0]
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        first.register_buffer("scale", self.scale, persistent=False)
        first.register_buffer("table", torch.linspace(0, 1, 16), persistent=False)
        first.part = first.table[:8]
        first.register_buffer("spread", torch.ones(1).expand(16), persistent=False)
        other: Any = self.net[4]
        other.weight = nn.Parameter(other.weight.detach().t().contiguous().t())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.requires_grad_(batch_idx % 2 == 0)

    def on_before_backward(self, loss: Tensor) -> None:
        self.net[2].weight.requires_grad_(len(self.losses) % 3 > 0)

    def on_after_backward(self) -> None:
        self.net[2].weight.requires_grad_(True)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return super().loss(output, batch) * self.scale


class WithBatchNorm(Sgd):
    """Running statistics of a batch that nobody wrote would be far from those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = nn.BatchNorm1d(16)


@dataclass(frozen=True)
class Case:
    make: type[Staged] = Staged
    options: dict[str, Any] = field(default_factory=dict)
    # float32 sums in another order, over at most 14 steps with a rate of at most 0.1.
    atol: float = 5e-6


CASES = {
    "plain": Case(options={"max_epochs": 2}),
    "accumulation": Case(options={"accumulate_grad_batches": 3}),
    "clip_norm": Case(Sgd, {"gradient_clip_val": 0.05}),
    "manual": Case(Manual, {"max_epochs": 2}),
    "several_losses": Case(SeveralLosses, {"max_epochs": 2}),
    "players": Case(Players, {"max_epochs": 2}),
    "fused": Case(Fused),
    "double": Case(Double, atol=1e-12),
    "frozen": Case(Frozen, {"accumulate_grad_batches": 2}),
}
#: The first step after the last one is uneven.
RESUMED = (3, 12)


class Runs:
    """Makes Trainers and data.

    Args:
        out: Directory of stores and checkpoints.
        options: Of the strategy; None for one device.
        processes: Processes.
    """

    def __init__(self, out: Path, options: dict[str, Any] | None, processes: int) -> None:
        self.out = out
        self.options = options
        self.processes = processes

    def make(self, **options: Any) -> tuple[L.Trainer, MemmapDataModule]:
        strategy: Any = (
            "memmap_superbatch" if self.options is None else PipelineStrategy(**self.options)
        )
        trainer = make_trainer(self.out, strategy=strategy, devices=self.processes, **options)
        size = (self.options or {}).get("data_parallel_size", 1)
        data = MemmapDataModule(
            TRAIN, VAL, TEST, TEST, store_dir=self.out / "stores", batch_size=GLOBAL_BATCH // size
        )
        return trainer, data

    def fit(self, case: Case, name: str, **options: Any) -> dict[str, Any]:
        checkpoint = options.pop("checkpoint", None)
        trainer, data = self.make(**case.options, **options)
        module = case.make()
        trainer.fit(module, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(self.out / f"{name}.ckpt")
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        sharding = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return {
            "seen": module.seen,
            "losses": module.losses,
            "metrics": metrics,
            "steps": trainer.global_step,
            "sharding": sharding,
            "local": sum(p.numel() for p in module.parameters() if not p.is_meta),
        }

    def evaluate(self, checkpoint: Path) -> dict[str, Any]:
        trainer, data = self.make()
        module = Staged()
        (validated,) = trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
        (tested,) = trainer.test(module, data, verbose=False)
        predicted = trainer.predict(module, data) or []
        return {
            "metrics": {**validated, **tested},
            "rows": torch.cat([batch["row"] for batch in predicted]),
            "y": torch.cat([batch["y"] for batch in predicted]),
            "seen": module.seen,
            "sharding": trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1},
        }


def run(
    out: Path,
    options: dict[str, Any] | None = None,
    devices: int = 1,
    cases: list[str] | None = None,
    others: list[str] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Fits, resumes and evaluations of one set-up.

    Args:
        out: Directory of stores and checkpoints.
        options: Of the strategy; None for one device.
        devices: Processes.
        cases: Of `CASES`; all by default.
        others: Checkpoints of other set-ups, from which a run is resumed and evaluated.
        resume: Whether to save and resume.
    """
    runs = Runs(out, options, devices)
    found: dict[str, Any] = {name: runs.fit(CASES[name], name) for name in cases or CASES}
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Case(options={"max_epochs": 2})
    if resume:
        found["whole"] = runs.fit(whole, "whole", callbacks=[saver], enable_checkpointing=True)
        for step in RESUMED:
            name = f"resumed {step}"
            found[name] = runs.fit(whole, name, checkpoint=out / "saved" / f"step={step}.ckpt")
    for index, path in enumerate(others or []):
        found[f"other {index}"] = runs.fit(whole, f"other {index}", checkpoint=Path(path))
        found[f"evaluated {index}"] = runs.evaluate(Path(path))
    if options is None and resume:
        found["evaluated 0"] = runs.evaluate(out / "saved" / "step=3.ckpt")
    return found


class PartlyOnMeta(Staged):
    """A layer of each process is on the meta device, beside others with values."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net[0], self.net[4] = nn.Linear(8, 16), nn.Linear(16, 16)


class Unset(PartlyOnMeta):
    """The second process has a layer that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net[4].register_buffer("unset", torch.ones(3))


class Steep(Sgd):
    """float16 gradients near 4e4, whose sum over two pipelines is infinite."""

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.mean() * 4e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-7)


class InMicroBatches(Staged):
    """On one device, computes the four micro-batches of a pipeline of two processes."""

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        ranges = even_ranges(len(batch["row"]), 4)
        parts = [{name: rows[r.start : r.stop] for name, rows in batch.items()} for r in ranges]
        losses = [self.loss(self(part["x"]), part) * len(part["row"]) for part in parts]
        return torch.stack(losses).sum() / len(batch["row"])


def in_bfloat16(out: Path, make: type[Staged], options: dict[str, Any] | None) -> dict[str, Any]:
    """Trains two epochs in mixed precision."""
    case = Case(make, {"precision": "bf16-mixed", "max_epochs": 2, "limit_val_batches": 0})
    return Runs(out, options, 1 if options is None else 2).fit(case, make.__name__)


class Summing(Sgd):
    """Weighs its loss by a sum over what its process has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_buffer("rows", torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.net[0].rows *= 0.9
        self.net[0].rows += batch["row"].sum()
        return self.step(batch, "train")

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(output, batch) * (1 + 10 / self.net[0].rows.float()).sum()


def summing(out: Path) -> dict[str, Any]:
    """Trains two pipelines of one process each, and resumes."""
    runs = Runs(out, {"data_parallel_size": 2}, 2)
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=3, save_top_k=-1)
    runs.fit(Case(Summing), "whole", callbacks=[saver], enable_checkpointing=True)
    return runs.fit(Case(Summing), "resumed", checkpoint=out / "saved" / "step=3.ckpt")


class Tied(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight = self.net[2].weight


class Outside(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class ThreeStages(Staged):
    def stages(self) -> list[nn.Module]:
        return [self.net[:2], self.net[2:4], self.net[4:]]


class OneStage(Staged):
    def stages(self) -> list[nn.Module]:
        return [self.net]


class NoStages(Staged):
    stages: Any = None


class LooksAtOutput(Staged):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])


class CallsOutside(Staged):
    def on_train_start(self) -> None:
        self(torch.zeros(4, 8))


class Lbfgs(ByLbfgs, Staged):
    pass


class Sparse(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.EmbeddingBag(4, 4, sparse=True)


class PenalisedStages(Penalised, Staged):
    pass


class Counting(Sgd):
    """Counts calls of its first layer, and the outputs that are alive when a loss is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.alive = 0, 0
        self.outputs: list[Any] = []
        self.net[0].register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.alive = max(self.alive, sum(each() is not None for each in self.outputs))
        self.outputs.append(weakref.ref(output))
        return super().loss(output * 1, batch)


@dataclass(frozen=True)
class Setup:
    """How many processes run which cases."""

    processes: int
    options: dict[str, Any]
    cases: tuple[str, ...]


FEW = ("plain", "accumulation", "manual", "several_losses", "players", "double", "frozen")
SETUPS = {
    # What does not depend on the schedule, the contract shows with another one.
    "gpipe": Setup(2, {"schedule": "gpipe"}, ("plain", "manual", "fused", "double", "frozen")),
    "interleaved": Setup(
        2, {"schedule": "interleaved", "num_microbatches": 6}, ("plain", "clip_norm", "manual")
    ),
    "1f1b, two pipelines": Setup(
        4, {"schedule": "1f1b", "data_parallel_size": 2, "num_microbatches": 3}, FEW
    ),
}


def load_checkpoint(reports: Reports, case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(reports.out / f"{case}.ckpt", weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("reference")
    return Reports(out, [run(out, resume=True)], Staged)


@pytest.fixture(scope="module", params=SETUPS)
def setup_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def setup(setup_name: str, reference: Reports, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("setup")
    chosen = SETUPS[setup_name]
    ranks = launch(
        run,
        out,
        processes=chosen.processes,
        devices=chosen.processes,
        options=chosen.options,
        cases=chosen.cases,
        others=[str(reference.out / "saved" / "step=3.ckpt")],
        resume=True,
    )
    return Reports(out, ranks, Staged)


def test_fit_is_as_on_one_device(setup_name: str, setup: Reports, reference: Reports) -> None:
    for case in SETUPS[setup_name].cases:
        assert setup.batches(case) == reference.batches(case), case
        (expected,) = reference.of(case)
        atol = CASES[case].atol
        for rank in setup.ranks:
            assert rank[case]["steps"] == expected["steps"]
            for key in ("val_sum", "val_rows"):
                found = rank[case]["metrics"][key]
                assert found == pytest.approx(expected["metrics"][key], rel=1e-4), key
        start, end = weights(CASES[case].make()), reference.weights(case)
        assert not torch.allclose(end, start.to(end.dtype), rtol=0, atol=10 * atol)
        torch.testing.assert_close(setup.weights(case), end, rtol=0, atol=atol)


def test_losses_of_steps_are_the_mean_over_rows(
    setup_name: str, setup: Reports, reference: Reports
) -> None:
    for case, atol in (("plain", 1e-5), ("double", 1e-12)):
        if case in SETUPS[setup_name].cases:
            (expected,) = reference.of(case)
            wanted = torch.tensor(expected["losses"], dtype=torch.float64)
            torch.testing.assert_close(mean_losses(setup.of(case)), wanted, rtol=0, atol=atol)


def test_each_process_has_only_its_own_stages(setup: Reports) -> None:
    whole = sum(parameter.numel() for parameter in Staged().parameters())
    assert sum(rank["plain"]["local"] for rank in setup.ranks) == whole * len(setup.of("plain"))
    assert all(rank["plain"]["local"] < whole for rank in setup.ranks)


def test_checkpoint_is_that_of_one_device(setup: Reports, reference: Reports) -> None:
    found, expected = load_checkpoint(setup, "plain"), load_checkpoint(reference, "plain")
    assert list(found["state_dict"]) == list(expected["state_dict"])
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        torch.testing.assert_close(ours["state"][index], state, rtol=0, atol=1e-5)


def test_evaluation_is_over_all_rows_once(setup: Reports, reference: Reports) -> None:
    assert setup.batches("evaluated 0") == reference.batches("evaluated 0")
    (expected,) = reference.of("evaluated 0")
    assert expected["metrics"]["test_rows"] == len(TEST)
    for rank in setup.ranks:
        found = rank["evaluated 0"]["metrics"]
        assert found == pytest.approx(expected["metrics"], rel=1e-5)
    reports = setup.of("evaluated 0")
    rows = torch.cat([report["rows"] for report in reports])
    assert rows.sort().values.tolist() == TEST.row.tolist()
    if len(reports) == 1:
        assert rows.tolist() == TEST.row.tolist()
    values = torch.cat([report["y"] for report in reports])[rows.argsort()]
    torch.testing.assert_close(values, expected["y"])
    # All processes of a pipeline have the predictions.
    for rank in setup.ranks:
        assert torch.equal(
            rank["evaluated 0"]["y"], reports[rank["evaluated 0"]["sharding"]["rank"]]["y"]
        )


def test_resume_is_bitwise(setup: Reports) -> None:
    for step in RESUMED:
        name = f"resumed {step}"
        assert setup.batches(name)["train"] == setup.batches("whole")["train"][step:]
        assert torch.equal(setup.weights(name), setup.weights("whole"))


def test_checkpoint_of_one_device_resumes_in_a_pipeline(setup: Reports, reference: Reports) -> None:
    assert setup.batches("other 0")["train"] == reference.batches("whole")["train"][3:]
    end = reference.weights("whole")
    torch.testing.assert_close(setup.weights("other 0"), end, rtol=0, atol=5e-6)


@in_processes(2)
def test_what_is_not_supported_is_rejected_on_every_rank(tmp_path: Path) -> None:
    def fit(module: Staged, strategy: dict[str, Any], options: dict[str, Any]) -> None:
        trainer, data = Runs(tmp_path, strategy, 2).make(max_epochs=1, **options)
        data.batch_size = GLOBAL_BATCH
        trainer.fit(module, data)

    def callback(made: L.Callback) -> dict[str, Any]:
        return {"callbacks": [made]}

    swa, ema = StochasticWeightAveraging(0.1), EMAWeightAveraging()
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    interleaved = {"schedule": "interleaved"}
    # Of the strategy, of the Trainer, and what the error names.
    cases: list[tuple[type[Staged], dict[str, Any], dict[str, Any], type[Exception], str]] = [
        (Tied, {}, {}, ValueError, r"net\.2\.weight .* net\.4\.weight"),
        (Outside, {}, {}, ValueError, "'scale'"),
        (OneStage, {}, {}, ValueError, r"OneStage\.stages\(\)"),
        (ThreeStages, interleaved, {}, ValueError, r"ThreeStages\.stages\(\)"),
        (NoStages, {}, {}, UnsuitableModuleError, r"NoStages .*stages\(\)"),
        (LooksAtOutput, {}, {}, TypeError, "training_step"),
        (CallsOutside, {}, {}, RuntimeError, "memmap_pipeline"),
        (Lbfgs, {}, {}, ValueError, "LBFGS"),
        (PenalisedStages, {}, {}, ValueError, "parameters"),
        (Sparse, {"data_parallel_size": 2}, {}, ValueError, r"net\.1: .*sparse=True"),
        (Staged, {}, callback(swa), ValueError, "StochasticWeightAveraging"),
        (Staged, {}, callback(ema), ValueError, "EMAWeightAveraging"),
        (Staged, {}, callback(pruning), ValueError, "ModelPruning"),
        (Staged, {}, callback(Thaws()), ValueError, "Thaws"),
        (Unset, {}, {}, UnsuitableModuleError, r"net\.4 .*unset"),
        (Staged, {}, {"sync_batchnorm": True}, ValueError, "sync_batchnorm=True"),
        (Staged, {"schedule": "zigzag"}, {}, ValueError, "schedule='zigzag'.*interleaved"),
        (Staged, {"data_parallel_size": 0}, {}, ValueError, "data_parallel_size=0"),
        (Staged, {"data_parallel_size": 3}, {}, ValueError, "data_parallel_size=3"),
        (Staged, {"num_microbatches": 0}, {}, ValueError, "num_microbatches=0"),
        (Staged, {"schedule": "1f1b", "num_microbatches": 1}, {}, ValueError, "num_microbatches=1"),
        (Staged, {**interleaved, "num_microbatches": 5}, {}, ValueError, "num_microbatches=5"),
    ]
    for make, strategy, options, kind, names in cases:
        with pytest.raises(kind, match=names):
            fit(make(), {"schedule": "gpipe", **strategy}, options)


@in_processes(2)
def test_module_that_was_cut_is_rejected_elsewhere_and_continues_here(tmp_path: Path) -> None:
    trainer, data = Runs(tmp_path, {}, 2).make(max_epochs=1)
    module = Staged()
    trainer.fit(module, data)
    # Lightning's own strategies move the module, and once more after an error.
    for strategy in ("ddp", "memmap_superbatch_ddp", "memmap_fsdp2"):
        other = make_trainer(tmp_path, strategy=strategy, devices=2)
        with pytest.raises((UnsuitableModuleError, ValueError), match=r"Staged .*pipeline"):
            other.fit(module, data)
    with pytest.raises(UnsuitableModuleError, match=r"Staged .*pipeline"):
        module.cpu()
    losses = len(module.losses)
    again, data = Runs(tmp_path, {}, 2).make(max_epochs=1)
    again.fit(module, data)
    assert len(module.losses) == 2 * losses > 0


@in_processes(2)
def test_running_statistics_are_of_the_data_alone(tmp_path: Path) -> None:
    trainer, data = Runs(tmp_path, {"schedule": "gpipe"}, 2).make(max_epochs=2)
    module = WithBatchNorm()
    trainer.fit(module, data)
    buffers = {name: b for name, b in module.net.named_buffers() if not b.is_meta}
    # One of the processes has the layer.
    assert [*map(bool, gather_from_ranks(buffers))].count(True) == 1
    if buffers:
        # Two epochs of seven steps with four micro-batches each, and no row but the data's.
        assert buffers["4.num_batches_tracked"] == 2 * 7 * 4
        assert buffers["4.running_mean"].abs().max() < 2
        assert buffers["4.running_var"].max() < 1


@in_processes(2)
def test_layers_on_the_meta_device_are_initialised_and_others_keep_their_values(
    tmp_path: Path,
) -> None:
    trainer, data = Runs(tmp_path, {"schedule": "gpipe"}, 2).make()
    module = PartlyOnMeta()
    trainer.validate(module, data, verbose=False)
    local = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    begun = {name: value for rank in gather_from_ranks(local) for name, value in rank.items()}
    loaded = Staged().state_dict()
    assert begun.keys() == dict(Staged().named_parameters()).keys()
    for name, value in begun.items():
        if name.startswith(("net.0", "net.4")):
            # As nn.Linear draws them.
            assert 0 < value.abs().max() <= begun[name.replace("bias", "weight")].shape[1] ** -0.5
        else:
            assert torch.equal(value, loaded[name])


@in_processes(2)
def test_smaller_batches_need_no_schedule_and_outputs_are_not_kept(tmp_path: Path) -> None:
    options = {"schedule": "1f1b", "num_microbatches": 5}
    trainer, data = Runs(tmp_path, options, 2).make(max_epochs=2, limit_val_batches=0)
    module = Counting()
    trainer.fit(module, data)
    if trainer.is_global_zero:
        # Two epochs of seven steps, of 10, 7 and 6 rows, and one call more to find the shapes.
        assert module.calls == 2 * 7 * 5 + 1
    else:
        # Not every torch calls the loss for that, too.
        assert len(module.outputs) - 2 * 7 * 5 in (0, 1)
        # Each has its backward pass before the next one.
        assert module.alive <= 1


@in_processes(2)
def test_large_float16_gradients_of_two_pipelines_stay_finite(tmp_path: Path) -> None:
    trainer, data = Runs(tmp_path, {"data_parallel_size": 2}, 2).make(precision="16-true")
    module = Steep()
    trainer.fit(module, data)
    assert all(weight.isfinite().all() for weight in module.parameters())


def test_two_pipelines_have_the_buffers_of_the_first(tmp_path: Path) -> None:
    ranks = launch(summing, tmp_path, processes=2)
    found, resumed = (Reports(tmp_path, ranks, Summing).weights(n) for n in ("whole", "resumed"))
    assert torch.equal(found, resumed)


def test_weights_in_bfloat16_are_those_of_the_micro_batches_on_one_device(tmp_path: Path) -> None:
    launch(in_bfloat16, tmp_path, processes=2, make=Staged, options={})
    in_bfloat16(tmp_path, InMicroBatches, None)
    names = "Staged", "InMicroBatches"
    pipeline, one = (torch.load(tmp_path / f"{name}.ckpt")["state_dict"] for name in names)
    for name, value in one.items():
        assert torch.equal(pipeline[name], value)
    # Gradients of whole batches are rounded otherwise.
    in_bfloat16(tmp_path, Staged, None)
    whole = torch.load(tmp_path / "Staged.ckpt")["state_dict"]
    assert max(float((whole[name] - value).abs().max()) for name, value in one.items()) > 1e-4
