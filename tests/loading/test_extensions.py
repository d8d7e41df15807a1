"""Extensions: a sampler, a row source and a strategy that the package does not know."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.integers import Integers
from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import RowSource
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import DrawnSampler, Pool, Sampler, TableSampler
from lightning_memmap.store import Store
from tests.support.models import Points, Regression, make_trainer
from tests.support.rows import (
    CPU,
    check_save_and_resume,
    epoch_rows,
    joined,
    loader_over,
    make_loader,
    pool_of,
)

NUM_ROWS = 60


# A sampler: rows of the later half of each shard come twice as often as the others


@dataclass(frozen=True)
class TwiceSampler(TableSampler):
    """Each shard's rows in order, those of its second half twice; the epochs take turns."""

    start: int = 0

    def offsets(self, epoch: int, shard: int) -> Integers:
        size, count = int(self.pool.sizes[shard]), int(self.positions_per_shard[shard])
        places = (np.arange(count) + (epoch + self.start) % 2) % (size + size - size // 2)
        return np.where(places < size, places, places - size + size // 2)


@dataclass(frozen=True)
class Newest(DrawnSampler):
    """The newest row of each shard alone, as often as it has positions."""

    def draw(self, epoch: int, shard: int) -> Integers:
        return np.full(self.positions_per_shard[shard], self.pool.sizes[shard] - 1)


def newest(pool: Pool, seed: int) -> Sampler:
    return Newest(pool, seed)


def twice(pool: Pool, seed: int) -> Sampler:
    lengths = [size + (size - size // 2) for size in pool.sizes.tolist()]
    return TwiceSampler(pool, seed % 2, num_samples=min(lengths) * pool.num_shards)


def trained_rows(path: Path, strategy: str, devices: int, batch: int, **options: Any) -> list[int]:
    """The rows that a fit of two epochs sees, in their order."""
    module = Regression()
    data = MemmapDataModule(
        Points(NUM_ROWS), store_dir=path / "stores", batch_size=batch, **options
    )
    make_trainer(path, strategy=strategy, devices=devices, max_epochs=2, limit_val_batches=0).fit(
        module, data
    )
    return joined(module.seen["train"])


def test_sampler_of_a_test_gives_its_rows_under_any_number_of_devices(tmp_path: Path) -> None:
    order = twice(pool_of(NUM_ROWS, 24), 0)
    expected = [
        row
        for epoch in range(2)
        for row in order.dataset_rows(epoch, range(order.num_positions)).tolist()
    ]
    assert len(expected) > 2 * NUM_ROWS
    for devices in (1, 2, 4):
        rows = trained_rows(tmp_path, "memmap_superbatch", devices, 12 // devices, sampler=twice)
        assert rows == expected


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ("sampler: {}.TwiceSampler", 0),
        ("sampler: {{class_path: {}.TwiceSampler, init_args: {{start: 1}}}}", 1),
        ("sampler: {}.twice", 0),
    ],
)
def test_sampler_of_a_test_is_named_in_a_config(tmp_path: Path, given: str, start: int) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MemmapDataModule, "data")
    text = f"data: {{store_dir: {tmp_path}, {given.format(__name__)}}}"
    made = parser.instantiate(parser.parse_string(text)).data.sampler
    found = made(pool_of(NUM_ROWS, 24), 5)
    assert isinstance(found, TwiceSampler)
    assert found.start == start


def test_sampler_of_four_lines_is_streamed(tmp_path: Path) -> None:
    rows = {
        residency: trained_rows(
            tmp_path, "memmap_superbatch", 2, 6, sampler=newest, shuffle_block=2, **residency_of
        )
        for residency, residency_of in (("mmap", {}), ("stream", {"residency": "stream"}))
    }
    assert rows["mmap"] == rows["stream"]
    # Of each of 24 shards the last row alone, twice.
    assert set(rows["mmap"]) == set(range(NUM_ROWS - 24, NUM_ROWS))


def test_sampler_of_a_test_is_saved_and_resumed(numbered_store: Any) -> None:
    store = numbered_store(NUM_ROWS, 12)

    def make() -> Any:
        loader = make_loader(store, 2, 3)
        loader.order = order = twice(loader.order.pool, 1)
        return type(loader)(
            loader._rows,
            DataTopology((CPU,) * 2),
            order,
            3,
            collate=store.schema.make_builder(),
            transform=lambda batch: batch,
        )

    check_save_and_resume(make, epoch=1)
    state = make().state_dict()
    assert state["sampler"]["sampler"] == "TwiceSampler"
    other = make_loader(store, 2, 3)
    other.load_state_dict({**state, "position": 6, "steps": 1})
    with pytest.raises(ValueError, match="sampler=TwiceSampler"):
        next(iter(other))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": 3}, r"sampler=3: .*Weighted\(\.\.\.\).* function"),
        ({"sampler": twice, "shuffle": False}, "shuffle=False with sampler="),
    ],
)
def test_sampler_with_options_that_it_excludes_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        MemmapDataModule(Points(4), store_dir=tmp_path, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda pool, seed: TwiceSampler(pool_of(pool.num_rows // 2, pool.num_shards)),
        lambda pool, seed: range(pool.num_rows),
    ],
)
def test_sampler_of_other_rows_is_refused(tmp_path: Path, sampler: Any) -> None:
    data = MemmapDataModule(Points(NUM_ROWS), store_dir=tmp_path, sampler=sampler)
    data.prepare_data()
    with pytest.raises(ValueError, match=r"^sampler: "):
        data.setup("fit")


class Plain(TwiceSampler):
    """No dataclass: its fields would not be its identity."""


@dataclass(frozen=True)
class Floats(TwiceSampler):
    share: float = 0.5


@dataclass(frozen=True)
class Outside(TwiceSampler):
    def offsets(self, epoch: int, shard: int) -> Integers:
        return super().offsets(epoch, shard) + 1000


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Plain, "sampler: Plain .*dataclass"),
        (Floats, r"Floats.share=0\.5"),
        (Outside, r"Outside\.offsets .*shard 0"),
    ],
)
def test_sampler_that_cannot_work_is_refused(tmp_path: Path, kind: Any, words: str) -> None:
    data = MemmapDataModule(
        Points(NUM_ROWS), store_dir=tmp_path, sampler=lambda pool, seed: kind(pool)
    )
    data.prepare_data()
    with pytest.raises((TypeError, ValueError), match=words):
        data.setup("fit")


def test_function_that_takes_no_shards_and_seed_is_refused(tmp_path: Path) -> None:
    def maker(pool: Any) -> Sampler:
        return TwiceSampler(pool)

    data = MemmapDataModule(Points(NUM_ROWS), store_dir=tmp_path, sampler=maker)  # type: ignore[arg-type]
    data.prepare_data()
    with pytest.raises(TypeError, match=r"sampler=.*pool"):
        data.setup("fit")


# A row source: rows that are made when they are asked for, as a remote one would fetch them


class MadeRows(RowSource):
    """Rows that are made from their number in the dataset."""

    device = CPU

    def __init__(self, store: Store) -> None:
        self.fetched: list[int] = []
        self._store = store

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        return sampler.dataset_rows(epoch, positions)

    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Any:
        return nullcontext(self.take)

    def take(self, locations: Tensor, out: Buffers | None) -> list[Tensor]:
        self.fetched += locations.tolist()
        samples = [self._store[row] for row in locations.tolist()]
        return [torch.stack([sample[name] for sample in samples]) for name in ("row", "image")]


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_row_source_of_a_test_serves_a_loader(
    numbered_store: Any, num_devices: int, transform: Any
) -> None:
    store = numbered_store(NUM_ROWS, 12)
    source = MadeRows(store)
    topology = DataTopology((CPU,) * num_devices)
    rows = SplitRows(pool_of(NUM_ROWS, 12), (source,), np.zeros(12, np.int64), store.schema.fields)
    loader = loader_over(store, rows, 4, topology, shuffle=True, seed=3, transform=transform)
    expected = make_loader(store, num_devices, 4, shuffle=True, seed=3)
    assert epoch_rows(loader) == epoch_rows(expected)
    assert sorted(source.fetched) == list(range(NUM_ROWS))
    rows.release()
    with pytest.raises(RuntimeError, match=r"setup\(\)"):
        next(iter(loader))


# A strategy: it declares its topology, and nothing else


class ThreeHolders(SingleDeviceStrategy):
    """Three logical data devices, whose batches are assembled on the one that trains."""

    strategy_name = "three_holders"

    @property
    def data_topology(self) -> DataTopology:
        return DataTopology((self.root_device,) * 3, assemble_on=self.root_device)


@pytest.fixture
def three_holders() -> Iterator[str]:
    StrategyRegistry.register("three_holders", ThreeHolders, description="of a test", device="cpu")
    yield "three_holders"
    StrategyRegistry.remove("three_holders")


def test_strategy_of_a_test_declares_its_topology(tmp_path: Path, three_holders: str) -> None:
    expected = trained_rows(tmp_path, "memmap_superbatch", 1, 12)
    assert trained_rows(tmp_path, three_holders, 1, 4) == expected
