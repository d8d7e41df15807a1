"""Arms: their names, what they are made of, and why they cannot run."""

import pytest
from lightning_memmap.compare.arms import (
    Arm,
    Feed,
    Machine,
    ModelFacts,
    every_arm,
    parse_arms,
)

from lightning_memmap.strategies import STRATEGIES

CPU = Machine("cpu", 2)
PLAIN, OWN_LAYOUT = ModelFacts(configures_itself=False), ModelFacts(configures_itself=True)


def test_parse_gives_the_arms_in_order_and_once() -> None:
    found = parse_arms("ddp, auto+workers3,memmap_superbatch,auto+ideal,ddp,auto+memmap")
    assert found == (
        Arm("ddp"),
        Arm("auto", Feed("dataloader", 3)),
        Arm("memmap_superbatch"),
        Arm("auto", Feed("ideal")),
        Arm("auto"),
    )


@pytest.mark.parametrize("arm", every_arm())
def test_name_of_an_arm_parses_to_the_arm(arm: Arm) -> None:
    assert parse_arms(arm.name) == (arm,)
    assert arm.description


def test_all_has_every_strategy_of_the_pack() -> None:
    strategies = {arm.strategy for arm in parse_arms("all")}
    assert {name for name, *_ in STRATEGIES} <= strategies
    assert {"auto", "ddp", "fsdp", "model_parallel"} <= strategies


@pytest.mark.parametrize("text", ["", " , ", "dpp", "ddp+", "ddp+workers", "ddp+workers-1", "all+"])
def test_parse_of_what_is_no_arm_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="memmap_superbatch"):
        parse_arms(text)


@pytest.mark.parametrize(
    ("name", "machine", "model", "reason"),
    [
        ("auto", CPU, PLAIN, None),
        ("memmap_superbatch", CPU, PLAIN, None),
        ("ddp", CPU, PLAIN, None),
        ("fsdp", CPU, PLAIN, "GPUs"),
        ("fsdp", Machine("cuda", 2), PLAIN, None),
        ("ddp", Machine("cuda", 1), PLAIN, "needs 2 cuda devices; there are 1"),
        ("auto", Machine("cuda", 1), PLAIN, None),
        ("auto", Machine("cuda", 0), PLAIN, "needs 1 cuda devices; there are 0"),
        ("model_parallel", CPU, PLAIN, "configure_model"),
        ("model_parallel", CPU, OWN_LAYOUT, None),
    ],
)
def test_obstacle_says_what_is_missing(
    name: str, machine: Machine, model: ModelFacts, reason: str | None
) -> None:
    (arm,) = parse_arms(name)
    found = arm.obstacle(machine, 2, model)
    assert found is None if reason is None else found is not None and reason in found


def test_devices_of_an_arm_are_those_of_the_comparison_or_one() -> None:
    assert Arm("auto").trainer_options(4) == {"strategy": "auto", "devices": 1, "num_nodes": 1}
    assert Arm("ddp").trainer_options(4)["devices"] == 4
    options = Arm("model_parallel").trainer_options(4)
    assert options["strategy"]["init_args"]["data_parallel_size"] == 4


def test_ideal_feed_is_not_compared() -> None:
    assert Arm("ddp").is_compared
    assert Arm("auto", Feed("dataloader", 2)).is_compared
    assert not Arm("ddp", Feed("ideal")).is_compared
