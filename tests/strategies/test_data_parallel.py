"""What is particular to ``memmap_dp``: replicas, their rows, and what is merged of them.

``cpu:1`` and so on are separate devices, with a copy of the parameters each.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    PearsonCorrCoef,
    SpearmanCorrCoef,
)
from torchmetrics.aggregation import RunningMean

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.strategies import DataParallelStrategy
from lightning_memmap.strategies.replicas.merge_outputs import OutputMerger
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.rows import joined
from tests.support.versions import EMAWeightAveraging, needs_ema

#: Two steps of 24 rows and one of 41: uneven for 2, 3 and 4 replicas.
TRAIN, VAL = Points(89), Points(31, 100)
STEPS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:You called `self.log.*but have no logger configured"),
]

#: Sums over replicas are added in another order than over one batch. Float64 leaves 1e-15.
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
SIDE_BY_SIDE = ["cpu", "cpu:1", "cpu:2", "cpu:3"]


def make_data(path: Path, batch_size: int, **options: Any) -> MemmapDataModule:
    return MemmapDataModule(
        TRAIN, VAL, VAL, VAL, store_dir=path / "stores", batch_size=batch_size, **options
    )


def fit_dp(path: Path, module: Any, devices: Any = 4, **options: Any) -> L.Trainer:
    """Train replicas on logical devices, or on separate devices."""
    strategy = DataParallelStrategy(None if isinstance(devices, int) else devices)
    count = devices if isinstance(devices, int) else len(devices)
    trainer = make_trainer(
        path,
        strategy=strategy,
        devices=devices if isinstance(devices, int) else 1,
        **{"precision": "64-true", **options},
    )
    trainer.fit(module, datamodule=make_data(path, 24 // count))
    return trainer


def fit_one(path: Path, module: Any, **options: Any) -> L.Trainer:
    """Train with the same global batches on one device."""
    # Lightning's own divides the losses of an incomplete group of steps by their full number.
    strategy = "memmap_superbatch" if "accumulate_grad_batches" in options else "auto"
    trainer = make_trainer(path, **{"precision": "64-true", "strategy": strategy, **options})
    trainer.fit(module, datamodule=make_data(path, 24))
    return trainer


def assert_trains_as_one(
    path: Path, make: Callable[[], Any], devices: Any = 4, **options: Any
) -> tuple[Any, Any]:
    """Train two modules, as replicas and on one device, and compare their weights."""
    found, expected = make(), make()
    fit_dp(path, found, devices, **options)
    fit_one(path, expected, **options)
    torch.testing.assert_close(weights(found), weights(expected), **EXACT)
    return found, expected


class Base(L.LightningModule):
    """Steps without a record of their rows. Plain SGD: Adam would forgive a wrong scale."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            self.build()

    def build(self) -> None:
        self.net: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["row"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Zoo(Base):
    """Parts that are hard to replicate: tied and shared ones, lists of weights, reparametrised
    weights, hooks, parameters by other names."""

    def build(self) -> None:
        self.inner = Base()
        self.inner.net = nn.Linear(8, 8)
        self.lstm = nn.LSTM(1, 6, num_layers=2, batch_first=True)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.net.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.same = self.normed
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        self.plain = {"heads": [self.heads[0], self.heads[1]]}
        self.plain["itself"] = [self.plain]  # type: ignore[list-item]
        self.embedding = nn.Embedding(7, 8, sparse=True)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.full((1,), 0.1))
        self.bound = self.head
        self.tied.register_forward_hook(lambda module, args, output: output + module.bias[0])

    def head(self, hidden: Tensor) -> Tensor:
        return sum(head(hidden) for head in self.plain["heads"]) + self.offset

    def loss(self, batch: Any) -> Tensor:
        x = self.inner.net(batch["x"]) + self.tied(batch["x"]) + self.embedding(batch["row"] % 7)
        _, (hidden, _) = self.lstm(x[..., None])
        hidden = self.same(self.normed(hidden[-1]))
        return nn.functional.mse_loss(self.bound(hidden) * self.scale.mean(), batch["y"])


class FollowingTeacher(Base):
    """An average of weights is written behind autograd's back, and used in the loss."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(8, 1).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + nn.functional.mse_loss(
            self.net(batch["x"]), self.teacher(batch["x"])
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.teacher.weight.data.mul_(0.5).add_(self.net[0].weight.data[:1])


class Changing(Base):
    """Partly freezes itself, gets a new layer and a new factor while it trains."""

    factor = 1.0

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.factor

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.factor = 0.5
            self.net[0].requires_grad_(False)
            with torch.random.fork_rng([]):
                torch.manual_seed(9)
                self.net[1] = nn.Sequential(nn.Tanh(), nn.Linear(16, 16))
            self.net[1].to(self.device, self.dtype)
            for optimizer in self.trainer.optimizers:
                optimizer.add_param_group({"params": list(self.net[1].parameters())})


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Replaced(Base):
    """Layers get another class once the sanity check has made copies of them."""

    def on_train_start(self) -> None:
        self.net[0].__class__ = Twice
        nn.utils.parametrizations.weight_norm(self.net[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


class Recomputing(Base):
    """Activations are computed again in the backward pass."""

    def loss(self, batch: Any) -> Tensor:
        y = checkpoint(self.net, batch["x"], use_reentrant=False)
        return nn.functional.mse_loss(y, batch["y"])


class Choosing(Base):
    """A replica may have no loss, and in the second step none has one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keep = batch["row"] % 4 != 0
        if batch_idx == 1 or not keep.any():
            return None
        return self.loss({k: v[keep] for k, v in batch.items()})


class Lbfgs(Base):
    """An optimizer that asks for several closures in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3)


class TestWeights:
    @pytest.mark.parametrize(
        ("make", "devices"),
        [
            *((Base, devices) for devices in (2, 3, 4, SIDE_BY_SIDE)),
            *itertools.product(
                (Zoo, FollowingTeacher, Changing, Recomputing, Lbfgs), (3, SIDE_BY_SIDE)
            ),
            (Replaced, SIDE_BY_SIDE),
            (Choosing, 4),
        ],
        ids=lambda value: getattr(value, "__name__", str(value)),
    )
    def test_weights_are_those_of_one_device(
        self, tmp_path: Path, make: Callable[[], Base], devices: Any
    ) -> None:
        found, expected = make(), make()
        trainer = fit_dp(tmp_path, found, devices, max_epochs=2)
        reference = fit_one(tmp_path, expected, max_epochs=2)
        torch.testing.assert_close(weights(found), weights(expected), **EXACT)
        metrics, wanted = trainer.callback_metrics, reference.callback_metrics
        torch.testing.assert_close(metrics["val_loss"], wanted["val_loss"], **EXACT)
        assert not torch.allclose(weights(found), weights_before(make, found), rtol=1e-2)

    @needs_ema
    def test_averaged_weights_validate_and_are_those_of_one_device(self, tmp_path: Path) -> None:
        values = []
        for fit in (fit_dp, fit_one):
            module = Base()
            trainer = fit(tmp_path, module, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.7)])
            values.append((weights(module), trainer.callback_metrics["val_loss"]))
        torch.testing.assert_close(values[0], values[1], **EXACT)

    def test_module_keeps_its_own_attributes_while_replicas_compute(self, tmp_path: Path) -> None:
        class Counting(Base):
            def build(self) -> None:
                super().build()
                self.total = 0

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                outer["module"].total += 1
                return super().training_step(batch, batch_idx)

        outer = {"module": Counting()}
        fit_dp(tmp_path, outer["module"], ["cpu", "cpu", "cpu:1"])
        # A reference from elsewhere always leads to the module itself.
        assert outer["module"].total == 3 * STEPS

    def test_plain_dataloaders_are_divided_and_train_as_under_auto(self, tmp_path: Path) -> None:
        # The last batch has one row for three replicas.
        modules = []
        for strategy, devices in (("memmap_dp", 3), ("auto", 1)):
            module = Base()
            trainer = make_trainer(
                tmp_path, strategy=strategy, devices=devices, precision="64-true"
            )
            trainer.fit(module, DataLoader(TRAIN, 11), DataLoader(VAL, 11))
            modules.append(module)
        torch.testing.assert_close(weights(modules[0]), weights(modules[1]), **EXACT)


def weights_before(make: Callable[[], Base], trained: Base) -> Tensor:
    """The weights that a module began with, in the order and number of those it has now."""
    before = dict(make().named_parameters())
    return torch.cat(
        [
            before.get(name, torch.zeros_like(parameter)).detach().flatten().to(parameter.dtype)
            for name, parameter in trained.named_parameters()
        ]
    )


class TestRows:
    def test_each_replica_computes_on_the_shards_of_its_device(self, tmp_path: Path) -> None:
        module = Regression()
        fit_dp(tmp_path, module, 4, num_sanity_val_steps=0)
        assert len(module.seen["train"]) == STEPS * 4
        assert sorted(joined(module.seen["train"])) == list(range(89))
        for piece in module.seen["train"]:
            assert len({row % 4 for row in piece}) == 1
        for start in range(0, STEPS * 4, 4):
            step = module.seen["train"][start : start + 4]
            assert {piece[0] % 4 for piece in step} == {0, 1, 2, 3}

    def test_no_row_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise AssertionError("rows were put together")

        taken, used = [], []

        class Watching(Base):
            def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                taken.append({name: leaf.data_ptr() for name, leaf in batch.items()})
                return batch

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                used.append({name: leaf.data_ptr() for name, leaf in batch.items()})
                return super().training_step(batch, batch_idx)

        monkeypatch.setattr(SuperBatch, "to", refuse)
        monkeypatch.setattr(OutputMerger, "merge", refuse)
        fit_dp(tmp_path, Watching(), 4, precision="32-true", limit_val_batches=0)
        assert taken == used
        assert len(taken) == STEPS * 4

    @pytest.mark.parametrize("data", ["superbatch", "plain"])
    def test_rows_of_a_replica_lie_one_after_the_other(self, tmp_path: Path, data: str) -> None:
        class Viewing(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                assert all(leaf.is_contiguous() for leaf in batch.values())
                return nn.functional.mse_loss(self.net(batch["x"]).view(-1), batch["y"].view(-1))

        trainer = make_trainer(tmp_path, strategy="memmap_dp", devices=3)
        if data == "plain":
            trainer.fit(Viewing(), DataLoader(TRAIN, 24), DataLoader(VAL, 24))
        else:
            trainer.fit(Viewing(), datamodule=make_data(tmp_path, 8))
        assert trainer.global_step == STEPS + (data == "plain")

    def test_callbacks_read_the_whole_batch(self, tmp_path: Path) -> None:
        rows: list[list[int]] = []

        class Reader(L.Callback):
            def on_validation_batch_end(
                self, trainer: Any, module: Any, outputs: Any, batch: Any, *rest: Any
            ) -> None:
                assert set(batch.keys()) == {"row", "x", "y"}
                assert len(batch) == 3
                assert "x" in batch
                assert "z" not in batch
                torch.testing.assert_close(batch["x"].float(), VAL.x[batch["row"] - 100])
                rows.append(batch["row"].tolist())
                module.log("rows", float(len(batch["row"])), on_step=False, on_epoch=True)

            def on_validation_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
                module.log("rows_before", float(rest[0].num_rows), on_step=False, on_epoch=True)

        trainer = fit_dp(tmp_path, Base(), 4, callbacks=[Reader()], num_sanity_val_steps=0)
        assert joined(rows) == list(range(100, 131))
        sizes = [len(step) for step in rows]
        mean = sum(size * size for size in sizes) / sum(sizes)
        assert trainer.callback_metrics["rows"].item() == pytest.approx(mean)
        assert trainer.callback_metrics["rows_before"].item() == pytest.approx(mean)

    def test_batch_of_one_device_is_the_batch(self, tmp_path: Path) -> None:
        kinds = set[type]()

        class Reader(L.Callback):
            def on_train_batch_end(
                self, trainer: Any, module: Any, outputs: Any, batch: Any, *rest: Any
            ) -> None:
                assert "x" in batch
                kinds.add(type(batch))

        fit_dp(tmp_path, Base(), 1, callbacks=[Reader()])
        assert kinds == {dict}


class TestState:
    def test_replica_knows_its_device(self, tmp_path: Path) -> None:
        devices: list[torch.device] = []

        class Asking(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                devices.append(self.device)
                return super().training_step(batch, batch_idx)

        fit_dp(tmp_path, Asking(), SIDE_BY_SIDE)
        assert Counter(devices) == dict.fromkeys(map(torch.device, SIDE_BY_SIDE), STEPS)

    def test_running_statistics_are_those_of_replica_0(self, tmp_path: Path) -> None:
        class Normed(Base):
            def build(self) -> None:
                self.net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
                self.pieces: list[Tensor] = []

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.pieces.append(batch["x"])
                return super().training_step(batch, batch_idx)

        module = Normed()
        trainer = fit_dp(tmp_path, module, 4)
        expected = nn.BatchNorm1d(8).double()
        for piece in module.pieces[::4]:
            expected(piece)
        torch.testing.assert_close(module.net[0].running_mean, expected.running_mean, **EXACT)
        torch.testing.assert_close(module.net[0].running_var, expected.running_var, **EXACT)
        # All replicas validate with them.
        with torch.no_grad():
            loss = nn.functional.mse_loss(module.eval().net(VAL.x.double()), VAL.y.double())
        assert trainer.callback_metrics["val_loss"].item() == pytest.approx(loss.item(), rel=1e-9)

    @pytest.mark.parametrize("devices", [["cpu"] * 3, SIDE_BY_SIDE[:3]], ids=str)
    def test_replicas_begin_each_step_as_replica_0_is(
        self, tmp_path: Path, devices: list[str]
    ) -> None:
        class Keeping(Base):
            steps = 0

            def build(self) -> None:
                super().build()
                self.register_buffer("assigned", torch.zeros(()))
                self.register_buffer("added", torch.zeros(()))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                assert self.steps == self.assigned == self.added == self.trainer.global_step
                self.steps += 1
                self.assigned = self.assigned + 1
                self.added += 1
                self.ends.append(int(batch["row"][0]))
                return super().training_step(batch, batch_idx)

            def on_train_epoch_start(self) -> None:
                self.ends: list[int] = []

        # Batches of 4, 4 and 1 rows: replicas without rows follow too.
        data = DataLoader(Points(9), 4)
        strategy = DataParallelStrategy(devices)
        trainer = make_trainer(tmp_path, strategy=strategy, max_epochs=2, limit_val_batches=0)
        module = Keeping()
        trainer.fit(module, data, data)
        assert module.steps == module.assigned == module.added == 6
        # A list is one object for all.
        assert module.ends == [0, 1, 2, 4, 5, 6, 8]

    @pytest.mark.parametrize("stage", ["train", "validation"])
    def test_replicas_follow_what_hooks_assign_between_steps(
        self, tmp_path: Path, stage: str
    ) -> None:
        class Following(Base):
            def build(self) -> None:
                super().build()
                self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)
                self.heads = nn.ModuleList([self.first, self.second])
                self.register_buffer("count", torch.zeros(()))
                self.index, self.head = -1, self.heads[0]
                self.both = [*self.heads]

            def begin(self, batch_idx: int) -> None:
                self.count += 1
                self.index, self.head = batch_idx, self.heads[batch_idx % 2]

            def check(self, batch_idx: int) -> None:
                assert self.index == batch_idx
                assert self.count == batch_idx + 1
                assert self.head is self.heads[batch_idx % 2] is self.both[batch_idx % 2]
                # What a replica does to its own is of no account.
                self.count += 5
                self.index = -7

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if stage == "train":
                    self.begin(batch_idx)

            def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
                if stage == "validation":
                    self.begin(batch_idx)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.count.fill_(batch_idx + 1 if stage == "train" else 0)

            def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.count.fill_(batch_idx + 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if stage == "train":
                    self.check(batch_idx)
                return self.loss(batch)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                if stage == "validation":
                    self.check(batch_idx)

        fit_dp(tmp_path, Following(), 3, num_sanity_val_steps=0)

    @pytest.mark.parametrize("devices", [2, SIDE_BY_SIDE], ids=str)
    def test_compiled_module_is_fitted_again(self, tmp_path: Path, devices: Any) -> None:
        class Quiet(Base):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.loss(batch)

        found, expected = Quiet(), Quiet()
        compiled = torch.compile(found, backend="eager")  # type: ignore[arg-type]
        for _ in range(2):
            fit_dp(tmp_path, compiled, devices, max_epochs=1)
            fit_one(tmp_path, expected, max_epochs=1)
        torch._dynamo.reset()
        torch.testing.assert_close(weights(found), weights(expected), **EXACT)


class Counted(Base):
    """Logs numbers and metrics in all ways."""

    def build(self) -> None:
        super().build()
        self.squared = MeanSquaredError()
        self.several = MetricCollection(
            {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}
        )
        self.rank = SpearmanCorrCoef()
        self.largest = MaxMetric()
        self.average = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y, rows = self.net(batch["x"]), batch["row"].to(self.dtype)
        loss = nn.functional.mse_loss(y, batch["y"])
        count = len(rows)
        self.log("mean", rows.mean(), on_step=True, on_epoch=True)
        self.log("sum", rows.sum(), on_epoch=True, reduce_fx="sum")
        self.log("max", rows.max(), on_epoch=True, reduce_fx=torch.max)
        self.log("min", rows.min(), on_epoch=True, reduce_fx="min", batch_size=count)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=count)
        self.squared(y, batch["y"])
        self.log("squared", self.squared, on_step=True, on_epoch=True)
        self.several(y, batch["y"])
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.rank.update(y.flatten(), batch["y"].flatten())
        self.log("rank", self.rank, on_step=False, on_epoch=True)
        self.largest.update(rows.max())
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.average(rows)
        self.log("average", self.average, on_step=True, on_epoch=True)
        return loss

    def log(self, name: str, *arguments: Any, **options: Any) -> None:
        super().log(f"{name}.own", *arguments, **options)


class TestLogs:
    @pytest.mark.parametrize("devices", [4, SIDE_BY_SIDE], ids=str)
    def test_logs_and_metrics_are_those_of_one_device(self, tmp_path: Path, devices: Any) -> None:
        values = {}
        for key in ("one", "dp"):
            logger = CSVLogger(tmp_path, name=key)
            options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2}
            if key == "one":
                trainer = fit_one(tmp_path, Counted(), **options)
            else:
                trainer = fit_dp(tmp_path, Counted(), devices, **options)
            lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
            values[key] = [line.split(",") for line in lines]
            values[f"{key} last"] = [
                [name, str(value.item())]
                for name, value in sorted(trainer.callback_metrics.items())
            ]
        assert len(values["one"]) == 1 + 2 * (STEPS + 2)
        for name in (
            "squared.own_step",
            "rank.own",
            "largest.own",
            "sum.own_epoch",
            "rmse.own_step",
        ):
            assert name in values["one"][0]
        assert_alike(values["dp"], values["one"])
        assert_alike(values["dp last"], values["one last"])

    def test_replicas_that_log_other_names_are_merged(self, tmp_path: Path) -> None:
        class Uneven(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if 0 in batch["row"]:
                    self.log("zero", 1.0, reduce_fx="sum")
                return super().training_step(batch, batch_idx)

        trainer = fit_dp(tmp_path, Uneven(), 4)
        assert trainer.callback_metrics["zero"].item() == 1.0


def assert_alike(found: list[list[str]], expected: list[list[str]]) -> None:
    """Tables are equal, numbers up to their rounding."""
    assert len(found) == len(expected)
    for found_row, expected_row in zip(found, expected, strict=True):
        for text, wanted in zip(found_row, expected_row, strict=True):
            try:
                number = float(wanted)
            except ValueError:
                assert text == wanted
            else:
                # Lightning and torchmetrics count in float32.
                assert float(text) == pytest.approx(number, rel=1e-5)


class TestOutputs:
    def test_module_without_parameters_predicts(self, tmp_path: Path) -> None:
        class Doubling(L.LightningModule):
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return batch["row"] * 2

        trainer = make_trainer(tmp_path, strategy="memmap_dp", devices=4)
        predictions: Any = trainer.predict(Doubling(), datamodule=make_data(tmp_path, 6))
        assert torch.equal(torch.cat(predictions), 2 * torch.arange(100, 131))

    @pytest.mark.parametrize("output", [{"other": 1.0}, 3.5])
    def test_output_that_lightning_rejects_is_rejected(self, tmp_path: Path, output: Any) -> None:
        class Returning(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return output if self.device.index else self.loss(batch)

        with pytest.raises(MisconfigurationException):
            fit_dp(tmp_path, Returning(), SIDE_BY_SIDE)

    @pytest.mark.parametrize("kind", [dict, MappingProxyType])
    def test_mapping_is_an_output_as_on_one_device(self, tmp_path: Path, kind: Any) -> None:
        class Returning(Base):
            def build(self) -> None:
                super().build()
                self.means: list[float] = []

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss, names = self.loss(batch), [str(int(row)) for row in batch["row"]]
                return kind({"loss": loss, "mean": loss.detach(), "names": names})

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                assert outputs["names"] == [str(row) for row in batch["row"].tolist()]
                assert not outputs["loss"].requires_grad
                self.means.append(outputs["mean"].item())

        found, expected = assert_trains_as_one(tmp_path, Returning)
        assert len(found.means) == STEPS
        assert found.means == pytest.approx(expected.means)

    def test_outputs_of_the_replicas_that_return_some_are_put_together(
        self, tmp_path: Path
    ) -> None:
        seen = []

        class Choosing(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if not self.device.index:
                    return None
                return {"loss": self.loss(batch), "replica": self.device.index}

            def on_train_batch_end(self, outputs: Any, *rest: Any) -> None:
                seen.append(outputs["replica"])

        fit_dp(tmp_path, Choosing(), SIDE_BY_SIDE)
        assert seen == [[None, 1, 2, 3]] * STEPS


def having(name: str, value: Any) -> Base:
    """A module with another attribute."""
    module = Base()
    setattr(module, name, value)
    return module


class TestErrors:
    @pytest.mark.parametrize("devices", [3, SIDE_BY_SIDE], ids=str)
    def test_step_of_a_scheduler_is_refused(self, tmp_path: Path, devices: Any) -> None:
        class Stepping(Base):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.scheduler.step()
                return self.loss(batch)

            def configure_optimizers(self) -> Any:
                optimizer = super().configure_optimizers()
                self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
                return [optimizer], [self.scheduler]

        with pytest.raises(RuntimeError, match="ExponentialLR"):
            fit_dp(tmp_path, Stepping(), devices)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")
    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: torch.compile(Base(), mode="reduce-overhead"), "CUDA graphs.* 4 devices"),
            (lambda: torch.compile(Base(), mode="max-autotune"), "CUDA graphs"),
            (lambda: torch.compile(Base(), options={"triton.cudagraphs": True}), "CUDA graphs"),
            (lambda: torch.compile(Base(), backend="cudagraphs"), "CUDA graphs"),
            (lambda: having("net", torch.compile(nn.Linear(8, 1), backend="eager")), "'net'"),
            (lambda: having("net", nn.LazyLinear(1)), "'net'"),
            (lambda: having("some", PearsonCorrCoef()), "'some' .*without a dist_reduce_fx"),
            (lambda: having("some", RunningMean(3)), "'some' .*a window of updates"),
            (lambda: having("automatic_optimization", False), "automatic_optimization=False"),
        ],
    )
    def test_module_that_cannot_be_replicated_is_refused(
        self, tmp_path: Path, make: Callable[[], Any], match: str
    ) -> None:
        module = make()
        with pytest.raises((ValueError, TypeError), match=match):
            fit_dp(tmp_path, module, SIDE_BY_SIDE, precision="32-true", enable_model_summary=False)

    def test_first_data_device_must_be_the_root_device(self, tmp_path: Path) -> None:
        strategy = DataParallelStrategy(["cpu:1", "cpu"])
        with pytest.raises(ValueError, match="data_devices"):
            make_trainer(tmp_path, strategy=strategy)


class Ahead(Base):
    """Notes at each step how many batches were made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [0]

    def transform(self, batch: Any) -> Any:
        self.made[-1] += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.made) == batch_idx + 1:
            self.made.append(self.made[-1])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cpu", "cpu:1", "cpu"]])
def test_prefetched_steps_are_made_ahead_and_are_the_same(
    tmp_path: Path, devices: list[str]
) -> None:
    found = []
    for prefetch in (0, 2):
        module = Ahead()
        trainer = make_trainer(
            tmp_path,
            strategy=DataParallelStrategy(devices),
            precision="64-true",
            max_epochs=1,
        )
        data = make_data(tmp_path, 8, transform=module.transform, prefetch=prefetch)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == STEPS
        # The transform runs on the batch of each device.
        assert module.made[:STEPS] == [3 * min(STEPS, n + 1 + prefetch) for n in range(STEPS)]
        found.append(weights(module))
    assert torch.equal(*found)
