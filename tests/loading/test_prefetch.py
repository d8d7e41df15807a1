"""Steps made ready ahead: the same batches, none counted too early. That none is used too early,
simulated devices tell: see `tests.programs.simulated_gpu`."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.transform import OnSuperBatch
from lightning_memmap.store import Store
from tests.support.rows import (
    CPU,
    assembled,
    check_save_and_resume,
    make_loader,
    noisy,
    rows_of,
)

Stores = Callable[..., Store]

#: So many bytes in each row that every step is a take of its own.
HEAVY = 2**18
NUM_STEPS = 9


def noisy_by_the_global_generator(batch: Any) -> Any:
    return {**batch, "noise": torch.rand(len(batch["row"]))}


def heavy_loader(stores: Stores, prefetch: int, **options: Any) -> SuperBatchLoader:
    """Nine steps of four rows on two logical data devices."""
    return assembled(make_loader(stores(36, 4, HEAVY), 2, 2, **options), prefetch=prefetch)


class TestBatches:
    @given(
        num_rows=st.sampled_from([5, 24, 37, 97, 181]),
        num_devices=st.sampled_from([1, 2, 4]),
        batch_size=st.integers(1, 9),
        depth=st.integers(1, 40),
        residency=st.sampled_from(["mmap", "device"]),
        transform=st.sampled_from([None, noisy, noisy_by_the_global_generator]),
        shuffle=st.booleans(),
        epoch=st.integers(0, 2),
    )
    def test_prefetched_batches_and_those_of_others_are_bitwise_the_same(
        self, numbered_store: Stores, num_rows: int, depth: int, epoch: int, **layout: Any
    ) -> None:
        loader = make_loader(numbered_store(num_rows, 24), **layout)
        loader.set_epoch(epoch)
        torch.manual_seed(0)
        plain = [(batch, torch.rand(1)) for batch in assembled(loader)]
        torch.manual_seed(0)
        # The consumer keeps all batches: none is overwritten by the next ones.
        ahead = [(batch, torch.rand(1)) for batch in assembled(loader, CPU, prefetch=depth)]
        assert len(plain) == len(ahead) == len(loader)
        for (expected, drawn), (found, drawn_too) in zip(plain, ahead, strict=True):
            assert list(found) == list(expected)
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert torch.equal(drawn, drawn_too)

    @given(
        batch_size=st.integers(1, 30),
        depth=st.integers(1, 5),
        transform=st.sampled_from([None, noisy]),
    )
    @settings(max_examples=15)
    def test_prefetched_epoch_resumes_after_each_step(
        self, numbered_store: Stores, depth: int, **layout: Any
    ) -> None:
        def make() -> SuperBatchLoader:
            loader = make_loader(numbered_store(37, 24), 2, shuffle=True, **layout)
            return assembled(loader, CPU, prefetch=depth)

        check_save_and_resume(make, 1)


class TestOrder:
    def test_nothing_is_done_before_the_first_step_is_asked_for(
        self, numbered_store: Stores
    ) -> None:
        made: list[int] = []
        loader = heavy_loader(numbered_store, 2, transform=lambda batch: made.append(1) or batch)
        steps = iter(loader)
        loader.set_epoch(1)
        assert not made
        next(steps)
        assert loader.state_dict()["epoch"] == 1

    @pytest.mark.parametrize("depth", [1, 2, 5, 20])
    def test_as_many_steps_are_in_flight_as_asked_for(
        self, numbered_store: Stores, depth: int
    ) -> None:
        made: list[int] = []
        loader = heavy_loader(numbered_store, depth, transform=lambda b: made.append(1) or b)
        for step, _ in enumerate(loader):
            # Two data devices transform a part of each step.
            assert len(made) == 2 * min(NUM_STEPS, step + 1 + depth)

    @pytest.mark.parametrize("failing", [0, 1, 4, NUM_STEPS - 1])
    @pytest.mark.parametrize("depth", [0, 1, 2, 20])
    @pytest.mark.parametrize("kind", [lambda transform: transform, OnSuperBatch])
    def test_error_comes_when_its_step_is_due(
        self, numbered_store: Stores, depth: int, failing: int, kind: Any
    ) -> None:
        def transform(batch: Any) -> Any:
            if 4 * failing in batch["row"]:
                raise RuntimeError("a broken row")
            return batch

        loader = heavy_loader(numbered_store, depth, transform=kind(transform))
        delivered: list[int] = []
        with pytest.raises(RuntimeError, match="a broken row"):
            delivered.extend(row for batch in loader for row in rows_of(batch))
        assert delivered == list(range(4 * failing))
        assert loader.state_dict()["steps"] == failing

    @pytest.mark.parametrize("fails", [False, True])
    def test_what_is_in_flight_is_let_go_of_without_the_collector(
        self, numbered_store: Stores, fails: bool
    ) -> None:
        made: list[weakref.ref[Tensor]] = []

        def transform(batch: Any) -> Any:
            if fails and len(made) == 8:
                raise RuntimeError("a broken row")
            image = batch["image"].clone()
            made.append(weakref.ref(image))
            return {**batch, "image": image}

        gc.disable()
        try:
            steps = iter(heavy_loader(numbered_store, 3, transform=transform))
            taken = 0
            try:
                for _ in steps:
                    taken += 1
                    if taken == 2 and not fails:
                        break
            except RuntimeError:
                pass
            assert taken == (4 if fails else 2)
            del steps, _
            assert [ref() for ref in made] == [None] * len(made)
        finally:
            gc.enable()
