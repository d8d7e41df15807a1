"""A row has the same random numbers on any device and process, in every order, and when resumed."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.sampling import Bucketed, Curriculum, Mixture, Weighted
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store
from lightning_memmap.transforms import OnSuperBatch
from tests.support.models import Points, Regression, make_trainer, set_up
from tests.support.rows import CPU, assembled, make_loader, take_steps

Stores = Callable[[int, int], Store]


def with_noise(batch: Any, random: RowRandom) -> Any:
    noise = torch.cat([random.uniform()[:, None], random.normal(3), random.uniform(1)], dim=1)
    return {**batch, "noise": noise}


def with_two_noises(batch: Any, *, random: RowRandom, generator: torch.Generator) -> Any:
    other = torch.rand(len(random), generator=generator)
    return {**with_noise(batch, random), "other": other}


class NoiseModule(nn.Module):
    def forward(self, batch: Any, random: RowRandom) -> Any:
        return with_noise(batch, random)


def noise_by_row(loader: SuperBatchLoader, epoch: int = 0, prefetch: int = 0) -> dict[int, Any]:
    loader.set_epoch(epoch)
    return rows_and_noise(assembled(loader, CPU, prefetch=prefetch))


def rows_and_noise(batches: Any) -> dict[int, Any]:
    pairs = [
        (row, tuple(noise))
        for batch in batches
        for row, noise in zip(batch["row"].tolist(), batch["noise"].tolist(), strict=True)
    ]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.fixture
def expected(numbered_store: Stores) -> dict[int, Any]:
    """Epoch 1 on one device, in dataset order."""
    loader = make_loader(numbered_store(97, 24), transform=with_noise, seed=3)
    return noise_by_row(loader, 1)


class TestOneNumberForEachRow:
    def test_noise_is_that_of_the_row(
        self, numbered_store: Stores, expected: dict[int, Any]
    ) -> None:
        whole = with_noise({}, RowRandom(range(97), seed=3, epoch=1))["noise"].tolist()
        assert expected == {row: tuple(noise) for row, noise in enumerate(whole)}

    @pytest.mark.parametrize("num_devices", [1, 2, 4, 5])
    @pytest.mark.parametrize(
        "options",
        [
            {"transform": with_noise},
            {"transform": with_two_noises},
            {"transform": NoiseModule()},
            {"transform": functools.partial(with_noise)},
            {"transform": OnSuperBatch(with_noise)},
            {"transform": with_noise, "shuffle": True},
            {"transform": with_noise, "shuffle": True, "window": 2},
            {"transform": with_noise, "shuffle": True, "window": 2, "residency": "stream"},
            {"transform": OnSuperBatch(with_noise), "shuffle": True, "residency": "stream"},
        ],
    )
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_noise_does_not_depend_on_devices_or_order(
        self,
        numbered_store: Stores,
        expected: dict[int, Any],
        num_devices: int,
        options: dict[str, Any],
        prefetch: int,
    ) -> None:
        loader = make_loader(numbered_store(97, 24), num_devices, 3, seed=3, **options)
        assert noise_by_row(loader, 1, prefetch) == expected

    @pytest.mark.parametrize("on_super_batch", [False, True])
    def test_noise_does_not_depend_on_processes(
        self, numbered_store: Stores, expected: dict[int, Any], on_super_batch: bool
    ) -> None:
        transform: Any = OnSuperBatch(with_noise) if on_super_batch else with_noise
        found = dict[int, Any]()
        for rank in range(3):
            loader = make_loader(
                numbered_store(97, 24), 2, rank=rank, size=3, transform=transform, seed=3
            )
            found |= noise_by_row(loader, 1)
        assert found == expected

    def test_noise_does_not_depend_on_a_resume(
        self, numbered_store: Stores, expected: dict[int, Any]
    ) -> None:
        make = functools.partial(
            make_loader, numbered_store(97, 24), transform=with_noise, seed=3, shuffle=True
        )
        loader = make(4, 4)
        loader.set_epoch(1)
        first = rows_and_noise([step.to(CPU) for step in take_steps(loader, 2)])
        resumed = make(1, 7)
        resumed.load_state_dict(loader.state_dict())
        assert first | noise_by_row(resumed, 1) == expected
        assert len(first) == 32

    def test_assembling_twice_draws_the_same_numbers(self, numbered_store: Stores) -> None:
        loader = make_loader(numbered_store(97, 24), 2, transform=OnSuperBatch(with_noise))
        for step in loader:
            first, second = step.to(CPU)["noise"], step.to(CPU)["noise"]
            assert torch.equal(first, second)

    def test_epochs_and_seeds_differ(self, numbered_store: Stores) -> None:
        make = functools.partial(make_loader, numbered_store(97, 24), transform=with_noise)
        runs = [noise_by_row(make(seed=seed), epoch) for seed, epoch in ((3, 1), (3, 2), (4, 1))]
        numbers = [number for run in runs for noise in run.values() for number in noise]
        # Some of 1,455 multiples of 2**-24 may be equal.
        assert len(set(numbers)) > len(numbers) - 3


class Noting(Regression):
    """Notes the names of the rows of each batch, and their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        names = batch["row"].tolist()
        if "value" in batch:  # A window begins with its number.
            names = [*zip(names, batch["value"][:, 0].tolist(), strict=True)]
        noise = map(tuple, batch["noise"].tolist())
        self.found.append((names, [*noise]))
        return sum(parameter.sum() for parameter in self.parameters())  # type: ignore[return-value]


class Series(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 31

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "value": torch.arange(5 + row * 7 % 30)}


WEIGHTED = Weighted([float(row % 7) for row in range(60)], 130)
BLOCKS = {"shuffle_block": 1, "residency": "stream"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (Points(60), {}),
    "streamed": (Points(60), {"shuffle_block": 1, "residency": "stream"}),
    "windows": (Series(), {"windows": Windows("value", 4, 2)}),
    "bucketed": (Points(60), {"sampler": Bucketed([row % 9 for row in range(60)], 12, 2)}),
    "weighted": (Points(60), {"sampler": WEIGHTED}),
    "weighted in blocks": (Points(60), {"sampler": WEIGHTED, **BLOCKS}),
    "mixture": (
        {"one": Points(40), "two": Points(9, 100)},
        {"sampler": Mixture({"one": 0.5, "two": 0.5}, num_samples=60)},
    ),
    "curriculum": (
        Points(60),
        {"sampler": Curriculum({0: Weighted([float(row % 7) for row in range(60)], 60), 1: None})},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_order_draws_the_same_numbers_under_every_strategy(tmp_path: Path, case: str) -> None:
    dataset, options = CASES[case]
    runs: list[list[tuple[Any, Any]]] = []
    for strategy, devices, kind in (
        ("auto", 1, with_noise),
        ("memmap_superbatch", 2, with_noise),
        ("memmap_superbatch", 4, OnSuperBatch(with_noise)),
        ("memmap_dp", 2, with_noise),
        ("memmap_dp", 4, OnSuperBatch(with_noise)),
    ):
        data = MemmapDataModule(
            dataset,
            store_dir=tmp_path / "stores",
            batch_size=12 // devices,
            transform=kind,
            seed=5,
            **options,
        )
        module = Noting()
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=devices, max_epochs=2, limit_val_batches=0
        )
        trainer.fit(module, data)
        runs.append([*zip(*map(flat, zip(*module.found, strict=True)), strict=True)])
    assert all(sorted(run) == sorted(runs[0]) for run in runs)
    # A row that comes twice has numbers of its own each time.
    assert len({noise for _, noise in runs[0]}) == len(runs[0])
    again = max(Counter(name for name, _ in runs[0]).values())
    assert again > 2 if case in ("weighted", "weighted in blocks", "mixture") else again >= 2


def flat(steps: Any) -> list[Any]:
    return [value for step in steps for value in step]


def test_position_is_left_out_where_each_row_comes_once(tmp_path: Path) -> None:
    found = []
    for options in ({}, {"num_shards": 5}, {"shuffle_block": 1}, {"shuffle": False}):
        data = MemmapDataModule(
            Points(60),
            store_dir=tmp_path / "stores",
            batch_size=12,
            transform=with_noise,
            **options,
        )
        set_up(data, "fit")
        batches: Any = data.train_dataloader()
        found.append(rows_and_noise(batches))
    assert found == [found[0]] * 4
    assert np.unique([noise[0] for noise in found[0].values()]).size == 60
