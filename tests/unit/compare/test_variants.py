"""Variants: their names, what they are made of, and why they cannot run."""

import pytest

from lightning_memmap.compare.config import Variant, all_variants, parse_variants
from lightning_memmap.strategies import STRATEGIES

CPU = ("cpu", 2)
PLAIN, OWN_LAYOUT = False, True


def test_parse_gives_the_variants_in_order_and_once() -> None:
    found = parse_variants("ddp, auto+workers3,memmap_superbatch,auto+ideal,ddp,auto+memmap")
    assert found == (
        Variant("ddp"),
        Variant("auto", "workers3"),
        Variant("memmap_superbatch"),
        Variant("auto", "ideal"),
        Variant("auto"),
    )


@pytest.mark.parametrize("variant", all_variants())
def test_name_of_a_variant_parses_to_it(variant: Variant) -> None:
    assert parse_variants(variant.name) == (variant,)


def test_all_has_every_strategy_of_the_pack() -> None:
    strategies = {variant.strategy for variant in parse_variants("all")}
    assert {name for name, *_ in STRATEGIES} <= strategies
    assert {"auto", "ddp", "fsdp", "model_parallel"} <= strategies


@pytest.mark.parametrize("text", ["", " , ", "dpp", "ddp+", "ddp+workers", "ddp+workers-1", "all+"])
def test_parse_of_an_unknown_variant_says_what_is_known(text: str) -> None:
    with pytest.raises(ValueError, match="memmap_superbatch"):
        parse_variants(text)


@pytest.mark.parametrize(
    ("name", "machine", "configures_itself", "reason"),
    [
        ("auto", CPU, PLAIN, ""),
        ("memmap_superbatch", CPU, PLAIN, ""),
        ("ddp", CPU, PLAIN, ""),
        ("fsdp", CPU, PLAIN, "GPUs"),
        ("fsdp", ("cuda", 2), PLAIN, ""),
        ("ddp", ("cuda", 1), PLAIN, "needs 2 cuda devices; there are 1"),
        ("auto", ("cuda", 1), PLAIN, ""),
        ("auto", ("cuda", 0), PLAIN, "needs 1 cuda devices; there are 0"),
        ("model_parallel", CPU, PLAIN, "configure_model"),
        ("model_parallel", CPU, OWN_LAYOUT, ""),
    ],
)
def test_reason_says_what_is_missing(
    name: str, machine: tuple[str, int], configures_itself: bool, reason: str
) -> None:
    (variant,) = parse_variants(name)
    found = variant.unsupported_reason(*machine, 2, configures_itself)
    assert bool(found) == bool(reason)
    assert reason in found


def test_several_models_and_replayed_batches_are_not_compared() -> None:
    found = [each.name for each in all_variants() if not each.is_compared]
    assert found == ["auto+ideal", "memmap_independent"]
