"""Runs of variants, in this process: what they measure and what they find."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_memmap.compare.figures import FIGURES, compute_figures
from lightning_memmap.compare.parity import Parity
from lightning_memmap.compare.prepare import ModelAndData
from tests.compare import runs
from tests.compare.runs import (
    PARAMETERS,
    ROW_BYTES,
    ROWS,
    check_all_parity,
    config,
    facts_of,
    make_spec,
    run,
    timed_rank,
)
from tests.compare.test_parity_faults import Taught
from tests.support.models import Regression

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_runs"),
    # LightningCLI calls what jsonargparse has renamed.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

VARIANTS = ("auto", "auto+workers0", "memmap_superbatch")


def compare(
    path: Path, variants: tuple[str, ...], sections: dict[str, Any], **options: Any
) -> tuple[dict[str, Parity], dict[str, Any]]:
    """The parity of variants with the first of them."""
    facts = facts_of(sections)
    options["transform_is_random"] = facts["data"]["transform_is_random"]
    checks = {
        variant: run(make_spec(path, "check", variant, sections, **options)) for variant in variants
    }
    return check_all_parity(checks, facts["expected"]), facts


@pytest.mark.filterwarnings("ignore:the train rows are in 24 shards")
def test_devices_that_do_not_divide_the_shards_have_the_order_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DEVICES", 5)
    monkeypatch.setattr(runs, "NUM_SHARDS", 25)
    parities, facts = compare(tmp_path, (*VARIANTS, "memmap_dp"), config(tmp_path))
    assert facts["data"]["num_shards"] == 25
    with pytest.raises(ValueError, match=r"first_epoch: .* 24 shards"):
        run(make_spec(tmp_path, "check", "memmap_superbatch+first_epoch", config(tmp_path)))
    assert not any(parity.problems for parity in parities.values())


def test_batches_of_one_set_each_are_those_of_the_devices(tmp_path: Path) -> None:
    dataset = {"class_path": "tests.support.models.Points", "init_args": {"num_rows": 90}}
    shares = {"init_args": {"shares": {"a": 0.7, "b": 0.3}, "by_batch": True}}
    sections = config(
        tmp_path,
        train_dataset={"a": dataset, "b": dataset},
        sampler={"class_path": "lightning_memmap.sampling.Mixture", **shares},
    )
    before = json.dumps(sections)
    parities, _ = compare(tmp_path, VARIANTS, sections)
    assert not any(parity.problems for parity in parities.values())
    # It goes to the processes of each run.
    assert json.dumps(sections) == before


class Derived(Regression):
    """Saves what it is made with."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_are_those_of_a_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = config(tmp_path, f"{__name__}.Derived")
    monkeypatch.setattr("sys.argv", ["fit"])
    made = LightningCLI(args={**sections, "trainer": {"logger": False}}, run=False)
    assert dict(ModelAndData(sections).model.hparams) == dict(made.model.hparams)


def test_random_transform_and_dropout_are_taken_out_of_a_check(tmp_path: Path) -> None:
    transforms = {
        "transform": {"class_path": f"{runs.__name__}.Jitter"},
        "eval_transform": {"class_path": f"{runs.__name__}.Double"},
    }
    sections = config(tmp_path, f"{runs.__name__}.WithDropout", **transforms)
    parities, facts = compare(tmp_path, VARIANTS, sections)
    assert facts["data"]["transform_is_random"]
    assert (facts["data"]["num_rows"], facts["data"]["row_bytes"]) == (ROWS, ROW_BYTES)
    assert (facts["data"]["batch_size"], facts["model"]["num_parameters"]) == (8, PARAMETERS)
    assert all(parity.holds for parity in parities.values())


def test_transform_with_random_numbers_for_each_row_is_checked_as_it_is(tmp_path: Path) -> None:
    transform = {"transform": {"class_path": f"{runs.__name__}.RowJitter"}}
    names = ("auto", "auto+workers2", "memmap_superbatch", "memmap_superbatch+first_epoch")
    parities, facts = compare(tmp_path, names, config(tmp_path, **transform))
    assert not facts["data"]["transform_is_random"]
    assert all(parity.holds for parity in parities.values()), parities
    # The transform was not left out: without it, the losses are others.
    losses = [
        run(make_spec(tmp_path, "check", "auto", sections)).ranks[0].losses
        for sections in (config(tmp_path, **transform), config(tmp_path))
    ]
    assert losses[0] != losses[1]


def test_random_transform_without_another_is_left_out_of_a_check(tmp_path: Path) -> None:
    transform = {"transform": {"class_path": f"{runs.__name__}.Jitter"}}
    parities, _ = compare(tmp_path, ("auto", "memmap_superbatch"), config(tmp_path, **transform))
    assert all(parity.holds for parity in parities.values())


@pytest.mark.parametrize(
    ("variant", "model"),
    [
        *((each, Regression) for each in (*VARIANTS, "auto+ideal", "memmap_superbatch+ideal")),
        ("auto", Taught),
    ],
)
def test_timed_run_has_steps_parts_and_memory(tmp_path: Path, variant: str, model: type) -> None:
    sections = config(tmp_path, f"{model.__module__}.{model.__name__}")
    facts_of(sections)
    rank = timed_rank(make_spec(tmp_path, "timed", variant, sections))
    assert (len(rank.losses), len(rank.steps)) == (2 + 6, 6)
    assert len(set(rank.losses)) > 1
    figures = compute_figures([rank], "timed")
    on_cpu = {each.key for each in FIGURES.values() if each.run == "timed" and each.compute}
    assert on_cpu - {"device_peak_bytes"} <= set(figures)
    assert min(figures.values()) >= 0
    assert min(figures[f"{part}_s"] for part in ("forward", "backward", "optimizer")) > 0
    assert str(os.getpid()) in rank.processes
    assert rank.first_batch_s > 0


def test_check_tells_bytes_of_the_model(tmp_path: Path) -> None:
    sections = config(tmp_path)
    facts_of(sections)
    (rank,) = run(make_spec(tmp_path, "check", "memmap_superbatch", sections)).ranks
    # Other parameters of this process may still be alive; those of a fresh one are the model's.
    (state,) = rank.state_bytes.values()
    assert state["gradients"] >= 4 * PARAMETERS
    assert state["optimizer"] == 2 * 4 * PARAMETERS + 4 * 4


def test_other_data_module_is_refused(tmp_path: Path) -> None:
    sections = config(tmp_path)
    sections["data"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"}
    with pytest.raises(ValueError, match=r"data is .*BoringDataModule"):
        facts_of(sections)


def test_fewer_rows_than_a_step_are_refused(tmp_path: Path) -> None:
    sections = config(tmp_path, batch_size=ROWS)
    with pytest.raises(ValueError, match=f"batch_size={ROWS} on 2 devices"):
        facts_of(sections)


@pytest.mark.parametrize("sound", ["jagged", {"value": -1, "multiple": 8}])
def test_rows_that_differ_in_length_are_compared_without_their_padding(
    tmp_path: Path, sound: Any
) -> None:
    sections = config(
        tmp_path,
        "tests.support.models.Sounds",
        train_dataset={
            "class_path": "tests.support.datasets.Ragged",
            "init_args": {"num_rows": ROWS},
        },
        layout={"sound": sound, "image": "list"},
    )
    parities, _ = compare(tmp_path, (*VARIANTS, "memmap_dp"), sections)
    for parity in parities.values():
        assert parity.holds is True
        assert parity.steps_with_equal_rows == [6, 6]
