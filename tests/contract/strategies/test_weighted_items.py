"""A loss that is a mean over items trains like plain PyTorch on one device with a large batch."""

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from tests.support.models import make_trainer, whole_parameters
from tests.support.processes import each_case, in_processes, launch
from tests.support.training import make_strategy

#: Steps of 12 rows, the last one of 11. Three at a time, the last is alone.
ROWS, GLOBAL_BATCH, STEPS, LENGTH = 83, 12, 7, 6


class Sentences(Dataset[dict[str, Any]]):
    """Rows of 0 to 6 tokens, in a field of that length, and padded with a count."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        count = row * 5 % (LENGTH + 1)
        x = torch.sin(torch.arange(LENGTH * 4).view(LENGTH, 4) * 0.7 + row)
        return {"row": row, "x": x, "count": count, "tokens": torch.arange(count)}


def count_in_batch(batch: dict[str, Any]) -> Tensor:
    """The items of each row, from what a batch has."""
    return (torch.arange(LENGTH) < batch["count"][:, None]).sum(1)


#: By the kind of a loss, the argument ``weight``.
WEIGHTS: dict[str, Any] = {
    "rows": None,
    "field": "count",
    "lengths": "tokens",
    "function": count_in_batch,
}


def make_data(path: Path, kind: str, devices: int, **options: Any) -> MemmapDataModule:
    """The sentences, in the same steps on any number of devices."""
    return MemmapDataModule(
        Sentences(),
        store_dir=path,
        batch_size=GLOBAL_BATCH // devices,
        num_shards=4,
        weight=WEIGHTS[kind],
        **options,
    )


class Sentiment(L.LightningModule):
    """Returns the mean over rows, or over tokens, of its own batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():
            for number, parameter in enumerate(self.net.parameters()):
                values = torch.sin(torch.arange(parameter.numel()) * 1.3 + number)
                parameter.copy_(values.view_as(parameter) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def stages(self) -> list[nn.Module]:
        return [self.net[:2], self.net[2]]

    def total(self, output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """The sum of the losses of all items of a batch, and their number."""
        errors = (output[..., 0] - torch.cos(batch["x"].sum(2))).square()
        if self.kind == "rows":
            return errors.mean(1).sum(), len(errors)
        is_token = torch.arange(LENGTH) < batch["count"][:, None]
        return (errors * is_token).sum(), is_token.sum()

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Tensor:
        total, number = self.total(output, batch)
        return total / max(1, number)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(self(batch["x"]), batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        raise AssertionError("limit_val_batches is 0")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def expected(
    path: Path, kind: str, accumulated: int, epochs: int = 2, clip: float | None = None
) -> dict[str, Tensor]:
    """The parameters after plain steps on the mean over all micro-batches of a group."""
    data = make_data(path, "rows", 1)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    module = Sentiment(kind)
    optimizer = module.configure_optimizers()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches = [*loader]
        assert len(batches) == STEPS
        for first in range(0, len(batches), accumulated):
            group = batches[first : first + accumulated]
            sums, numbers = zip(*(module.total(module(b["x"]), b) for b in group), strict=True)
            optimizer.zero_grad()
            (sum(sums) / sum(numbers)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return whole_parameters(module)


def cases() -> Iterator[tuple[str, int]]:
    """All kinds of losses, with and without accumulation."""
    yield from ((kind, accumulated) for kind in WEIGHTS for accumulated in (1, 3))


def run(
    out: Path,
    strategy: str,
    devices: int,
    data_devices: int | None = None,
    clip: float | None = None,
    strategy_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train in each case, and return the parameters."""
    results: dict[str, Any] = {}
    for kind, accumulated in cases():
        trainer = make_trainer(
            out,
            strategy=make_strategy(strategy, strategy_options),
            devices=devices,
            accumulate_grad_batches=accumulated,
            max_epochs=2,
            limit_val_batches=0,
            gradient_clip_val=clip,
        )
        module = Sentiment(kind)
        trainer.fit(module, make_data(out / "stores", kind, data_devices or devices))
        assert trainer.global_step == 2 * -(-STEPS // accumulated)
        results[f"{kind} {accumulated}"] = whole_parameters(module)
    return results


#: Steps of SGD move weights by about 0.3.
ATOL = 2e-6
CASES = [*cases()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parameters of plain PyTorch, by case."""
    path = tmp_path_factory.mktemp("plain")
    return cache(lambda *case, **options: expected(path, *case, **options))


def check(
    result: dict[str, Any], plain: Any, cases: Sequence[tuple[str, int]] = CASES, **options: Any
) -> None:
    """Compare the parameters of cases."""
    initial = dict(Sentiment("rows").named_parameters())
    for kind, accumulated in cases:
        right = plain(kind, accumulated, **options)
        found = result[f"{kind} {accumulated}"]
        assert found
        for name, parameter in found.items():
            assert (right[name] - initial[name]).abs().max() > 5e-3
            torch.testing.assert_close(
                parameter, right[name], rtol=0, atol=ATOL, msg=f"{kind} {accumulated} {name}"
            )


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("memmap_superbatch", 1),
        ("memmap_superbatch", 4),
        ("memmap_dp", 1),
        ("memmap_dp", 2),
        ("memmap_dp", 4),
        ("memmap_model_parallel", 2),
        ("memmap_independent", 1),
    ],
)
def test_step_of_one_process_is_the_mean_over_its_items(
    tmp_path: Path, plain: Any, strategy: str, devices: int, clip: float | None
) -> None:
    is_member = strategy == "memmap_independent"
    result = run(tmp_path, strategy, devices, 1 if is_member else None, clip=clip)
    check(result, plain, clip=clip)


IN_PROCESSES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("memmap_superbatch_ddp", {}),
        ("memmap_superbatch_ddp", {"clip": 0.2}),
        ("memmap_fsdp2", {}),
        ("memmap_fsdp2", {"clip": 0.2}),
        ("memmap_pipeline", {"data_devices": 1}),
    ],
    4: [
        ("memmap_superbatch_ddp", {}),
        ("memmap_fsdp2", {}),
        (
            "memmap_pipeline",
            {"data_devices": 2, "strategy_options": {"data_parallel_size": 2}},
        ),
    ],
}


def run_each(out: Path, number: int) -> dict[str, Any]:
    """Train under each strategy of so many processes."""
    return {
        str(case): run(out, strategy, number, **options)
        for case, (strategy, options) in each_case(IN_PROCESSES[number])
    }


@pytest.mark.parametrize("number", IN_PROCESSES)
def test_step_of_several_processes_is_the_mean_over_all_items(
    tmp_path: Path, plain: Any, number: int
) -> None:
    for rank in launch(run_each, tmp_path, processes=number, number=number):
        for case, (_, options) in enumerate(IN_PROCESSES[number]):
            check(rank[str(case)], plain, clip=options.get("clip"))


def loop(out: Path, devices: int) -> dict[str, Any]:
    """Train in a loop under Fabric, and return the parameters of each kind of loss."""
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    results: dict[str, Any] = {}
    for kind in WEIGHTS:
        data = make_data(out / "stores", kind, devices)
        data.use_fabric(fabric)
        data.prepare_data()
        data.setup("fit")
        loader: Any = fabric.setup_dataloaders(data.train_dataloader())
        module = Sentiment(kind)
        net, optimizer = fabric.setup(module.net, module.configure_optimizers())
        for _ in range(2):
            for batch in loader:
                loss = module.loss(net(batch["x"]), batch)
                optimizer.zero_grad()
                fabric.backward(loss * data.loss_scale())
                optimizer.step()
        results[f"{kind} 1"] = whole_parameters(module)
    return results


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_step_of_a_loop_under_fabric_is_the_mean_over_all_items(
    tmp_path: Path, plain: Any, processes: int
) -> None:
    for rank in launch(loop, tmp_path, processes=processes, devices=processes):
        check(rank, plain, cases=[(kind, 1) for kind in WEIGHTS])


def count_reminders(out: Path, devices: int, scales: bool) -> int:
    """Count the warnings about ``weight`` of a loop of three epochs under Fabric."""
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    data = make_data(out / "stores", next(kind for kind in WEIGHTS if kind != "rows"), devices)
    data.use_fabric(fabric)
    data.prepare_data()
    data.setup("fit")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = fabric.setup_dataloaders(data.train_dataloader())
        for _ in range(3):
            for _ in loader:
                if scales:
                    data.loss_scale()
    return sum("loss_scale" in str(warning.message) for warning in caught)


@in_processes(2)
def test_loop_under_fabric_without_loss_scale_is_warned_once(tmp_path: Path) -> None:
    assert count_reminders(tmp_path, 2, scales=False) == 1
    assert count_reminders(tmp_path, 2, scales=True) == 0


def test_loss_scale_without_a_batch_is_an_error(tmp_path: Path) -> None:
    data = make_data(tmp_path, "rows", 1)
    with pytest.raises(ValueError, match="loss_scale"):
        data.loss_scale()


def test_lightning_gives_the_last_group_another_weight(tmp_path: Path, plain: Any) -> None:
    # Otherwise these tests could not fail.
    trainer = make_trainer(tmp_path, accumulate_grad_batches=3, max_epochs=2, limit_val_batches=0)
    module = Sentiment("rows")
    trainer.fit(module, make_data(tmp_path / "stores", "rows", 1))
    right = plain("rows", 3)
    differences = [(right[name] - p).abs().max() for name, p in whole_parameters(module).items()]
    assert max(differences) > 1e-2


class Stop(Callback):
    """Saves a checkpoint after a batch, and stops."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path = path
        self.batch = batch

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("kind", ["rows", "field", "function"])
@pytest.mark.parametrize("batch", [1, 4, STEPS - 1])
@pytest.mark.parametrize(("strategy", "devices"), [("memmap_superbatch", 2), ("memmap_dp", 2)])
def test_fit_resumed_in_a_group_weights_it_whole(
    tmp_path: Path, strategy: str, devices: int, kind: str, batch: int
) -> None:
    results: list[dict[str, Tensor]] = []
    path = tmp_path / "some.ckpt"
    for callbacks, resumed in ([], None), ([Stop(path, batch)], None), ([], path):
        options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, "callbacks": callbacks}
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=devices, accumulate_grad_batches=3, **options
        )
        module = Sentiment(kind)
        trainer.fit(module, make_data(tmp_path / "stores", kind, devices), ckpt_path=resumed)
        results.append(whole_parameters(module))
    for name, value in results[0].items():
        assert torch.equal(results[2][name], value)
