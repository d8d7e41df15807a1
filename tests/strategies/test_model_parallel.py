"""What is particular to ``memmap_model_parallel``: stages, and what moves."""

import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies import LocalModelParallelStrategy
from lightning_memmap.strategies.model_parallel import balanced_bounds, cut_into_stages, move_stages
from tests.strategies.test_data_parallel import VAL, Base, Lbfgs, fit_one, make_data
from tests.support.models import make_trainer, weights
from tests.support.rows import CPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You called `self.log.*but have no logger configured"),
]
CPU_1, META = torch.device("cpu:1"), torch.device("meta")


def fit_stages(
    path: Path,
    module: Any,
    devices: int = 2,
    data_devices: Any = None,
    batch_size: int = 24,
    **options: Any,
) -> L.Trainer:
    """Train with a stage of the module on each logical device."""
    strategy = LocalModelParallelStrategy(data_devices=data_devices)
    trainer = make_trainer(
        path, strategy=strategy, devices=devices, **{"precision": "64-true", **options}
    )
    trainer.fit(module, datamodule=make_data(path, batch_size // len(strategy.data_devices)))
    return trainer


class Gan(Base):
    """Two players by hand, both in each step, with a schedule and toggled optimizers."""

    def build(self) -> None:
        super().build()
        self.other = nn.Linear(8, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            assert [p.requires_grad for p in self.other.parameters()] == [index == 1] * 2
            difference = self.net(batch["x"]) - self.other(batch["x"])
            loss = self.loss(batch) + (difference**2).mean() * (-0.1 if index else 1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.3)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        schedulers: Any = self.lr_schedulers()
        schedulers.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net, self.other)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.7)]


class Named(Base):
    """Gives its stages: modules that are called one by one, with several inputs and outputs."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(8))
        self.encoder = nn.LSTM(1, 6, batch_first=True)
        self.head = Head()

    def stages(self) -> list[nn.Module]:
        return [self.encoder, nn.Sequential(self.head)]

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"] * self.scale
        hidden, _ = self.encoder(x[..., None])
        return nn.functional.mse_loss(self.head(x, hidden=hidden)["y"], batch["y"])


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(14, 1)

    def forward(self, x: Tensor, *, hidden: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(torch.cat([x, hidden[:, -1]], 1))}


class Listed(Base):
    """Layers in a list, deep inside, called in a loop."""

    def build(self) -> None:
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
        self.head = nn.Linear(8, 1)

    def stages(self) -> Any:
        return self.body["blocks"]

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        blocks: Any = self.body["blocks"]
        for block in blocks:
            x = x + block(x).tanh()
        return nn.functional.mse_loss(self.head(x), batch["y"])


class Kept:
    """Counts the bytes that are kept for backward passes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        held = _Held(tensor)
        weakref.finalize(held, self._free, tensor.nbytes)
        return held

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_accumulation_keeps_the_activations_of_one_micro_batch(tmp_path: Path) -> None:
    found: list[tuple[Tensor, int]] = []
    for num in (1, 4):
        kept = Kept()

        class Watched(Base):
            def loss(self, batch: Any, kept: Kept = kept) -> Tensor:
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
                    return super().loss(batch)

        module = Watched()
        options = {"accumulate_grad_batches": num, "limit_train_batches": 2 * num}
        fit_stages(tmp_path, module, batch_size=24 // num, **options)
        found.append((weights(module), kept.most))
    (expected, most), (accumulated, fewer) = found
    torch.testing.assert_close(accumulated, expected, rtol=1e-9, atol=1e-12)
    assert fewer < most / 2


CASES = [
    (Base, {}),
    (Base, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    (Base, {"devices": 3, "data_devices": ["cpu", "cpu"]}),
    (Named, {}),
    (Listed, {"devices": 3}),
    (Lbfgs, {}),
    (Gan, {}),
]


@pytest.mark.parametrize(("make", "options"), CASES, ids=str)
def test_weights_and_logs_are_those_of_one_device(
    tmp_path: Path, make: Callable[[], Base], options: dict[str, Any]
) -> None:
    found, expected = make(), make()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    trainer = fit_stages(tmp_path, found, **options)
    own = ("devices", "data_devices")
    plain = {name: value for name, value in options.items() if name not in own}
    reference = fit_one(tmp_path, expected, **plain)
    exact: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(weights(found), weights(expected), **exact)
    assert not torch.allclose(weights(found), weights(make()).double(), rtol=1e-2)
    metrics, wanted = trainer.callback_metrics, reference.callback_metrics
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[name], value, **exact, msg=name)


class Copies(TorchDispatchMode):
    """Notes the devices that tensors are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[torch.device] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self.targets.append(kwargs["device"])
        return func(*args, **(kwargs or {}))


class TestPlaces:
    def test_stages_are_on_their_devices_and_the_rest_on_the_first(self) -> None:
        module = Listed()
        module.register_buffer("offset", torch.ones(3))
        parameters = dict(module.named_parameters())
        move_stages(module, cut_into_stages(module, [CPU, META]))
        assert dict(module.named_parameters()).keys() == parameters.keys()
        devices = {name: p.device.type for name, p in module.named_parameters()}
        assert {name for name, kind in devices.items() if kind == "meta"} == {
            f"body.blocks.{index}.{name}" for index in (2, 3) for name in ("weight", "bias")
        }
        assert module.device == module.offset.device == CPU
        assert len(module.body["blocks"]) == 4  # type: ignore[arg-type]

    def test_activations_move_where_a_stage_begins_and_rows_do_not(self, tmp_path: Path) -> None:
        class Watched(Base):
            def build(self) -> None:
                self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
                self.copies: list[list[torch.device]] = []

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                with Copies() as copies:
                    loss = self.loss(batch)
                self.copies.append(copies.targets)
                return loss

        module = Watched()
        trainer = make_trainer(tmp_path, strategy="memmap_model_parallel", devices=2)
        strategy: Any = trainer.strategy
        strategy.parallel_devices = [CPU, CPU_1]
        trainer.fit(module, datamodule=make_data(tmp_path, 12))
        # 8 * 8 weights weigh more than 8: the cut is after the first layer. Tensors on cpu:1 say
        # that they are on cpu, so that each layer of the second stage moves its input again.
        assert module.copies == [[CPU_1, CPU_1]] * 3
        with Copies() as copies:
            module.net(VAL.x)
        assert copies.targets == []

    def test_optimizer_states_stay_with_their_parameters(self, tmp_path: Path) -> None:
        module = Base()
        module.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        move_stages(module, cut_into_stages(module, [CPU, META]))
        strategy: Any = LocalModelParallelStrategy()
        optimizer = torch.optim.Adagrad(module.parameters())
        strategy.optimizers = [optimizer]
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["sum"] = torch.ones_like(values["sum"], device=CPU)
        strategy.parallel_devices = [CPU]
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})
        for parameter in module.parameters():
            assert optimizer.state[parameter]["sum"].device == parameter.device


def tie_stages(module: Base) -> None:
    module.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module.net[1].weight = module.net[0].weight


def tie_with_the_rest(module: Base) -> None:
    module.other = nn.Linear(8, 8)
    module.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module.net[1].weight = module.other.weight


def repeat_layer(module: Base) -> None:
    layer = nn.Linear(8, 8)
    module.net = nn.Sequential(layer, nn.Linear(8, 8), layer)


def give_stages(*indices: Any) -> Callable[[Base], None]:
    def change(module: Any) -> None:
        module.stages = lambda: [module.net[index] for index in indices]

    return change


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (tie_stages, r"net\.0\.weight \(stage 0\) and net\.1\.weight \(stage 1\)"),
            (tie_with_the_rest, r"net\.1\.weight \(stage 1\) and other\.weight \(outside"),
            (repeat_layer, r"net\.0\.weight \(stage 0\) and net\.0\.weight \(stage 1"),
            (lambda m: setattr(m, "more", nn.Sequential()), r"2 attributes .*'net', 'more'"),
            (lambda m: delattr(m, "net"), r"0 attributes"),
            (lambda m: setattr(m, "net", nn.Sequential(nn.Tanh())), "1 layers for 2 devices"),
            (give_stages(0), r"stages\(\) has 1 layers for 2 devices"),
            (give_stages(0, slice(0, 0)), r"stages\(\)"),
            (give_stages(), r"stages\(\) has 0 layers for"),
            (lambda m: setattr(m, "stages", lambda: ["net"]), r"stages\(\).* str"),
            (give_stages(slice(0, 3), 2), r"net\.2\.weight \(stage 0\)"),
            (
                lambda m: setattr(m, "stages", lambda: [m.net, nn.Tanh(), nn.Linear(1, 1)]),
                r"stages\(\)",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_module_that_cannot_be_cut_is_refused(
        self, tmp_path: Path, change: Any, match: str
    ) -> None:
        module = Base()
        change(module)
        with pytest.raises((ValueError, UnsuitableModuleError), match=match):
            fit_stages(tmp_path, module, precision="32-true")


@pytest.mark.parametrize("seed", range(20))
def test_balanced_bounds_have_the_smallest_largest_stage(seed: int) -> None:
    dice = random.Random(seed)
    loads = [dice.choice([0, 1, 5, 20, 100]) for _ in range(dice.randint(1, 9))]
    num_stages = dice.randint(1, len(loads))

    def largest(bounds: Sequence[int]) -> int:
        return max(sum(loads[a:b]) for a, b in itertools.pairwise(bounds))

    found = balanced_bounds(loads, num_stages)
    assert (found[0], found[-1], len(found)) == (0, len(loads), num_stages + 1)
    assert found == sorted(set(found))
    cuts = itertools.combinations(range(1, len(loads)), num_stages - 1)
    assert largest(found) == min(largest((0, *cut, len(loads))) for cut in cuts)
