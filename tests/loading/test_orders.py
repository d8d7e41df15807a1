"""Every order: the same rows on any number of devices and processes, wherever they live."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Subset

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.sampling import Bucketed, Curriculum, Mixture, SamplerFactory, Weighted
from lightning_memmap.sampling.permutations import Tables
from lightning_memmap.sampling.weighted import WeightedSampler
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store, build_store
from lightning_memmap.store.joined import JoinedStore
from tests.support.datasets import Series, all_windows, windows_in
from tests.support.rows import NumberedRows, StridedRows, make_window_loader, rows_of

ROWS, BATCH, EPOCHS = 101, 12, (0, 1)
LENGTHS = [5 + row * 7 % 30 for row in range(40)]
WINDOWS = Windows(("value", "time"), 8, 3)
#: Some rows never come, one comes often, and the weights go with the shards.
WEIGHTS = np.where(np.arange(ROWS) % 12 == 3, 5.0, np.where(np.arange(ROWS) % 5 == 0, 0.0, 1.0))
WEIGHTS[50] = 17.0
BY_WINDOW = np.arange(len(all_windows(LENGTHS, 8, 3))) % 7

#: By name the store, and what makes the order; None for rows that are shuffled.
ORDERS: dict[str, tuple[str, SamplerFactory | None]] = {
    "shuffled": ("rows", None),
    "weighted": ("rows", Weighted(WEIGHTS, num_samples=140)),
    "bucketed": ("rows", Bucketed(np.arange(ROWS) * 7 % 50, BATCH, num_buckets=3)),
    "curriculum": ("rows", Curriculum({0: Weighted(WEIGHTS, num_samples=ROWS), 1: None})),
    "mixture": ("sets", Mixture({"a": 0.7, "b": 0.3}, 140)),
    "by_batch": ("sets", Mixture({"a": 0.7, "b": 0.3}, 144, by_batch=True)),
    "windows": ("series", None),
    "weighted windows": ("series", Weighted(BY_WINDOW)),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    path, options = tmp_path_factory.mktemp("orders"), {"num_shards": 12, "progress": False}

    def build(name: str, dataset: Any) -> Store:
        return build_store(dataset, path / name, **options)  # type: ignore[arg-type]

    others = Subset(NumberedRows(1100), range(1000, 1040))
    return {
        "rows": build("rows", NumberedRows(ROWS)),
        "sets": JoinedStore(path, {"a": build("a", NumberedRows(80)), "b": build("b", others)}),
        "series": build("series", Series(LENGTHS)),
    }


def make(stores: dict[str, Store], name: str, num_devices: int = 1, **options: Any) -> Any:
    kind, factory = ORDERS[name]
    windows = WINDOWS if kind == "series" else None
    size = BATCH // (num_devices * options.get("size", 1))
    store, given = stores[kind], {"factory": factory, **options}
    return make_window_loader(store, windows, num_devices, size, **given)


def view_steps(loader: SuperBatchLoader, epoch: int) -> list[list[Any]]:
    loader.set_epoch(epoch)
    batches = (step.to("cpu") for step in loader)
    return [windows_in(batch, 8) if "value" in batch else rows_of(batch) for batch in batches]


@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("name", ORDERS)
def test_rows_are_the_same_on_any_number_of_devices_and_processes_wherever_they_live(
    stores: dict[str, Store], name: str, window: int | None
) -> None:
    options: dict[str, Any] = {"window": window}
    if ORDERS[name][0] == "rows" and ORDERS[name][1] is None:
        options["subset"] = StridedRows(1, 3, excluded=True)
    alone = make(stores, name, **options)
    for epoch in EPOCHS:
        expected = view_steps(alone, epoch)
        for residency in ("mmap", "host", "stream") if window is not None else ("mmap", "host"):
            for num_devices in (1, 3):
                loader = make(stores, name, num_devices, residency=residency, **options)
                assert view_steps(loader, epoch) == expected
            ranks = [
                view_steps(
                    make(stores, name, 2, rank=r, size=2, residency=residency, **options), epoch
                )
                for r in range(2)
            ]
            for step, *parts in zip(expected, *ranks, strict=True):
                assert sorted(chain(*parts)) == sorted(step)
                assert step[::2] in parts
        # Blocks change when rows come, and not which.
        whole = view_steps(make(stores, name, **{**options, "window": None}), epoch)
        assert Counter(chain(*expected)) == Counter(chain(*whole))
    assert view_steps(alone, 0) != view_steps(alone, 1)


@pytest.mark.parametrize("residency", ["mmap", "stream"])
@pytest.mark.parametrize("name", ORDERS)
def test_epoch_is_resumed_after_any_step_on_another_number_of_devices(
    stores: dict[str, Store], name: str, residency: str
) -> None:
    options: dict[str, Any] = {"window": 3, "residency": residency}
    saved = make(stores, name, 3, **options)
    whole = view_steps(saved, 1)
    saved.set_epoch(1)
    states = [saved.state_dict() for _ in saved]
    for count in (1, len(whole) // 2, len(whole) - 1):
        for num_devices in (3, 4):
            loader = make(stores, name, num_devices, **options)
            loader.load_state_dict(states[count - 1])
            assert view_steps(loader, 1) == whole[count:]


@pytest.mark.parametrize(
    ("kind", "saved", "other", "words"),
    [
        ("rows", Weighted(WEIGHTS, 140), Weighted(WEIGHTS + 1, 140), "digest="),
        ("rows", Weighted(WEIGHTS, 140), Weighted(WEIGHTS, 141), "num_positions=140"),
        ("rows", Bucketed(np.arange(ROWS), 12), Bucketed(np.arange(ROWS), 24), "bucket_size=12, "),
        (
            "sets",
            Mixture({"a": 0.7, "b": 0.3}),
            Mixture({"a": 0.6, "b": 0.4}),
            "positions of sets=",
        ),
        ("series", WINDOWS, Windows(("value", "time"), 8, 2), "stride=3"),
        ("series", WINDOWS, Windows(("value", "time"), 7, 3), "length=8"),
    ],
)
def test_checkpoint_of_another_order_is_refused(
    stores: dict[str, Store], kind: str, saved: Any, other: Any, words: str
) -> None:
    def loader(given: Any) -> Any:
        if isinstance(given, Windows):
            return make_window_loader(stores[kind], given)
        return make_window_loader(stores[kind], None, factory=given)

    first = loader(saved)
    next(iter(first))
    second = loader(other)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=words):
        next(iter(second))


def test_checkpoint_of_an_order_that_was_drawn_otherwise_is_refused(
    stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightedSampler, "version", 1)
    saved = make(stores, "weighted")
    next(iter(saved))
    state = saved.state_dict()
    monkeypatch.undo()
    loader = make(stores, "weighted")
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"version=None, .*version=3, .*release of the package"):
        next(iter(loader))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_tables_of_an_order_are_used_by_one_thread_at_a_time(
    stores: dict[str, Store], name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Tables.get

    def checked(tables: Tables, kind: str, epoch: int, make_table: Callable[[], Any]) -> Any:
        def alone() -> Any:
            with ThreadPoolExecutor(1) as other:
                assert not other.submit(tables.lock.acquire, blocking=False).result()
            return make_table()

        return get(tables, kind, epoch, alone)

    monkeypatch.setattr(Tables, "get", checked)
    assert view_steps(make(stores, name, 3, window=window), 1)
