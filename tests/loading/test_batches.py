"""A loader without a Trainer is used as torch's own are, and by Fabric."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.store import Store
from tests.support.models import Points, Regression, make_trainer, set_up
from tests.support.rows import (
    CPU,
    check_save_and_resume,
    epoch_rows,
    joined,
    make_loader,
    make_sampler,
    order_rows,
    take_steps,
)

Stores = Callable[..., Store]


def make_batches(store: Store, num_devices: int = 2, **options: Any) -> BatchLoader:
    return BatchLoader(make_loader(store, num_devices, shuffle=True, **options), CPU)


def order(epoch: int) -> list[int]:
    return order_rows(make_sampler(97, 24, 0, True), epoch, 0, 97)


def test_iterations_have_the_orders_of_successive_epochs(numbered_store: Stores) -> None:
    loader = make_batches(numbered_store(97, 24))
    assert [joined(epoch_rows(loader)) for _ in range(3)] == [order(0), order(1), order(2)]
    loader.set_epoch(5)
    iter(loader)  # Begins nothing.
    assert joined(epoch_rows(loader)) == order(5)
    # One that is left is followed by the next one.
    assert len(list(take_steps(loader, 2))) == 2
    assert joined(epoch_rows(loader)) == order(7)


def test_loader_that_is_saved_in_any_epoch_goes_on_with_the_next_row(
    numbered_store: Stores,
) -> None:
    make = partial(make_batches, numbered_store(97, 24))
    check_save_and_resume(make, 2)
    for count in (0, 3):
        saved = make()
        for _ in range(2):
            epoch_rows(saved)
        if count:
            list(take_steps(saved, count))
        resumed = make()
        resumed.load_state_dict(saved.state_dict())
        # Saved at the end of an epoch, it goes on with the next one.
        assert joined(epoch_rows(resumed)) == order(2)[8 * count :]
        assert joined(epoch_rows(resumed)) == order(3)


def test_state_of_a_longer_dataset_is_told_from_this_one(numbered_store: Stores) -> None:
    saved = make_batches(numbered_store(197, 24))
    list(take_steps(saved, 20))
    loader = make_batches(numbered_store(97, 24))
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"num_rows=197, .* has num_rows=97"):
        next(iter(loader))


def test_batches_of_a_data_module_unpack_in_a_plain_loop(tmp_path: Path) -> None:
    points = Points(20)
    pairs = [(points[row]["row"], points[row]["x"]) for row in range(20)]
    data = set_up(MemmapDataModule(pairs, store_dir=tmp_path, batch_size=8))
    loader = data.train_dataloader()
    epochs = [[row for row, x in loader if torch.equal(x, points.x[row])] for _ in range(2)]
    first, second = (torch.cat(epoch).tolist() for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(20))
    assert [len(rows) for rows in epochs[0]] == [8, 12]
    # 20 rows in 24 shards have one order: what is new are epochs, not orders.
    assert loader.state_dict()["epoch"] == 1


def test_loaders_say_what_they_load(numbered_store: Stores) -> None:
    loader = make_batches(numbered_store(97, 24))
    text = (
        "SuperBatchLoader(97 rows on cpu, cpu, batch_size=4, order=ShuffledSampler, device='cpu')"
    )
    assert repr(loader) == f"BatchLoader({text})"
    assert repr(loader.loader) == text


def test_loaders_that_are_pickled_or_deep_copied_name_the_way_out(numbered_store: Stores) -> None:
    loader = make_batches(numbered_store(97, 24))
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pickle the data module instead"):
            duplicate(loader)
    # One that shares the rows is made.
    assert joined(epoch_rows(copy.copy(loader.loader))) == order(0)


class TestFabric:
    def test_fabric_takes_the_loader_and_gives_epochs_in_turn(self, numbered_store: Stores) -> None:
        fabric = L.Fabric(accelerator="cpu", devices=1)
        loader = make_batches(numbered_store(97, 24))
        given: Any = fabric.setup_dataloaders(loader)
        assert len(given) == len(loader) == 12
        assert [joined(epoch_rows(given)) for _ in range(2)] == [order(0), order(1)]

    def test_data_module_that_uses_fabric_prefetches_on_its_device(self, tmp_path: Path) -> None:
        fabric = L.Fabric(accelerator="cpu", devices=1)
        found = []
        for prefetch in (None, 2):
            data = MemmapDataModule(Points(40), store_dir=tmp_path, batch_size=8, prefetch=prefetch)
            data.use_fabric(fabric)
            set_up(data, "fit")
            loader: Any = data.train_dataloader()
            assert loader.loader.prefetch == (prefetch or 0)
            given: Any = fabric.setup_dataloaders(loader)
            found.append([batch["row"].tolist() for batch in given])
        assert found[0] == found[1]
        assert sorted(joined(found[0])) == list(range(40))

    def test_fabric_saves_and_loads_the_loader(
        self, numbered_store: Stores, tmp_path: Path
    ) -> None:
        fabric = L.Fabric(accelerator="cpu", devices=1)
        saved, loaded = (
            fabric.setup_dataloaders(make_batches(numbered_store(97, 24))) for _ in range(2)
        )
        assert joined(epoch_rows(saved)) == order(0)
        assert len(list(take_steps(saved, 2))) == 2
        fabric.save(tmp_path / "state.ckpt", {"loader": saved})
        fabric.load(tmp_path / "state.ckpt", {"loader": loaded})
        assert joined(epoch_rows(loaded)) == order(1)[16:]
        assert joined(epoch_rows(loaded)) == order(2)

    @pytest.mark.parametrize("size", [2, 3])
    def test_each_of_several_processes_is_given_its_rows(
        self, numbered_store: Stores, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = []
        for rank in range(size):
            fabric = L.Fabric(accelerator="cpu", devices=1)
            # What a strategy of several processes says.
            kwargs = {"num_replicas": size, "rank": rank}
            monkeypatch.setattr(
                type(fabric.strategy), "distributed_sampler_kwargs", kwargs, raising=False
            )
            given: Any = fabric.setup_dataloaders(make_batches(numbered_store(97, 24), 1))
            assert isinstance(given._dataloader.sampler, DistributedSampler)
            found.append([epoch_rows(given) for _ in range(2)])
        for epoch in range(2):
            rows = [joined(rank[epoch]) for rank in found]
            assert len({len(rank[epoch]) for rank in found}) == 1
            assert [rows[p % size][p // size] for p in range(97)] == order(epoch)

    def test_processes_that_do_not_divide_the_shards_are_refused(
        self, numbered_store: Stores
    ) -> None:
        loader = make_batches(numbered_store(97, 24), 1).loader
        with pytest.raises(ValueError, match=r"5 processes for a store in 24 shards"):
            loader.of_process(0, 5)

    def test_each_process_must_have_a_row(self, numbered_store: Stores) -> None:
        loader = make_batches(numbered_store(6, 24), 1).loader
        steps = [list(loader.of_process(rank, 6)) for rank in range(6)]
        assert [len(each) for each in steps] == [1] * 6
        with pytest.raises(ValueError, match=r"6 rows .* 8 data devices"):
            loader.of_process(0, 8)


def test_loader_made_without_a_trainer_is_taken_by_trainers(tmp_path: Path) -> None:
    data = set_up(MemmapDataModule(Points(40), store_dir=tmp_path, batch_size=8, num_shards=4))
    seen = []
    for options in ({"strategy": "memmap_superbatch", "devices": 1}, {}):
        loader = data.train_dataloader()
        assert isinstance(loader, DataLoader)
        module = Regression()
        make_trainer(tmp_path, max_epochs=2, **options).fit(module, loader)
        make_trainer(tmp_path, **options).predict(module, loader)
        seen.append(module.seen["train"])
    trained = Regression()
    make_trainer(tmp_path, max_epochs=2).fit(trained, data)
    assert seen == [trained.seen["train"]] * 2
