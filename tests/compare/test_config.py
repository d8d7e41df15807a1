"""Variants and the sections of a config that all of them share."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memmap.compare.config import Variant, all_variants, parse_variants, shared_config
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


def shared(folder: Path, config: object) -> Any:
    """What variants share of a config."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return shared_config(str(file))


def test_shared_config_keeps_what_all_variants_can_have(tmp_path: Path) -> None:
    config = {
        "seed_everything": 5,
        "model": {"class_path": "a.B"},
        "data": {"class_path": "c.D"},
        "ckpt_path": None,
        "trainer": {"precision": "bf16-mixed", "strategy": "ddp", "callbacks": [], "devices": 4},
    }
    sections, trainer, left_out = shared(tmp_path, config)
    assert sections == {name: config[name] for name in ("seed_everything", "model", "data")}
    assert trainer == {"precision": "bf16-mixed"}
    assert left_out == ["trainer.strategy", "trainer.callbacks", "trainer.devices", "ckpt_path"]
    assert shared(tmp_path, {"fit": config})[0] == sections


@pytest.mark.parametrize("seed", [True, False, None])
def test_seed_that_is_no_number_becomes_one(tmp_path: Path, seed: bool | None) -> None:
    config = {"seed_everything": seed, "model": {"a": 1}, "data": {"b": 1}}
    assert shared(tmp_path, config)[0]["seed_everything"] == 0


@pytest.mark.parametrize("config", [None, [], {"model": {}}, {"model": {"class_path": "a.B"}}])
def test_config_without_model_or_data_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(ValueError, match="has no section"):
        shared(tmp_path, config)
