"""Modules on the meta device get the values that their construction would give them, or raise."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies.common.meta_device import MetaInitializer, post_order
from tests.support.rows import CPU

pytestmark = pytest.mark.slow


class Scale(nn.Module):
    """Multiplies by a parameter, as RMSNorm without `reset_parameters` does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Resettable(Scale):
    """Has a buffer of integers, and replaces its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        assert isinstance(self.count, Tensor)
        self.count.zero_().add_(5)


class Net(L.LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)


class Initialised(Net):
    """Draws its weights in a way of its own, as models of Hugging Face do."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                module.bias.data.fill_(0.5)
        elif isinstance(module, Scale):
            module.scale.data.fill_(3.0)
        # The parent of a layer, which draws it again.
        elif isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear):
            module[0].weight.data.mul_(10)


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def initialised(module: Any) -> Any:
    """The module, initialised as a strategy does."""
    initializer = MetaInitializer(module)
    for child in dict.fromkeys(post_order(module)):
        initializer.initialize(child, CPU)
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    return module


def plain() -> Net:
    return Net(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Embedding(5, 4, padding_idx=1),
        nn.LSTM(4, 4, num_layers=2),
        nn.LayerNorm(4),
        nn.Conv1d(2, 2, 3),
        Resettable(),
    )


@pytest.mark.parametrize(
    "make", [plain, lambda: Initialised(nn.Linear(4, 4), nn.Linear(4, 4), Scale())]
)
def test_values_are_those_of_the_constructor(make: Callable[[], Net]) -> None:
    torch.manual_seed(3)
    eager = make().state_dict()
    module = on_meta(make)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    initializer = MetaInitializer(module)
    # So far nothing has changed.
    assert torch.equal(before, torch.get_rng_state())
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    del initializer
    found = initialised(module).state_dict()
    assert found.keys() == eager.keys()
    if make is plain:
        assert all(torch.equal(found[name], value) for name, value in eager.items())
    else:
        # Random numbers come in another order.
        assert found["net.0.weight"].std() == pytest.approx(0.2, rel=0.5)
        assert found["net.1.weight"].std() == pytest.approx(0.02, rel=0.5)
        assert found["net.1.bias"].tolist() == [0.5] * 4
        assert found["net.2.scale"].tolist() == [3.0] * 4


def test_loaded_values_stay_beside_those_that_are_initialised() -> None:
    module = Initialised(nn.Linear(4, 4), on_meta(lambda: nn.Linear(4, 4)), nn.Linear(4, 4))
    module.net[1].bias = nn.Parameter(torch.full((4,), 7.0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    found = initialised(module)
    for name, value in before.items():
        if not value.is_meta:
            assert torch.equal(found.state_dict()[name], value), name
            assert found.get_parameter(name) is parameters[name]
    assert 0 < found.net[1].weight.abs().max() < 0.2


def test_integers_and_requires_grad_are_kept() -> None:
    def make() -> Net:
        module = Net(nn.Linear(4, 4), nn.Embedding(3, 2))
        module.net[0].weight.requires_grad_(False)
        return module

    found = initialised(on_meta(make).bfloat16())
    assert found.net[0].weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in found.parameters()] == [False, True, True]


def zeroed() -> Net:
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    return Net(nn.Linear(4, 4), layer)


def with_loaded_weights() -> Net:
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    return Net(layer)


class Adapted(nn.Module):
    """A layer of peft."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]


def moved() -> Net:
    """As peft does for a base model on the meta device."""
    return Initialised(Adapted()).to("meta")


def tied() -> Net:
    """Which of the two initialises the weight of both?"""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return Net(first, second)


def tied_to_scale() -> Net:
    first, second = nn.LayerNorm(4, bias=False), Scale()
    second.scale = first.weight
    return Net(first, second)


class Twice(Net):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.apply(self._init_weights)
        nn.init.constant_(self.net[0].weight, 0.5)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class OtherSignature(Net):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.net[0].weight)  # type: ignore[arg-type]


class Unset(Scale):
    def reset_parameters(self) -> None:
        """Does nothing."""


class Fails(Scale):
    def reset_parameters(self) -> None:
        assert self.scale.sum().item() > 0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Net(nn.Linear(4, 4), Scale()), r"net.1 \(Scale\): scale"),
        (lambda: Net(Unset()), r"net.0 \(Unset\): scale"),
        (lambda: Net(Fails()), r"net.0 \(Fails\)"),
        (lambda: Net(nn.MultiheadAttention(4, 2)), r"\(MultiheadAttention\): in_proj_weight"),
        (zeroed, r"net.1 \(Linear\): weight"),
        (with_loaded_weights, r"net.0 \(Linear\): weight"),
        (Twice, r"net.0 \(Linear\): weight"),
        (OtherSignature, r"net.0 \(Linear\): weight"),
        (lambda: Net(Adapted()), r"lora_A.default \(Linear\): weight"),
        (moved, r"lora_A.default \(Linear\): weight"),
        (tied, r"net.0 \(Linear\): weight; net.1 \(Linear\): weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_values_that_would_be_lost_raise_and_leave_the_module(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Net], name: str
) -> None:
    # Lightning's demos, if another test has imported them, add this method to torch's class.
    monkeypatch.delattr(nn.MultiheadAttention, "reset_parameters", raising=False)
    module = on_meta(make)
    with pytest.raises(UnsuitableModuleError, match=name):
        MetaInitializer(module)
    assert all(tensor.is_meta for tensor in module.state_dict().values())


def test_tensors_that_one_of_two_modules_initialises_stay_tied() -> None:
    module = on_meta(tied_to_scale)
    parameter = module.net[1].scale
    found = initialised(module)
    assert found.net[0].weight is found.net[1].scale is parameter
    assert parameter.tolist() == [1.0] * 4


@pytest.mark.parametrize("make", [zeroed, moved, tied, lambda: Net(nn.Linear(4, 4), Scale())])
def test_checkpoint_may_bring_all_values(make: Callable[[], Net]) -> None:
    module: Any = on_meta(make)
    module._trainer = SimpleNamespace(ckpt_path="last.ckpt")
    initialised(module)
    if isinstance(module.net[-1], Scale):
        # Nothing has set it.
        assert module.net[1].scale.isnan().all()


def test_checkpoint_without_a_parameter_does_not_bring_it() -> None:
    module: Any = on_meta(zeroed)
    module._trainer = SimpleNamespace(ckpt_path="last.ckpt")
    with pytest.raises(UnsuitableModuleError, match=r"net.1 \(Linear\): weight"):
        MetaInitializer(module, not_loaded=["net.1.weight"])


def test_checkpoint_does_not_bring_buffers_that_are_not_saved() -> None:
    def make() -> Any:
        layer = nn.Linear(4, 4)
        layer.register_buffer("table", torch.ones(3), persistent=False)
        return Net(layer)

    module: Any = on_meta(make)
    module._trainer = SimpleNamespace(ckpt_path="last.ckpt")
    with pytest.raises(UnsuitableModuleError, match=r"net.0 \(Linear\): table"):
        MetaInitializer(module)
