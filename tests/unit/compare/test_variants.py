"""Variants: their names, what they are made of, and why they cannot run."""

import pytest

from lightning_memmap.compare.config import Variant, all_variants, parse_variants
from lightning_memmap.strategies import STRATEGIES


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
    assert {name for name, *_ in STRATEGIES} - {"memmap_independent"} <= strategies
    assert {"auto", "ddp", "fsdp", "model_parallel"} <= strategies


@pytest.mark.parametrize(
    "text", ["", " , ", "dpp", "ddp+", "ddp+workers", "ddp+workers-1", "memmap_independent", "all+"]
)
def test_parse_of_an_unknown_variant_says_what_is_known(text: str) -> None:
    with pytest.raises(ValueError, match="memmap_superbatch"):
        parse_variants(text)
