"""Several training sets in given shares: the same under every division, and as often as asked."""

import pickle
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset as TorchSubset

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import SchemaError, StoreError, StoreNotFoundError
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.sampling import (
    Curriculum,
    Mixture,
    Packed,
    Pool,
    RandomSplit,
    SequentialSampler,
    Subset,
)
from lightning_memmap.sampling.rows import JoinedRows, Shards, StoreRows
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store, build_store, open_store
from lightning_memmap.store.joined import JoinedStore
from tests.support.datasets import SAMPLES, SHARES, SIZES, NumberedSet, checked_numbers, mixed_sets
from tests.support.rows import StridedRows, loader_over, make_split

pytestmark = pytest.mark.slow


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {
        "train_dataset": mixed_sets(),
        "batch_size": 12,
        "num_shards": 12,
        "seed": 5,
        "sampler": Mixture(SHARES, SAMPLES),
        "layout": {"steps": "list", "image": "list"},
    }
    return MemmapDataModule(store_dir=path / "stores", **{**defaults, **options})


def epoch_of(data: MemmapDataModule, epoch: int = 0) -> list[list[int]]:
    loader: Any = data.train_dataloader()
    loader.set_epoch(epoch)
    return [checked_numbers(batch) for batch in loader]


def set_up(data: MemmapDataModule) -> MemmapDataModule:
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("is_joined_before", [True, False])
def test_store_that_is_replaced_once_it_is_open_is_never_mixed_with_the_new_one(
    tmp_path: Path, is_joined_before: bool
) -> None:
    def build(name: str, value: int) -> Store:
        rows = [{"x": value, "text": str(value)} for _ in range(60)]
        path, options = tmp_path / name, {"num_shards": 3, "progress": False}
        return build_store(rows, path, overwrite=True, **options)  # type: ignore[arg-type]

    stores = {"a": build("a", 1), "b": build("b", 2)}
    joined = JoinedStore(tmp_path, stores) if is_joined_before else None
    build("b", 3)
    if joined is None:
        with pytest.raises(StoreError, match=r"b/.* replaced"):
            JoinedStore(tmp_path, stores)
        return
    collate = LayoutCollate(joined.schema)
    loader = loader_over(joined, make_split(joined), 12, collate=collate)
    batches = [step.to("cpu") for step in loader]
    seen = {*chain(*(zip(each["x"].tolist(), each["text"], strict=True) for each in batches))}
    assert seen == {(1, "1"), (2, "2")}
    with pytest.raises(StoreError, match=r"b/.* replaced"):
        make_split(joined, residency="stream", window=5)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_shards=st.integers(1, 7),
    seed=st.integers(0, 9),
)
@settings(max_examples=8)
def test_joined_store_is_its_stores(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_shards: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("joined")
    dims = {"steps": 1, "image": 2}
    stores = {
        str(code): build_store(
            NumberedSet(code, size),
            path / str(code),
            num_shards=num_shards,
            progress=False,
            variable=dims,
        )
        for code, size in enumerate(sizes)
    }
    # Another process opens its stores again.
    joined = pickle.loads(pickle.dumps(JoinedStore(path, stores)))
    rows = [row for store in stores.values() for row in store]  # type: ignore[attr-defined]
    assert len(joined) == len(rows) == sum(sizes)
    order = np.random.default_rng(seed).permutation(len(rows))
    fetched = [[*values.rows()] for values in joined.read(order)]
    for at, index in enumerate(order.tolist()):
        found = joined[index]
        for (name, value), column in zip(rows[index].items(), fetched, strict=True):
            if name == "name":
                assert found[name] == value
                continue
            assert torch.equal(found[name], value)
            assert torch.equal(column[at].reshape(value.shape), value)
    assert joined.manifest.num_bytes == sum(store.manifest.num_bytes for store in stores.values())
    assert joined.values("number").tolist() == [row["number"].item() for row in rows]


def test_share_of_0_is_left_out(tmp_path: Path) -> None:
    for share in (1, 1e308):
        data = set_up(make_data(tmp_path, sampler=Mixture({"a": share, "b": 0, "c": share})))
        seen = Counter(number // 100 for step in epoch_of(data) for number in step)
        assert seen == {1: 39, 3: 39}


@pytest.mark.parametrize("is_curriculum", [False, True])
def test_batches_of_one_set_are_not_divided_among_processes_unknown_to_the_data(
    tmp_path: Path, is_curriculum: bool
) -> None:
    mixture = Mixture(SHARES, SAMPLES, by_batch=True)
    sampler = Curriculum({0: mixture, 1: mixture}) if is_curriculum else mixture
    loader: Any = set_up(make_data(tmp_path, sampler=sampler)).train_dataloader()
    assert loader.loader.of_process(0, 1).global_batch == loader.loader.global_batch
    with pytest.raises(ValueError, match=r"2 processes for batches of \d+ rows of one .*by_batch"):
        loader.loader.of_process(0, 2)


@pytest.mark.parametrize(
    ("shares", "num_samples", "words"),
    [
        ([1], None, "dict of shares"),
        ({"a": "much"}, None, "'much'"),
        ({"a": -1.0}, None, "-1.0"),
        ({"a": 0}, None, "shares="),
        ({"a": 1}, 0, "num_samples=0"),
    ],
)
def test_wrong_shares_are_refused(shares: Any, num_samples: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Mixture(shares, num_samples)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": None}, r"sampler=Mixture\(shares=\{'a'"),
        ({"sampler": Packed("x", 8)}, r"sampler=Packed\(.*shares=\{'a'"),
        ({"sampler": Mixture({"a": 1, "b": 1})}, "the sets a, b, c"),
        (
            {"sampler": Mixture({"A": 1, "b": 1, "c": 1})},
            r"train_dataset .*'A'.* a, b, c; did you mean 'a'",
        ),
        ({"train_dataset": NumberedSet(1, 9)}, "train_dataset is only one"),
        ({"train_dataset": [*mixed_sets().values()]}, "train_dataset: .* dict of them by name"),
        ({"subset": RandomSplit(0.1)}, r"subset=RandomSplit.* subset=\{'train/a': Subset"),
        ({"subset": {"train": Subset([1])}}, r"subset=.*subset=\{'train/a': Subset"),
    ],
)
def test_sets_that_are_not_mixed_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make_data(tmp_path, **options)


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_rows_are_selected_from_each_set(tmp_path: Path, residency: str) -> None:
    chosen = {"a": [*range(40, 2, -3)], "b": [5, 20, 1]}
    subset = {f"train/{name}": Subset(rows) for name, rows in chosen.items()}
    data = set_up(make_data(tmp_path, subset=subset, residency=residency))
    allowed = {"c": range(SIZES["c"]), **chosen}
    for epoch in range(3):
        counts = Counter(chain.from_iterable(epoch_of(data, epoch)))
        for code, name in enumerate(SIZES, 1):
            expected = SAMPLES * SHARES[name] / len(allowed[name])
            found = {number - 100 * code for number in counts if number // 100 == code}
            assert found == {*allowed[name]}
            for row in found:
                assert int(expected) <= counts[100 * code + row] <= int(expected) + 1
    # The same rows as of datasets that have no others, but for their numbers.
    sets = {name: TorchSubset(each, allowed[name]) for name, each in mixed_sets().items()}
    apart = set_up(make_data(tmp_path / "apart", train_dataset=sets, residency=residency))
    assert epoch_of(data) == epoch_of(apart)
    assert data.order is not None
    rows = data.order.dataset_rows(0, range(12))
    names = data.order.pool.rows.names(rows)
    codes = dict(zip(SIZES, (100, 200, 300), strict=True))
    assert [codes[name] + row for name, row in names] == epoch_of(data)[0]


def test_selected_rows_come_in_the_order_of_the_sets_in_dataset_order() -> None:
    first = StridedRows(1, 2).among(StoreRows(Shards(5, 3)))
    pool = Pool.of(JoinedRows(("a", "b"), (first, StoreRows(Shards(9, 3)))), 3)
    order = SequentialSampler(pool)
    expected = [1, 3, *range(5, 14)]
    assert order.dataset_rows(0, range(11)).tolist() == expected
    assert sorted(pool.dataset_rows(pool.indices()).tolist()) == expected
    assert pool.rows.names(np.array(expected))[:3] == [["a", 1], ["a", 3], ["b", 0]]


def test_windows_over_rows_that_are_selected_from_a_set(tmp_path: Path) -> None:
    def found(path: Path, sets: Any, **options: Any) -> list[Any]:
        options |= {"windows": Windows("steps", 2, 1), "layout": {"image": "list"}}
        made = make_data(path, train_dataset=sets, **options)
        loader: Any = set_up(made).train_dataloader()
        return [batch["steps"].tolist() for batch in loader]

    allowed = {"a": [30, 7, 21], "b": range(21), "c": range(7)}
    sets = mixed_sets(steps=2)
    apart = {name: TorchSubset(each, allowed[name]) for name, each in sets.items()}
    one = found(tmp_path / "one", sets, subset={"train/a": Subset([30, 7, 21])})
    assert one == found(tmp_path / "other", apart)


def test_sets_of_other_fields_are_refused(tmp_path: Path) -> None:
    wrong = {"a": NumberedSet(1, 9), "b": NumberedSet(2, 9, pad=4)}
    data = make_data(tmp_path, train_dataset=wrong, sampler=Mixture({"a": 1, "b": 1}))
    data.prepare_data()
    with pytest.raises(SchemaError, match=r"field 'pad' is .* in 'a', and 'b' has 'pad'"):
        data.setup("fit")


def test_stores_of_a_mixture_are_used_without_datasets(tmp_path: Path) -> None:
    expected = epoch_of(set_up(make_data(tmp_path)))
    found = sorted(path.name for path in (tmp_path / "stores" / "train").glob("[!.]*"))
    assert found == [*SIZES]
    assert epoch_of(set_up(make_data(tmp_path, train_dataset=None))) == expected
    misspelt = make_data(tmp_path, train_dataset=None, sampler=Mixture({"A": 1, "b": 1, "c": 1}))
    with pytest.raises(StoreNotFoundError, match=r"did you mean '.*train/a'"):
        set_up(misspelt)
    assert open_store(tmp_path / "stores" / "train" / "a").num_rows == SIZES["a"]
