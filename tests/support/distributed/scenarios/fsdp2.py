"""Sharded modules of several units: what each process holds, sees, computes and saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import MeanSquaredError

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import FSDP2Strategy
from tests.support.models import ByLbfgs, Penalised, Points, Regression, TwoOptimizers, make_trainer
from tests.support.versions import EMAWeightAveraging, weights_only

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


def report(module: Any) -> dict[str, Any]:
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


def two(out: Path) -> dict[str, Any]:
    """All that two processes are asked."""
    blocks = {"wrap_classes": ["Block"]}
    found: dict[str, Any] = {
        "blocks": report(fit(out, "blocks", **blocks)),
        "by size": report(fit(out, "by size", min_unit_parameters=4000)),
        "root": report(fit(out, "root")),
        "resharded": report(fit(out, "resharded", reshard_after_forward=True, **blocks)),
        "recomputed": report(fit(out, "recomputed", activation_checkpointing=True, **blocks)),
        "tied": report(fit(out, "tied", lambda: Deep(tied=True), **blocks)),
    }
    found |= initialised(out, blocks)
    found |= mixed(out, blocks)
    found |= checkpoints(out, blocks)
    module = fit(out, "first Trainer", **blocks)
    measured = fit(out, "measured", Measured)
    found["measured"] = float(measured.trainer.callback_metrics["error"])
    found["second Trainer"] = report(fit(out, "second Trainer", lambda: module, **blocks))
    found["errors"] = errors(out, module)
    found["missing"] = missing_weights(out)
    return found


def missing_weights(out: Path) -> dict[str, Any]:
    """Validates from a checkpoint in which one layer is missing, strictly and not."""
    checkpoint = torch.load(out / "blocks.ckpt", weights_only=False)
    del checkpoint["state_dict"]["net.2.weight"]
    path = out / f"missing{torch.distributed.get_rank()}.ckpt"
    torch.save(checkpoint, path)
    found = {}
    for strict in (True, False):
        module = Deep()
        module.strict_loading = strict
        strategy = FSDP2Strategy(wrap_classes=["Block"])
        trainer = make_trainer(out, strategy=strategy, devices=2)
        data = MemmapDataModule(val_dataset=Points(12), store_dir=out / "stores", batch_size=6)
        try:
            trainer.validate(module, data, ckpt_path=path, verbose=False)
            found[str(strict)] = ""
        except RuntimeError as error:
            found[str(strict)] = str(error)
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
        "meta": report(fit(out, "meta", on_meta, **blocks)),
        "init_module": report(fit(out, "init_module", by_trainer, **blocks)),
        "configured": report(fit(out, "configured", Configured, **blocks)),
        "unlike": report(fit(out, "unlike", unlike, replicate_size=2, **blocks)),
    }


def mixed(out: Path, blocks: dict[str, Any]) -> dict[str, Any]:
    bf16 = {"trainer_options": {"precision": "bf16-mixed"}}
    found = {
        "bf16-mixed": report(fit(out, "bf16-mixed", **blocks, **bf16)),
        "bf16-true": report(
            fit(out, "bf16-true", **blocks, trainer_options={"precision": "bf16-true"})
        ),
    }
    normed = fit(out, "normed", Normed, **bf16)
    found["normed"] = {name: buffer.dtype for name, buffer in normed.named_buffers()}
    return found


def checkpoints(out: Path, blocks: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sharded = {**blocks, "save_distributed_checkpoint": True}
    saver = {"callbacks": [save_first(out, "folders")], "enable_checkpointing": True}
    found["saved"] = report(fit(out, "whole folder", trainer_options=saver, **sharded))
    folder = out / "folders" / "step=4.ckpt"
    found["is folder"] = folder.is_dir()
    # A folder is loaded, and a file saved.
    found["resumed"] = report(fit(out, "resumed", checkpoint=folder, **blocks))
    saver = {"callbacks": [save_first(out, "late folders")], "enable_checkpointing": True}
    options = {"save_distributed_checkpoint": True}
    fit(out, "late folder", Late, trainer_options=saver, **options)
    fit(out, "late", Late)
    fit(out, "late resumed", Late, checkpoint=out / "late folders" / "step=4.ckpt")
    for make in (Momentum, TwoOptimizers):
        name = make.__name__
        saver = {"callbacks": [save_first(out, name)], "enable_checkpointing": True}
        fit(out, name, make, trainer_options=saver)
        fit(out, f"{name} resumed", make, checkpoint=out / name / "step=4.ckpt")
    for name, options in (("file", {}), ("folder", {"save_distributed_checkpoint": True})):
        saver = {"callbacks": [save_first(out, name)], "enable_checkpointing": True}
        fit(out, f"counted, {name}", Counting, trainer_options=saver, **options)
        checkpoint = out / name / "step=4.ckpt"
        counted = fit(out, f"counted from {name}", Counting, checkpoint=checkpoint)
    # As if each had counted other rows last.
    counted.rows += torch.distributed.get_rank()
    data = MemmapDataModule(val_dataset=Points(12), store_dir=out / "stores", batch_size=6)
    counted.trainer.limit_val_batches = 1.0
    # As with NCCL, of which Lightning evaluates in inference mode.
    with patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
        counted.trainer.validate(counted, data, verbose=False)
    found["counted"] = counted.rows.item()
    return found


def errors(out: Path, sharded: Deep) -> dict[str, str]:
    """What is refused when the module is known, on every rank."""

    def by_hand() -> L.LightningModule:
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

    swa, ema = StochasticWeightAveraging(0.1), EMAWeightAveraging()
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "sparse": (sparse, {}),
        "swa": (Deep, {"trainer_options": {"callbacks": [swa]}}),
        "ema": (Deep, {"trainer_options": {"callbacks": [ema]}}),
        "pruning": (Deep, {"trainer_options": {"callbacks": [ModelPruning("l1_unstructured")]}}),
        "sync_batchnorm": (Normed, {"trainer_options": {"sync_batchnorm": True}}),
        "lbfgs": (Lbfgs, {}),
        "penalty": (PenalisedDeep, {"wrap_classes": ["Block"]}),
        "class": (Deep, {"wrap_classes": ["Block", "Decoder"]}),
        "recompute": (Deep, {"activation_checkpointing": True}),
        "own parameter": (by_hand, {}),
        "tied": (tied_by_hand, {}),
        "meta": (attention, {}),
        "mesh": (lambda: sharded, {"replicate_size": 2}),
    }
    found = {}
    for name, (make, options) in cases.items():
        try:
            fit(out, "refused", make, **options)
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def four(out: Path, folder: str) -> dict[str, Any]:
    """Two copies, each sharded over two processes; and a run resumed from two processes."""
    blocks = {"wrap_classes": ["Block"], "processes": 4}
    clip = {"gradient_clip_val": 0.1}
    module = fit(out, "hybrid", replicate_size=2, trainer_options=clip, **blocks)
    found = {"hybrid": report(module), "sampler": module.trainer.distributed_sampler_kwargs}
    found["grouped"] = report(fit(out, "grouped", reshard_after_forward=2, **blocks))
    resumed = fit(out, "resumed", checkpoint=Path(folder), replicate_size=2, **blocks)
    found["resumed"] = report(resumed)
    return found
