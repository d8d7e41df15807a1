"""The whole step as a graph: all that can be seen of a run is as without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import SuperBatchStrategy
from tests.graphs import RecordedGraph
from tests.models import Manual, Points, Regression, TwoOptimizers, make_trainer, weights

#: Steps of an epoch: nine of 10 rows, and the last two, of 7 and 6.
TRAIN = Points(103)
VAL = Points(20, 500)


class Steps(Regression):
    """Logs and returns more than a loss; draws random numbers; normalises over the batch."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.make = make
        self.outputs: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.calls += 1
        output = self(batch["x"])
        loss = self.loss(output, batch)
        self.log("loss", loss, False, on_step=True, on_epoch=True, batch_size=len(output))
        self.log_dict(
            {"largest": output.max(), "rows": batch["row"].sum().float()}, reduce_fx="max"
        )
        return {"loss": loss, "row": batch["row"], "parts": {"y": output.detach()}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The batch is the one that the step was given, not one that the next step overwrites.
        assert torch.equal(outputs["row"], batch["row"])
        self.outputs += [outputs["loss"], outputs["row"], outputs["parts"]["y"]]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.02), fused=True, capturable=True)


def scheduled_adam(parameters: Any) -> Any:
    optimizer = adam(parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs that strategies make while the test runs."""
    made: list[RecordedGraph] = []

    def make(device: torch.device) -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr("lightning_memmap.strategies.superbatch.make_graph", make)
    return made


def fit(
    path: Path,
    module: L.LightningModule,
    cuda_graph: bool,
    checkpoint: Path | None = None,
    prefetch: int = 0,
    **options: Any,
) -> L.Trainer:
    data = MemmapDataModule(TRAIN, VAL, store_dir=path / "stores", batch_size=5)
    strategy = SuperBatchStrategy(cuda_graph=cuda_graph, prefetch=prefetch)
    trainer = make_trainer(path, strategy=strategy, devices=2, **options)
    torch.manual_seed(3)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=checkpoint is not None)
    return trainer


def written(trainer: L.Trainer) -> str:
    """All that was logged, step by step."""
    assert trainer.logger is not None
    assert trainer.logger.log_dir is not None
    return (Path(trainer.logger.log_dir) / "metrics.csv").read_text()


class TestRuns:
    # Lightning's monitor copies a learning rate that is a tensor so.
    @pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (sgd, {}),
            (adam, {"prefetch": 2}),
            (scheduled_adam, {}),
            (sgd, {"gradient_clip_val": 0.1}),
            (adam, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
            (scheduled_adam, {"precision": "bf16-mixed"}),
            (scheduled_adam, {"val_check_interval": 4}),
        ],
    )
    def test_run_with_a_graph_is_bitwise_as_without(
        self, tmp_path: Path, graphs: list[RecordedGraph], make: Any, options: dict[str, Any]
    ) -> None:
        modules, trainers = [], []
        for cuda_graph in (False, True):
            module = Steps(make)
            logger = CSVLogger(tmp_path, name=str(cuda_graph))
            monitor = LearningRateMonitor("step")
            trainers.append(
                fit(
                    tmp_path,
                    module,
                    cuda_graph,
                    max_epochs=3,
                    logger=logger,
                    log_every_n_steps=1,
                    callbacks=[monitor],
                    **options,
                )
            )
            modules.append(module)
        (graph,) = graphs
        eager, graphed = modules
        # Three steps before the capture; the last two of each epoch have other shapes.
        assert graph.counts == {"warm_up": 3, "capture": 1, "replay": 6 + 9 + 9}
        assert eager.calls == 33
        assert graphed.calls == 3 + 1 + 3 * 2
        assert torch.equal(weights(graphed), weights(eager))
        for name, buffer in eager.named_buffers():
            assert torch.equal(graphed.get_buffer(name), buffer)
        assert len(graphed.outputs) == len(eager.outputs) == 3 * 33
        for found, expected in zip(graphed.outputs, eager.outputs, strict=True):
            assert torch.equal(found, expected)
        assert written(trainers[1]) == written(trainers[0])
        first, second = (
            trainer.fit_loop.state_dict()["epoch_loop.automatic_optimization.optim_progress"]
            for trainer in trainers
        )
        assert first == second

    @pytest.mark.parametrize("saved_at", [2, 10, 13])
    @pytest.mark.parametrize(("saves", "resumes"), [(True, True), (True, False), (False, True)])
    def test_resume_with_or_without_a_graph_ends_with_the_same_weights(
        self,
        tmp_path: Path,
        graphs: list[RecordedGraph],
        saved_at: int,
        saves: bool,
        resumes: bool,
    ) -> None:
        class Save(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
                if trainer.global_step == saved_at:
                    trainer.save_checkpoint(tmp_path / "saved.ckpt")

        def make() -> Steps:
            module = Steps(scheduled_adam)
            module.net[3] = nn.Identity()  # What dropout draws is in no checkpoint.
            return module

        whole, resumed = make(), make()
        fit(tmp_path, whole, saves, max_epochs=2, callbacks=[Save()])
        fit(tmp_path, resumed, resumes, tmp_path / "saved.ckpt", max_epochs=2)
        assert torch.equal(weights(resumed), weights(whole))
        assert all(graph.counts["replay"] > 3 for graph in graphs)

    def test_generators_of_the_module_go_on_where_they_stand(
        self, tmp_path: Path, graphs: list[RecordedGraph]
    ) -> None:
        class Noisy(Steps):
            def __init__(self) -> None:
                super().__init__(adam)
                self.noise = torch.Generator().manual_seed(3)
                # Known by two names, and registered once.
                self.net[0].noise = self.noise

            def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
                noise = torch.rand(batch["x"].shape, generator=self.noise)
                return super().training_step({**batch, "x": batch["x"] + noise}, batch_idx)

        modules = [Noisy(), Noisy()]
        for cuda_graph, module in enumerate(modules):
            fit(tmp_path, module, bool(cuda_graph), max_epochs=2)
        # Otherwise a capture on a GPU fails.
        assert graphs[0].generators == [modules[1].noise]
        assert torch.equal(weights(modules[1]), weights(modules[0]))
        states = [module.noise.get_state() for module in modules]
        assert torch.equal(*states)

    def test_second_fit_has_a_graph_of_its_own(
        self, tmp_path: Path, graphs: list[RecordedGraph]
    ) -> None:
        runs = []
        for cuda_graph in (False, True):
            module = Steps(adam)
            trainer = fit(tmp_path, module, cuda_graph)
            trainer.validate(module, datamodule=trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
            runs.append(weights(module))
        assert torch.equal(*runs)
        assert [graph.counts["capture"] for graph in graphs] == [1, 0, 1]

    def test_parameter_gradients_are_those_of_the_last_step(
        self, tmp_path: Path, graphs: list[RecordedGraph]
    ) -> None:
        class Gradients(Steps):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.outputs += [p.grad.clone() for p in self.parameters() if p.grad is not None]

        eager, graphed = Gradients(sgd), Gradients(sgd)
        fit(tmp_path, eager, False, max_epochs=2)
        fit(tmp_path, graphed, True, max_epochs=2)
        assert len(graphed.outputs) == len(eager.outputs) == 22 * 6
        assert all(map(torch.equal, graphed.outputs, eager.outputs))


class NoneAfterSomeSteps(Steps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx < 3 else None


class Waits(Steps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if output["loss"].item() < 0:
            raise AssertionError
        return output


class LogsNumber(Steps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", 0.5)
        return super().training_step(batch, batch_idx)


class ReturnsNumber(Steps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "number": batch_idx}


class UpdatesMetric(Steps):
    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean(output["loss"])
        return output


class Hooked(Steps):
    def on_after_backward(self) -> None:
        """Would not be called."""


class StepsOptimizer(Steps):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class ChangesRate(Steps):
    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] *= 0.9


class MovesParameters(Steps):
    def on_train_batch_end(self, *args: Any) -> None:
        self.net[0].weight.data = self.net[0].weight.data.clone()


class HookedCallback(L.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        """Would not be called."""


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def plain_adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


def scheduled_sgd(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "options", "words"),
        [
            (Manual, {}, "automatic_optimization=False"),
            (TwoOptimizers, {}, "automatic_optimization=False"),
            (lambda: Steps(sgd), {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
            (
                lambda: Steps(sgd),
                {"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]},
                "accumulate_grad_batches",
            ),
            (lambda: Hooked(sgd), {}, r"Hooked\.on_after_backward is overridden"),
            (
                lambda: StepsOptimizer(sgd),
                {},
                r"StepsOptimizer\.optimizer_step is overridden.*on_train_batch_start",
            ),
            (
                lambda: Steps(sgd),
                {"callbacks": [HookedCallback()]},
                r"HookedCallback\.on_before_optimizer_step is overridden",
            ),
            (lambda: Steps(plain_sgd), {}, "SGD with fused=True"),
            (lambda: Steps(plain_adam), {}, "Adam must be made with capturable=True"),
            (lambda: Steps(lbfgs), {}, "LBFGS may compute on the CPU"),
            (lambda: Steps(scheduled_sgd), {}, r"SGD\(\.\.\., lr=torch.tensor\(0.05\)\)"),
        ],
    )
    def test_step_that_cannot_be_replayed_is_refused_at_set_up(
        self,
        tmp_path: Path,
        graphs: list[RecordedGraph],
        make: Callable[[], Any],
        options: dict[str, Any],
        words: str,
    ) -> None:
        module = make()
        with pytest.raises(ValueError, match=f"cuda_graph=True: .*{words}.*train without"):
            fit(tmp_path, module, True, **options)
        assert module.trainer.global_step == 0

    @pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
    @pytest.mark.parametrize(
        ("make", "words", "steps"),
        [
            (LogsNumber, r"self.log\('number', 0.5\).*log a tensor", 3),
            (ReturnsNumber, "returned 3 beside the loss.*return tensors", 4),
            (NoneAfterSomeSteps, "training_step returned None", 4),
            (UpdatesMetric, "updates the metric MeanMetric.*on_train_batch_end", 1),
            (ChangesRate, "lr of the optimizer has changed from 0.0.* make it a tensor", 4),
            (MovesParameters, "parameters have other memory", 4),
        ],
    )
    def test_step_that_turns_out_not_to_be_replayable_is_an_error(
        self,
        tmp_path: Path,
        graphs: list[RecordedGraph],
        make: Callable[[Any], Any],
        words: str,
        steps: int,
    ) -> None:
        module = make(sgd)
        with pytest.raises(ValueError, match=f"cuda_graph=True: .*{words}"):
            fit(tmp_path, module, True)
        assert module.trainer.global_step == steps

    def test_step_that_waits_for_the_device_is_an_error_with_the_way_out(
        self, tmp_path: Path, graphs: list[RecordedGraph]
    ) -> None:
        with pytest.raises(RuntimeError, match=r"could not be captured.*\.item\(\)") as error:
            fit(tmp_path, Waits(sgd), True)
        assert "stream is capturing" in str(error.value.__cause__)

    def test_half_precision_with_a_scaler_is_refused(
        self, tmp_path: Path, graphs: list[RecordedGraph]
    ) -> None:
        strategy = SuperBatchStrategy(cuda_graph=True)
        trainer = make_trainer(tmp_path, strategy=strategy)
        strategy.precision_plugin.scaler = object()  # type: ignore[attr-defined]
        data = MemmapDataModule(TRAIN, store_dir=tmp_path / "stores")
        with pytest.raises(ValueError, match="use precision='bf16-mixed'"):
            trainer.fit(Steps(sgd), datamodule=data)

    def test_graph_with_skipped_hooks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cuda_graph=True with skip_unused_hooks=True"):
            SuperBatchStrategy(cuda_graph=True, skip_unused_hooks=True)

    def test_graph_without_a_gpu_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="cuda_graph=True: the root device is cpu"):
            fit(tmp_path, Steps(sgd), True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [sgd, scheduled_adam])
def test_run_with_a_cuda_graph_is_as_without(tmp_path: Path, make: Any) -> None:
    runs = []
    for cuda_graph in (False, True):
        module = Steps(make)
        module.net[3] = nn.Identity()  # A graph draws other random numbers.
        data = MemmapDataModule(TRAIN, VAL, store_dir=tmp_path / "stores", batch_size=10)
        trainer = make_trainer(
            tmp_path,
            accelerator="gpu",
            strategy=SuperBatchStrategy(cuda_graph=cuda_graph),
            max_epochs=3,
        )
        trainer.fit(module, datamodule=data)
        runs.append((weights(module), torch.stack(module.outputs[::3]).cpu(), module.calls))
    (expected, losses, _), (found, found_losses, calls) = runs
    assert calls == 3 + 1 + 3 * 2
    # The same kernels in the same order, of which some may add up in another one.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-6)
