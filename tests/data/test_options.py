"""Options: any value is taken as a number of Python, or refused at once by the option's name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_memmap import MemmapDataModule, open_store
from lightning_memmap.data.options import OPTIONS, DataOptions, Option, OptionAttributes
from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.sampling import (
    Bucketed,
    KFold,
    Mixture,
    Parts,
    RandomSplit,
    SamplerFactory,
    Selection,
    Weighted,
)
from lightning_memmap.schema import Decode, Layout, Pad, Windows
from lightning_memmap.schema.forms import read_declared, read_layouts
from lightning_memmap.store import TokenStream

NO_COUNTS = (2**70, -1, math.nan, math.inf, 1.5, True, "3", torch.tensor(3), [], {}, b"3", object())
VALUES = (
    *NO_COUNTS, 0, 3, np.int64(3), np.uint8(1), np.float32(0.5), np.bool_(True), None, (), "", len,
    int, {1: 2}, {"train": []}, np.arange(3), torch.zeros(2), [np.zeros(2)],
)  # fmt: skip


def test_each_option_is_an_attribute() -> None:
    attributes = {name for name, value in vars(OptionAttributes).items() if type(value) is Option}
    assert attributes == set(OPTIONS)


@pytest.mark.parametrize("name", DataOptions.__dataclass_fields__)
def test_any_value_of_an_option_is_taken_or_refused_by_name(tmp_path: Path, name: str) -> None:
    for value in VALUES:
        kept = error = None
        try:
            kept = getattr(MemmapDataModule(**{"store_dir": tmp_path, name: value}), name)
        except (TypeError, ValueError) as refused:
            error = refused
        assert error is None or name in str(error)
        assert not isinstance(kept, np.generic)
        # Setting it is as strict, and leaves what was there.
        data = MemmapDataModule(store_dir=tmp_path)
        before = data.options
        if error is not None:
            with pytest.raises(type(error), match=name):
                setattr(data, name, value)
            assert data.options is before


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda count: Weighted("label", count), "num_samples"),
        (lambda count: Mixture({"a": 1}, count), "num_samples"),
        (lambda count: Bucketed("text", count), "bucket_size"),
        (lambda count: Bucketed("text", 4, count), "num_buckets"),
        (lambda count: KFold(count), "num_folds"),
        (lambda count: KFold(3, seed=count), "seed"),
        (lambda count: Parts(count), "num_parts"),
        (lambda count: RandomSplit(seed=count), "seed"),
        (lambda count: read_declared({"x": count}, None), "variable"),
        (lambda count: Pad(multiple=count), "multiple"),
        (lambda count: Windows("x", count, 1), "length"),
        (lambda count: Windows("x", 1, count), "stride"),
        (lambda count: Decode(num_threads=count), "num_threads"),
    ],
)
def test_count_is_one_of_python_or_refused_by_name(make: Callable[[Any], Any], name: str) -> None:
    for value in NO_COUNTS:
        with pytest.raises((TypeError, ValueError), match=name):
            make(value)
    assert repr(make(np.int64(3))) == repr(make(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mixture({"a": "1"}), r"shares\['a'\]='1'"),  # type: ignore[dict-item]
        (lambda: KFold(3, shuffle=1), "shuffle=1"),  # type: ignore[arg-type]
        # type: ignore[arg-type]
        (lambda: TokenStream(np.zeros(9), 4, start=True), "start=True"),
        # type: ignore[arg-type]
        (lambda: read_layouts({"a": Layout}), r"layout\['a'\]"),
        (lambda: read_layouts({"a": "pads"}), r"layout\['a'\]='pads'"),
        (lambda: read_layouts({"a": {"multiple": 0}}), r"layout\['a'\].*multiple=0"),
        (lambda: read_layouts("pad"), "layout='pad'"),  # type: ignore[arg-type]
        # type: ignore[dict-item]
        (lambda: read_declared({"a": "pad"}, None), r"variable\['a'\]"),  # type: ignore[dict-item]
        # type: ignore[list-item]
        (lambda: read_declared(["a", "a"], None), "variable="),
        (lambda: read_declared(None, {"a": "x", 2: 1}), "nullable="),  # type: ignore[dict-item]
        # type: ignore[arg-type]
    ],
)
def test_value_of_another_kind_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_home_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MemmapDataModule(store_dir="~/stores").store_dir == tmp_path / "stores"
    with pytest.raises(StoreNotFoundError, match=str(tmp_path / "nowhere")):
        open_store("~/nowhere")


def arguments(kind: str, **values: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_memmap.sampling.{kind}", "init_args": values}


@pytest.mark.parametrize(
    "given",
    [
        arguments("Weighted", weights=[1.0, 2.5], num_samples=7),
        arguments("Bucketed", lengths=[3, 1, 2], bucket_size=2),
        arguments("Mixture", shares={"a": 0.5, "b": 2}),
        arguments("Curriculum", stages={0: arguments("Weighted", weights="y"), 3: None}),
        arguments("Subset", rows=[True, False]),
        arguments("Subset", field="label", values=[1, None]),
        arguments("RandomSplit", validation=5, stratify="label"),
        arguments("RandomSplit", validation=0.25),
        arguments("KFold", num_folds=3, shuffle=False),
        arguments("Parts", num_parts=3),
    ],
    ids=lambda given: given["class_path"].rpartition(".")[2],
)
def test_printed_config_of_a_sampler_or_selection_is_read_again(given: dict[str, Any]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--made", type=SamplerFactory | Selection)
    read = parser.parse_object({"made": given})
    again = parser.parse_string(parser.dump(read))
    made = [parser.instantiate(config).made for config in (read, again)]
    assert type(made[0]).__name__ == given["class_path"].rpartition(".")[2]
    assert repr(made[0]) == repr(made[1])


def test_batch_size_of_a_split_is_that_of_its_datasets(tmp_path: Path) -> None:
    data = MemmapDataModule(
        store_dir=tmp_path, batch_size=2, eval_batch_size={"val": 3, "val/noisy": 5}
    )
    splits = ("train", "val", "val/clean", "val/noisy", "test")
    assert [data.options.batch_size_of(split) for split in splits] == [2, 3, 3, 5, 2]
