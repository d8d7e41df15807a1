"""Options of `FSDP2Strategy` that do not fit, and the units that it chooses."""

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_memmap.strategies import FSDP2Strategy
from lightning_memmap.strategies.sharding.units import default_units, without_shared
from tests.contract.strategies.test_fsdp2 import Block
from tests.support.models import make_trainer


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
        ({"min_unit_parameters": 0}, {}, "min_unit_parameters=0"),
        ({"replicate_size": 0}, {}, "replicate_size=0"),
        ({"replicate_size": 3}, {}, "replicate_size=3"),
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
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(tmp_path, strategy=FSDP2Strategy(**options), devices=4, **trainer_options)


@pytest.mark.parametrize("classes", ["Block", Block, ["Block", 3], [int]], ids=str)
def test_classes_that_are_no_list_of_classes_are_rejected(classes: Any) -> None:
    with pytest.raises(TypeError, match="wrap_classes"):
        FSDP2Strategy(wrap_classes=classes)


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
