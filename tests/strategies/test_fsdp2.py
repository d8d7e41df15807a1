"""FSDP2 of modules of several units: its options, what each process holds, and one result."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torchmetrics import MeanSquaredError

from lightning_memmap import MemmapDataModule
from lightning_memmap.ranks import gather_from_ranks
from lightning_memmap.strategies import FSDP2Strategy
from lightning_memmap.strategies.sharding.units import default_units, without_shared
from tests.support import preloaded
from tests.support.models import ByLbfgs, Penalised, Points, Regression, TwoOptimizers, make_trainer
from tests.support.processes import in_processes, launch, sorted_steps
from tests.support.versions import EMAWeightAveraging, weights_only

pytestmark = pytest.mark.slow

ROWS = 63
GLOBAL_BATCH = 12
WIDTH = 32
SEED = 11


class Block(nn.Module):
    """A layer with a norm, a residual connection and a table that is no parameter.

    Attributes:
        calls: Times that its forward ran.
        dtypes: Dtypes of its weight and its table while it ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("table", torch.empty(WIDTH))
        self.reset_parameters()
        self.calls = 0
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.linspace(0, 0.3, WIDTH, device=self.table.device))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.dtypes.add((self.up.weight.dtype, self.table.dtype))
        return x + self.down(torch.tanh(self.up(self.norm(x) + self.table)))


class Deep(Regression):
    """Three blocks between two linear layers.

    Args:
        tied: The second block has a parameter of the first. One of the third has its memory in
            another order, and a buffer has one value for many.
    """

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.build()
        if tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight
            weight = self.blocks[2].up.weight.detach()
            self.blocks[2].up.weight = nn.Parameter(weight.t().contiguous().t())
            self.register_buffer("spread", torch.ones(1).expand(WIDTH), persistent=False)
        self.losses: list[float] = []
        self.step_dtypes: dict[str, torch.dtype] = {}
        self.sizes: dict[str, int] = {}

    def build(self) -> None:
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for block in self.blocks:
            x = block(x)
        return self.net[2](x)

    def setup(self, stage: str) -> None:
        # Values of modules on the meta device are drawn after this.
        torch.manual_seed(SEED)

    def step(self, batch: Any, stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        # Through the module itself, in a step that is one of its forward passes already.
        y = self(batch["x"])
        loss = nn.functional.mse_loss(y, batch["y"])
        self.step_dtypes = {
            "x": batch["x"].dtype,
            "row": batch["row"].dtype,
            "y": y.dtype,
            "loss": loss.dtype,
        }
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        # Adam would divide by the smallest of gradients, and so make rounding errors large.
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def on_train_start(self) -> None:
        parameters = list(self.parameters())
        self.sizes = {
            "local": sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
            "whole": sum(p.numel() for p in parameters),
        }


class Configured(Deep):
    """Makes its layers in configure_model, as a module that is too large for one process does."""

    def build(self) -> None:
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not self.blocks:
            with torch.device("meta"):
                super().build()


class Normed(Regression):
    """Batch norm, the statistics of which are those of one process's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


class Counting(Regression):
    """Weighs its loss by what each process has counted, in buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))
        self.register_buffer("rows", torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.rows = 0.9 * self.rows + batch["row"].sum()
        return self.step(batch, "train") * (1 + 10 / self.rows.float()).sum()

    def on_validation_epoch_start(self) -> None:
        self.batches = torch.zeros(())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.batches += 1
        # What is gathered in it could not be trained later.
        assert not torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)


class Momentum(Regression):
    """An optimizer with parameters in another order than the module's, and one without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.step(batch, "train"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        weights = [self.net[2].weight, self.net[0].weight]
        biases = [self.net[2].bias, self.net[0].bias]
        return [torch.optim.SGD(biases, lr=0.05), torch.optim.Adam(weights, lr=0.02)]


class Late(Momentum):
    """Has a layer that is used only from the fifth batch on: until then one optimizer has no state
    for it, and another one none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.late.parameters():
                parameter.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        # Two optimizers step in each.
        return y if self.global_step < 8 else y + self.late(x)

    def configure_optimizers(self) -> Any:
        first = [*self.net.parameters(), self.late.bias]
        return [torch.optim.Adam(first, lr=0.02), torch.optim.Adam([self.late.weight], lr=0.02)]


class Measured(Momentum):
    """Has a metric as a child, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def step(self, batch: Any, stage: str) -> Tensor:
        self.error(self(batch["x"]), batch["y"])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return super().step(batch, stage)


class Lbfgs(ByLbfgs, Deep):
    pass


class PenalisedDeep(Penalised, Deep):
    pass


def make_data(out: Path, processes: int) -> MemmapDataModule:
    batch_size = GLOBAL_BATCH // processes
    return MemmapDataModule(Points(ROWS), store_dir=out / "stores", batch_size=batch_size)


def fit(
    out: Path,
    save: str,
    make: Callable[[], Any] = Deep,
    processes: int = 2,
    checkpoint: Path | None = None,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train two epochs, save ``<save>.ckpt``, and return the module."""
    strategy: Any = FSDP2Strategy(**options) if processes > 1 else "auto"
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=processes,
        max_epochs=2,
        limit_val_batches=0,
        **(trainer_options or {}),
    )
    module = make()
    trainer.fit(
        module,
        make_data(out, processes),
        ckpt_path=checkpoint,
        **weights_only(checkpoint and False),
    )
    trainer.save_checkpoint(out / f"{save}.ckpt")
    return module


def make_report(module: Any) -> dict[str, Any]:
    return {
        "sizes": module.sizes,
        "calls": [block.calls for block in module.blocks],
        "dtypes": [block.dtypes for block in module.blocks],
        "step": module.step_dtypes,
        "losses": module.losses,
        "seen": module.seen,
        "class": [type(each).__name__ for each in (module, *module.blocks, module.net[0])],
    }


def save_first(out: Path, name: str) -> ModelCheckpoint:
    """Saves after the steps 4 and 8, of epochs of five."""
    return ModelCheckpoint(out / name, "{step}", every_n_train_steps=4, save_top_k=-1)


def run_two(out: Path) -> dict[str, Any]:
    """All that two processes are asked."""
    blocks = {"wrap_classes": ["Block"]}
    found: dict[str, Any] = {
        "blocks": make_report(fit(out, "blocks", **blocks)),
        "by size": make_report(fit(out, "by size", min_unit_parameters=4000)),
        "root": make_report(fit(out, "root")),
        "resharded": make_report(fit(out, "resharded", reshard_after_forward=True, **blocks)),
        "recomputed": make_report(fit(out, "recomputed", activation_checkpointing=True, **blocks)),
        "every second": make_report(fit(out, "second", activation_checkpointing=2, **blocks)),
        "tied": make_report(fit(out, "tied", lambda: Deep(tied=True), **blocks)),
    }
    found |= initialised(out, blocks)
    found |= checkpoints(out, blocks)
    module = fit(out, "first Trainer", **blocks)
    found["second Trainer"] = make_report(fit(out, "second Trainer", lambda: module, **blocks))
    return found


def initialised(out: Path, blocks: dict[str, Any]) -> dict[str, Any]:
    def on_meta() -> Deep:
        with torch.device("meta"):
            return Deep()

    def by_trainer() -> Deep:
        trainer = make_trainer(out, strategy=FSDP2Strategy(**blocks), devices=2)
        with trainer.init_module(empty_init=True):
            return Deep()

    def unlike() -> Deep:
        # As without a seed: each process draws its own numbers.
        module = Deep()
        rank = torch.distributed.get_rank()
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.add_(rank)
        return module

    return {
        "meta": make_report(fit(out, "meta", on_meta, **blocks)),
        "init_module": make_report(fit(out, "init_module", by_trainer, **blocks)),
        "configured": make_report(fit(out, "configured", Configured, **blocks)),
        "unlike": make_report(fit(out, "unlike", unlike, replicate_size=2, **blocks)),
    }


def checkpoints(out: Path, blocks: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sharded = {**blocks, "save_distributed_checkpoint": True}
    saver = {"callbacks": [save_first(out, "folders")], "enable_checkpointing": True}
    found["saved"] = make_report(fit(out, "whole folder", trainer_options=saver, **sharded))
    folder = out / "folders" / "step=4.ckpt"
    found["is folder"] = folder.is_dir()
    # A folder is loaded, and a file saved.
    found["resumed"] = make_report(fit(out, "resumed", checkpoint=folder, **blocks))
    for make in (Momentum, TwoOptimizers):
        name = make.__name__
        saver = {"callbacks": [save_first(out, name)], "enable_checkpointing": True}
        fit(out, name, make, trainer_options=saver)
        fit(out, f"{name} resumed", make, checkpoint=out / name / "step=4.ckpt")
    return found


def run_four(out: Path, folder: str) -> dict[str, Any]:
    """Two copies, each sharded over two processes; and a run resumed from two processes."""
    blocks = {"wrap_classes": ["Block"], "processes": 4}
    clip = {"gradient_clip_val": 0.1}
    module = fit(out, "hybrid", replicate_size=2, trainer_options=clip, **blocks)
    found = {"hybrid": make_report(module), "sampler": module.trainer.distributed_sampler_kwargs}
    found["grouped"] = make_report(fit(out, "grouped", reshard_after_forward=2, **blocks))
    resumed = fit(out, "resumed", checkpoint=Path(folder), replicate_size=2, **blocks)
    found["resumed"] = make_report(resumed)
    return found


#: float32 sums in another order, over ten steps that move weights by about 0.1.
ATOL = 2e-6


class Runs:
    """What the processes reported, and the files that they wrote."""

    def __init__(self, out: Path, ranks: list[dict[str, Any]]) -> None:
        self.out = out
        self.ranks = ranks

    def reports(self, case: str) -> list[Any]:
        return [rank[case] for rank in self.ranks]

    def state(self, case: str) -> dict[str, torch.Tensor]:
        path = self.out / f"{case}.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]  # type: ignore[no-any-return]

    def steps(self, case: str) -> list[list[int]]:
        return sorted_steps([report["seen"]["train"] for report in self.reports(case)])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("one")
    module = fit(out, "plain", processes=1)
    plain = {"seen": {"train": [*module.seen["train"]]}}
    fit(out, "tied", lambda: Deep(tied=True), processes=1)
    fit(out, "bf16-mixed", processes=1, trainer_options={"precision": "bf16-mixed"})
    fit(out, "clipped", processes=1, trainer_options={"gradient_clip_val": 0.1})
    fit(out, "second Trainer", lambda: module, processes=1)
    for make in (Momentum, TwoOptimizers):
        fit(out, make.__name__, make, processes=1)
    return Runs(out, [{"plain": plain}])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("two")
    return Runs(out, launch(run_two, out, processes=2))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, two: Runs) -> Runs:
    out = tmp_path_factory.mktemp("four")
    folder = str(two.out / "folders" / "step=4.ckpt")
    return Runs(out, launch(run_four, out, processes=4, folder=folder))


def assert_as(found: dict[str, Any], expected: dict[str, Any], atol: float = ATOL) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


def test_each_process_has_a_shard_of_the_module(two: Runs, four: Runs) -> None:
    for runs, case in ((two, "blocks"), (four, "hybrid")):
        sizes = [report["sizes"] for report in runs.reports(case)]
        # Of four processes two make a copy. The last layer has one row, which one process has.
        assert sum(size["local"] for size in sizes) == sizes[0]["whole"] * len(sizes) // 2
        assert max(size["local"] for size in sizes) <= sizes[0]["whole"] / 2 + WIDTH + 1


def test_units_are_those_asked_for(two: Runs) -> None:
    for case, names in (
        ("blocks", ["FSDPDeep", "FSDPBlock", "FSDPBlock", "FSDPBlock", "Linear"]),
        ("by size", ["FSDPDeep", "FSDPBlock", "FSDPBlock", "FSDPBlock", "Linear"]),
        ("root", ["FSDPDeep", "Block", "Block", "Block", "Linear"]),
        # The outermost has what two blocks share.
        ("tied", ["FSDPDeep", "Block", "Block", "FSDPBlock", "Linear"]),
    ):
        assert two.reports(case)[0]["class"] == names, case


@pytest.mark.parametrize(
    "case",
    ["blocks", "by size", "root", "resharded", "recomputed", "meta", "init_module", "configured",
     "unlike", "saved", "resumed"],
)  # fmt: skip
def test_training_is_that_of_one_process(two: Runs, one: Runs, case: str) -> None:
    if case != "saved":
        assert_as(two.state(case), one.state("plain"))
    steps = one.steps("plain")
    assert two.steps(case) == (steps[4:] if case == "resumed" else steps)


def test_another_trainer_goes_on_with_the_module(two: Runs, one: Runs) -> None:
    # Twenty steps.
    assert_as(two.state("second Trainer"), one.state("second Trainer"), atol=2 * ATOL)


def test_shared_parameters_stay_shared(two: Runs, one: Runs) -> None:
    assert_as(two.state("tied"), one.state("tied"))
    assert not torch.equal(one.state("tied")["net.0.weight"], one.state("plain")["net.0.weight"])


def test_recomputed_units_run_twice(two: Runs) -> None:
    steps = len(two.steps("blocks"))
    assert two.reports("blocks")[0]["calls"] == [steps] * 3
    assert two.reports("recomputed")[0]["calls"] == [2 * steps] * 3
    assert two.reports("every second")[0]["calls"] == [steps, 2 * steps, steps]
    assert all(
        torch.equal(value, two.state("blocks")[name])
        for name, value in two.state("recomputed").items()
    )


def test_meta_device_begins_as_eager(two: Runs) -> None:
    for case in ("meta", "init_module", "configured"):
        for name, value in two.state("blocks").items():
            assert torch.equal(two.state(case)[name], value), (case, name)
        assert two.reports(case)[0]["losses"] == two.reports("blocks")[0]["losses"]


@pytest.mark.parametrize(
    ("precision", "weight", "table", "step"),
    [
        ("32-true", torch.float32, torch.float32, (torch.float32,) * 3),
        ("bf16-mixed", torch.bfloat16, torch.float32, (torch.bfloat16,) * 2 + (torch.float32,)),
        ("bf16-true", torch.bfloat16, torch.bfloat16, (torch.bfloat16,) * 3),
    ],
)
@in_processes(2)
def test_mixed_precision_casts_units_and_batches(
    tmp_path: Path, one: Runs, precision: Any, weight: Any, table: Any, step: Any
) -> None:
    options = {"wrap_classes": ["Block"], "trainer_options": {"precision": precision}}
    module = fit(tmp_path, "found", **options)
    assert [block.dtypes for block in module.blocks] == [{(weight, table)}] * 3
    assert tuple(module.step_dtypes[name] for name in ("x", "y", "loss")) == step
    assert module.step_dtypes["row"] == torch.int64
    found, plain = Runs(tmp_path, []).state("found"), one.state("plain")
    if precision == "bf16-mixed":
        # 8 bits of gradients, of weights that move by about 0.1.
        assert_as(found, one.state("bf16-mixed"), atol=5e-3)
        name = "net.0.weight"
        assert not torch.allclose(found[name], plain[name], rtol=0, atol=1e-5)
    assert found["net.0.weight"].dtype == table


@in_processes(2)
def test_mixed_precision_leaves_running_statistics(tmp_path: Path) -> None:
    module = fit(tmp_path, "found", Normed, trainer_options={"precision": "bf16-mixed"})
    assert {name: buffer.dtype for name, buffer in module.named_buffers()} == {
        "net.1.running_mean": torch.float32,
        "net.1.running_var": torch.float32,
        "net.1.num_batches_tracked": torch.int64,
    }
    loaded = Normed.load_from_checkpoint(tmp_path / "found.ckpt", **weights_only(True))
    assert not torch.equal(loaded.net[1].running_mean, Normed().net[1].running_mean)


@pytest.mark.parametrize("make", [Momentum, TwoOptimizers])
def test_states_of_several_optimizers_resume_here_and_on_one_process(
    two: Runs, one: Runs, tmp_path: Path, make: Any
) -> None:
    name = make.__name__
    whole = two.state(name)
    assert_as(whole, one.state(name))
    for key, value in two.state(f"{name} resumed").items():
        assert torch.equal(value, whole[key])
    fit(tmp_path, "alone", make, 1, checkpoint=two.out / name / "step=4.ckpt")
    assert_as(Runs(tmp_path, []).state("alone"), whole)


def test_sharded_checkpoint_becomes_plain_weights(two: Runs, tmp_path: Path) -> None:
    assert two.reports("is folder") == [True, True]
    folder = two.out / "folders" / "step=4.ckpt"
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    weights = torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"]
    assert weights.keys() == Deep().state_dict().keys()
    assert not torch.equal(weights["net.0.weight"], Deep().net[0].weight)


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_folder_resumes_in_one_process(two: Runs, tmp_path: Path, strategy: str) -> None:
    folder = two.out / "folders" / "step=4.ckpt"
    assert_as(*(fit_in_one_process(tmp_path, strategy, Deep, path) for path in (folder, None)))


def fit_in_one_process(
    out: Path, strategy: str, make: Any, checkpoint: Path | None
) -> dict[str, Any]:
    options = {"strategy": strategy, "devices": 2, "max_epochs": 2, "limit_val_batches": 0}
    module = make()
    trainer = make_trainer(out, **options)
    trainer.fit(module, make_data(out, 2), ckpt_path=checkpoint, **weights_only(False))
    return {key: value.cpu() for key, value in module.state_dict().items()}


def fit_late(out: Path) -> None:
    """Save a folder before the first gradient of a layer, and resume from it."""
    saver = {"callbacks": [save_first(out, "folders")], "enable_checkpointing": True}
    fit(out, "whole folder", Late, trainer_options=saver, save_distributed_checkpoint=True)
    fit(out, "whole", Late)
    fit(out, "resumed", Late, checkpoint=out / "folders" / "step=4.ckpt")


def test_folder_resumes_before_the_first_gradient_of_a_parameter(tmp_path: Path) -> None:
    launch(fit_late, tmp_path, processes=2)
    whole, resumed = (Runs(tmp_path, []).state(name) for name in ("whole", "resumed"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert not torch.equal(whole["late.bias"], torch.tensor([0.1]))
    alone = tmp_path / "alone"
    folder = tmp_path / "folders" / "step=4.ckpt"
    assert_as(*(fit_in_one_process(alone, "memmap_superbatch", Late, x) for x in (folder, None)))


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
@in_processes(2)
def test_buffers_are_those_of_the_first_process(tmp_path: Path, is_folder: bool) -> None:
    saver = {"callbacks": [save_first(tmp_path, "saved")], "enable_checkpointing": True}
    options = {"trainer_options": saver, "save_distributed_checkpoint": is_folder}
    fit(tmp_path, "whole", Counting, **options)
    checkpoint = tmp_path / "saved" / "step=4.ckpt"
    assert checkpoint.is_dir() == is_folder
    fit(tmp_path, "from file", Counting)
    module = fit(tmp_path, "resumed", Counting, checkpoint=checkpoint)
    # A resumed process begins with the buffers of the checkpoint.
    whole, resumed = (Runs(tmp_path, []).state(name) for name in ("from file", "resumed"))
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    # As if each had counted other rows last.
    module.rows += torch.distributed.get_rank()
    data = MemmapDataModule(val_dataset=Points(12), store_dir=tmp_path / "stores", batch_size=6)
    module.trainer.limit_val_batches = 1.0
    # As with NCCL, of which Lightning evaluates in inference mode.
    with patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
        module.trainer.validate(module, data, verbose=False)
    assert torch.equal(module.rows, resumed["rows"])


@in_processes(2)
def test_missing_weights_are_an_error_unless_loading_is_not_strict(tmp_path: Path) -> None:
    fit(tmp_path, "whole", wrap_classes=["Block"])
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    del checkpoint["state_dict"]["net.2.weight"]
    path = tmp_path / f"missing{torch.distributed.get_rank()}.ckpt"
    torch.save(checkpoint, path)
    data = MemmapDataModule(val_dataset=Points(12), store_dir=tmp_path / "stores", batch_size=6)
    for strict in (True, False):
        module = Deep()
        module.strict_loading = strict
        trainer = make_trainer(tmp_path, strategy=FSDP2Strategy(wrap_classes=["Block"]), devices=2)
        error = pytest.raises(RuntimeError, match=r"net\.2\.weight") if strict else nullcontext()
        with error:
            trainer.validate(module, data, ckpt_path=path, verbose=False)


@in_processes(2)
def test_metrics_are_no_units_under_manual_optimization(tmp_path: Path, one: Runs) -> None:
    module = fit(tmp_path, "measured", Measured)
    assert_as(Runs(tmp_path, []).state("measured"), one.state("Momentum"))
    assert len(set(gather_from_ranks(float(module.trainer.callback_metrics["error"])))) == 1


def test_copies_of_shards_are_one_process(four: Runs, one: Runs) -> None:
    assert_as(four.state("hybrid"), one.state("clipped"))
    assert not torch.allclose(
        one.state("clipped")["net.0.weight"], one.state("plain")["net.0.weight"], rtol=1e-3
    )
    assert four.steps("hybrid") == one.steps("plain")
    assert four.reports("sampler") == [{"num_replicas": 4, "rank": rank} for rank in range(4)]


def test_parameters_kept_in_groups_are_one_process(four: Runs, one: Runs) -> None:
    assert_as(four.state("grouped"), one.state("plain"))
    assert four.steps("grouped") == one.steps("plain")


def test_sharded_checkpoint_resumes_on_more_processes(four: Runs, one: Runs) -> None:
    assert_as(four.state("resumed"), one.state("plain"))
    assert four.steps("resumed") == one.steps("plain")[4:]


@in_processes(2)
def test_modules_that_cannot_be_sharded_are_rejected(tmp_path: Path) -> None:
    sharded = fit(tmp_path, "sharded", wrap_classes=["Block"])

    def own_parameter() -> L.LightningModule:
        module = TwoOptimizers()
        module.scale = nn.Parameter(torch.ones(1))
        return module

    def tied_by_hand() -> L.LightningModule:
        module = Deep(tied=True)
        module.automatic_optimization = False
        return module

    def attention() -> L.LightningModule:
        module = Regression()
        with torch.device("meta"):
            module.net = nn.MultiheadAttention(8, 2)
        return module

    def sparse() -> L.LightningModule:
        module = Regression()
        module.net = nn.Sequential(nn.Embedding(8, 2, sparse=True))
        return module

    def callback(made: L.Callback) -> dict[str, Any]:
        return {"trainer_options": {"callbacks": [made]}}

    blocks = ["Block", "Decoder"]
    instead = "memmap_superbatch_ddp"
    swa, ema = StochasticWeightAveraging(0.1), EMAWeightAveraging()
    pruning = ModelPruning("l1_unstructured")
    cases: list[tuple[Callable[[], Any], dict[str, Any], list[str]]] = [
        (Deep, {"wrap_classes": blocks}, [f"wrap_classes={blocks}", "Decoder", "Block, LayerNorm"]),
        (Deep, {"activation_checkpointing": True}, ["activation_checkpointing=True"]),
        (own_parameter, {}, ["scale", "manual optimization", "submodule"]),
        (tied_by_hand, {}, ["blocks.0.up.weight", "manual optimization", "submodule"]),
        (lambda: sharded, {"replicate_size": 2}, ["was sharded over"]),
        (attention, {}, ["MultiheadAttention", "reset_parameters"]),
        (sparse, {}, ["net.0: Embedding with sparse=True"]),
        (Deep, callback(swa), ["StochasticWeightAveraging", instead]),
        (Deep, callback(ema), ["EMAWeightAveraging", instead]),
        (Deep, callback(pruning), ["ModelPruning", instead]),
        # torch has these layers for GPUs alone.
        (Normed, {"trainer_options": {"sync_batchnorm": True}}, ["SyncBatchNorm"]),
        (Lbfgs, {}, ["LBFGS", "AdamW"]),
        (PenalisedDeep, {"wrap_classes": ["Block"]}, ["parameters", "weight_decay"]),
    ]
    for make, options, words in cases:
        with pytest.raises((ValueError, TypeError)) as raised:
            fit(tmp_path, "rejected", make, **options)
        assert all(word in str(raised.value) for word in words), (words, raised.value)


class Rounded(Precision):
    """A precision that nobody knows."""

    precision: Any = "rounded"

    def __repr__(self) -> str:
        return "Rounded()"


class Half(Rounded):
    """What the Trainer chooses by the name of the strategy."""

    precision = "16-mixed"


@pytest.mark.parametrize(
    ("options", "trainer_options", "words"),
    [
        ({"wrap_classes": "Block"}, {}, "wrap_classes"),
        ({"wrap_classes": Block}, {}, "wrap_classes"),
        ({"wrap_classes": ["Block", 3]}, {}, "wrap_classes"),
        ({"wrap_classes": [int]}, {}, "wrap_classes"),
        ({"min_unit_parameters": 0}, {}, "min_unit_parameters=0"),
        ({"replicate_size": 0}, {}, "replicate_size=0"),
        ({"replicate_size": 3}, {}, "replicate_size=3"),
        ({"activation_checkpointing": 0}, {}, "activation_checkpointing=0"),
        ({"cpu_offload": True}, {}, "cpu_offload=True with accelerator='cpu'"),
        ({"reduce_dtype": "int8"}, {}, "reduce_dtype='int8'"),
        ({"reduce_dtype": "half precision"}, {}, "reduce_dtype='half precision'"),
        ({}, {"plugins": [Rounded()]}, "Trainer(precision='rounded')"),
        ({}, {"plugins": [Half()]}, "Trainer(precision='16-mixed')"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, Any], trainer_options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        make_trainer(tmp_path, strategy=FSDP2Strategy(**options), devices=4, **trainer_options)


class Residual(nn.Module):
    """A unit that compiles to one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x * self.scale)


class Residuals(Regression):
    """Three units, which are compiled once for all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_units_that_a_config_compiles_train_as_in_one_process(tmp_path: Path) -> None:
    here = "tests.strategies.test_fsdp2"
    saver = {"dirpath": str(tmp_path), "filename": "{step}"}
    options = {"wrap_classes": ["Residual"], "compile_units": True}
    rows = {"class_path": "tests.support.models.Points", "init_args": {"num_rows": 48}}
    data = {"train_dataset": rows, "store_dir": str(tmp_path / "stores"), "batch_size": 6}
    config = {
        "model": {"class_path": f"{here}.Residuals"},
        "data": {"class_path": "lightning_memmap.MemmapDataModule", "init_args": data},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_memmap.strategies.FSDP2Strategy",
                "init_args": options,
            },
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saver}
            ],
            "max_epochs": 2,
            "limit_val_batches": 0,
            "logger": False,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    compiled = tmp_path / "compiled"
    done = preloaded.run(
        *("-m", "lightning_memmap", "fit", "--config", path),
        cwd=tmp_path,
        TORCHINDUCTOR_CACHE_DIR=str(compiled),
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-5000:]
    # torch's default backend writes code for the processor.
    assert any(compiled.rglob("*.so"))
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["state_dict"]
    whole = Residuals()
    trainer = make_trainer(tmp_path, max_epochs=2, limit_val_batches=0)
    one = MemmapDataModule(Points(48), store_dir=tmp_path / "stores", batch_size=12)
    trainer.fit(whole, one)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=ATOL)


def test_default_units_are_the_items_of_the_largest_list() -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    module = nn.Module()
    # With a large table and a head around the blocks, and lists inside of them.
    module.net = nn.Sequential(nn.Embedding(100, 32), blocks, nn.Linear(32, 4))
    for block in blocks:
        block.more = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))
    assert default_units(module, 1) == [*blocks]
    assert default_units(module, 10**6) == []
    # Those of the same class elsewhere, such as of an encoder's shorter list.
    module.others = nn.ModuleList([Block()])
    assert default_units(module, 1) == [*blocks, *module.others]
    # Not each linear layer elsewhere.
    module = nn.Module()
    module.first = nn.Linear(4, 4)
    module.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Linear(2, 2))
    assert default_units(module, 30) == [module.net[0], module.net[2]]
    # Lists are not called: what is in them is.
    module = nn.Module()
    module.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.Tanh()]) for _ in range(2))
    assert default_units(module, 1) == [pair[0] for pair in module.pairs]
    assert default_units(nn.Linear(2, 2), 1) == []


def test_units_with_shared_parameters_are_left_to_their_parent() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    first, (second, third) = module[0], module[1]
    assert without_shared(module, [first, second, third]) == [first, second, third]
    third.weight = second.weight
    assert without_shared(module, [first, second, third, module[1]]) == [first, module[1]]
    first.weight = second.weight
    assert without_shared(module, [first, module[1]]) == []
