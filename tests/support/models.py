"""Small modules to train, and the dataset that they learn from."""

import os
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import Padded

#: Names the accelerator of `make_trainer` in programs of tests.
ACCELERATOR_VARIABLE = "LIGHTNING_MEMMAP_TEST_ACCELERATOR"
#: Whether GPUs are those of `tests.programs.simulated_gpu`.
IS_SIMULATED = "SIMULATED_GPU_LIBRARY" in os.environ


class Points(Dataset[dict[str, Any]]):
    """Row ``i``: the number ``i``, eight floats that depend on it alone, and their sum of sines.

    Args:
        num_rows: Rows.
        offset: Added to the row numbers, so that splits differ.
    """

    def __init__(self, num_rows: int, offset: int = 0) -> None:
        rows = torch.arange(offset, offset + num_rows)
        self.row = rows
        self.x = torch.sin(rows[:, None] * torch.arange(1, 9) * 0.37)
        self.y = torch.sin(self.x).sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": self.row[index], "x": self.x[index], "y": self.y[index]}


class Regression(L.LightningModule):
    """A small network that notes what it is given.

    Attributes:
        seen: By stage, the rows of each batch.
        dtypes: The dtypes of ``x`` that training_step was given.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.seen: dict[str, list[list[int]]] = {}
        self.dtypes: set[torch.dtype] = set()

    def stages(self) -> list[nn.Module]:
        return [self.net[:2], self.net[2:]]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, batch["y"])

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        loss = self.loss(self(batch["x"]), batch)
        # Over all rows of all processes where an epoch is evaluated, which others act upon.
        self.log(
            f"{stage}_loss", loss, batch_size=len(batch["row"]), sync_dist=stage in ("val", "test")
        )
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.dtypes.add(batch["x"].dtype)
        return self.step(batch, "train")

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"row": batch["row"], "y": self(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Sgd(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ByLbfgs(L.LightningModule):
    """Has an optimizer that calls the step several times. For a class that has a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Penalised(L.LightningModule):
    """Has a penalty on the parameters themselves. For a class that has a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + sum(parameter.norm() for parameter in self.parameters())


class Manual(Regression):
    """Optimizes by hand, every second batch, with its own clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.step(batch, "train")
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Regression):
    """Two parts, two optimizers, two schedulers, taken in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        optimizer = optimizers[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.step(batch, "train"))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        schedulers[batch_idx % 2].step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.net[0].parameters(), lr=0.05),
            torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]


class LossesByHand(L.LightningModule):
    """Optimizes by hand the sum of two losses, with their backward passes in every order. For a
    class that has a step."""

    step: Any
    loss: Any

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 3 == 0:
            # Both are computed before the first backward pass.
            first, second = self.step(batch, "train"), self.shifted(batch)
            self.manual_backward(first)
            self.manual_backward(second)
        elif batch_idx % 3 == 1:
            self.manual_backward(self.step(batch, "train"))
            self.manual_backward(self.shifted(batch))
        else:
            self.manual_backward(self.step(batch, "train") + self.shifted(batch))
        optimizer.step()

    def shifted(self, batch: dict[str, Tensor]) -> Any:
        """The loss of other inputs."""
        return self.loss(self(batch["x"].roll(1, 1)), batch) / 2


class PlayersByHand(L.LightningModule):
    """Steps every optimizer on each batch, while the parameters of all others are frozen. For a
    class that has a step."""

    step: Any
    loss: Any

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            loss = self.loss(self(batch["x"]), batch) if index else self.step(batch, "train")
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class SeveralLosses(LossesByHand, Regression):
    pass


class Players(PlayersByHand, Regression):
    """Two layers with an optimizer each, which are children that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.ModuleList(self.net)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(self.net[0], self.net[1]), self.net[2]]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x

    def configure_optimizers(self) -> Any:
        return TwoOptimizers.configure_optimizers(self)[0]  # type: ignore[arg-type]


class Scheduled(Regression):
    """A learning rate that halves with every optimizer step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plateau(Regression):
    """A learning rate that follows the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs"
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class Sounds(L.LightningModule):
    """Learns a number of each row from its sound, whose padding must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []
        self.texts: list[str] = []
        self.losses: list[Tensor] = []

    def features(self, sound: Any) -> Tensor:
        """Three numbers of each row, of shape (B, 3)."""
        if isinstance(sound, Padded):
            is_row = torch.arange(sound.values.shape[1]) < sound.lengths[:, None]
            values, lengths = sound.values * is_row, sound.lengths.clamp(min=1)
            sums = torch.stack([values.sum(1), values.square().sum(1)], 1)
            return torch.cat([sums / lengths[:, None], sound.lengths[:, None] / 40], 1)
        rows = sound.unbind() if isinstance(sound, Tensor) else sound
        return torch.stack(
            [
                torch.stack([row.sum(), row.square().sum(), torch.tensor(len(row) ** 2 / 40)])
                / max(len(row), 1)
                for row in rows
            ]
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        self.texts += batch["text"]
        target = batch["row"][:, None] % 7 / 7
        loss = nn.functional.mse_loss(self.net(self.features(batch["sound"])), target)
        self.losses.append(loss.detach())
        self.log("loss", loss, batch_size=len(target))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val", self.net(self.features(batch["sound"])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Boxes(L.LightningModule):
    """Learns the age of each row, where it has one, from its boxes.

    Attributes:
        seen: The rows of each step, as the dataset and as the loader numbers them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1, 0.2]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []
        self.names: list[list[str]] = []

    def features(self, objects: Any) -> Tensor:
        """The sum of the boxes of each row, of shape (B, 4)."""
        if isinstance(objects, list):
            return torch.stack([each["box"].sum(0) for each in objects]).float()
        # Padding is zeros.
        found: Tensor = objects["box"].values.sum(1).float()
        return found

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert torch.equal(batch["row"], batch["row_number"])
        self.seen.append(batch["row"].tolist())
        objects = batch["objects"]
        self.names += (
            [each["name"] for each in objects] if isinstance(objects, list) else objects["name"]
        )
        target = batch["age"].values[:, None] / 100
        return nn.functional.mse_loss(self.net(self.features(objects)), target)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Nothing is validated, but there are rows to validate on."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Brightness(L.LightningModule):
    """Learns a number of each row from its image and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1, 0.2]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        colors = batch["image"].float().mean((2, 3)) / 255
        features = torch.cat([colors, batch["mask"].float().mean((2, 3))], 1)
        target = batch["row"][:, None] % 7 / 7
        return nn.functional.mse_loss(self.net(features), target)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["image"].shape[1] == 3

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


LONG, SHORT = Points(48), Points(24, offset=100)


class CombinedData(L.LightningDataModule):
    """The loaders of two data modules, combined."""

    sets: ClassVar[dict[str, Points]] = {"long": LONG, "short": SHORT}

    def __init__(
        self, path: Path, mode: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "num_shards": 4}
        options["drop_last"] = drop_last
        self.mode = mode
        self.parts = {
            name: MemmapDataModule(rows, store_dir=path / name, **options)
            for name, rows in self.sets.items()
        }

    def prepare_data(self) -> None:
        for part in self.parts.values():
            part.prepare_data()

    def setup(self, stage: str) -> None:
        for part in self.parts.values():
            part.trainer = self.trainer
            part.setup(stage)

    def val_dataloader(self) -> list[Any]:
        return []

    def train_dataloader(self) -> CombinedLoader:
        loaders = {name: part.train_dataloader() for name, part in self.parts.items()}
        return CombinedLoader(loaders, self.mode)


class SaveAt(L.Callback):
    """Saves a checkpoint after an optimizer step.

    Args:
        step: The step, counted from 1.
        path: The file.
        ends_run: Whether the run ends there.
    """

    def __init__(self, step: int | None, path: Path, ends_run: bool = False) -> None:
        self.step = step
        self.path = path
        self.ends_run = ends_run

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.ends_run


#: Options of a Trainer that prints and writes nothing.
QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_trainer(path: Path, **options: Any) -> L.Trainer:
    """A Trainer on the CPU that writes nothing but what it is asked to, below ``path``.

    A program that `tests.support.processes.launch` started may be told another one.
    """
    defaults: dict[str, Any] = {
        "accelerator": os.environ.get(ACCELERATOR_VARIABLE, "cpu"),
        "devices": 1,
        "default_root_dir": path,
    }
    return L.Trainer(**{**QUIET, **defaults, **options})


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector, on the CPU."""
    return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that this process has, by name; sharded ones are gathered, on all ranks."""
    return {
        name: getattr(parameter, "full_tensor", lambda value=parameter: value)().detach().clone()
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }


def whole_weights(module: nn.Module) -> Tensor:
    """All parameters as one vector; sharded ones are gathered, on all ranks."""
    return torch.cat([value.flatten().float() for value in whole_parameters(module).values()])


class Thaws(BaseFinetuning):
    """Trains the first layer of ``net`` from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def set_up(data: MemmapDataModule, stage: str | None = None) -> MemmapDataModule:
    """Build the stores of a data module, and set it up."""
    data.prepare_data()
    data.setup(stage)
    return data
