"""Variants: their names, what they are made of, and why they cannot run."""

import re

import pytest

from lightning_memmap.compare.config import Variant, all_variants, parse_variants
from lightning_memmap.strategies import STRATEGIES


def test_parse_gives_the_variants_in_order() -> None:
    found = parse_variants("ddp, auto+workers3,memmap_superbatch,auto+ideal,auto+memmap")
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


def test_strategy_that_trains_several_models_is_no_variant() -> None:
    with pytest.raises(ValueError, match="'memmap_independent' trains several models"):
        parse_variants("auto,memmap_independent")


@pytest.mark.parametrize(
    ("text", "name"),
    [("auto,ddp,auto", "auto"), ("ddp,ddp+memmap", "ddp"), ("all,auto+ideal", "auto\\+ideal")],
)
def test_repeated_variant_is_refused(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"variants='.*': {name} "):
        parse_variants(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("auto+worker2", "auto+workers2"),
        ("auto+wokers12", "auto+workers12"),
        ("ddp+workers", "ddp+workers0"),
        ("auto+frist_epoch", "auto+first_epoch"),
        ("memmap_dpp+ideal", "memmap_dp+ideal"),
    ],
)
def test_misspelt_variant_suggests_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is unknown; did you mean {near!r}?")):
        parse_variants(text)
