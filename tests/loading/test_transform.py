"""Batch transforms in the loader: repeatable, without a trace outside, and checked."""

import functools
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nested import nested_tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.transform import DeviceTransform, OnSuperBatch
from lightning_memmap.store import Store
from tests.support.models import Points, Regression, make_trainer
from tests.support.rows import CPU, assembled, image_of, make_loader, order_rows, take_steps

Stores = Callable[[int, int], Store]


def with_noise(batch: Any, noise: Any) -> Any:
    return {"row": batch["row"], "noise": noise}


def generator_noise(batch: Any, generator: torch.Generator) -> Any:
    return with_noise(batch, torch.rand(len(batch["row"]), generator=generator))


def keyword_noise(batch: Any, *, generator: torch.Generator) -> Any:
    return generator_noise(batch, generator)


def torch_noise(batch: Any) -> Any:
    return with_noise(batch, torch.rand(len(batch["row"])))


def numpy_noise(batch: Any) -> Any:
    return with_noise(batch, torch.from_numpy(np.random.rand(len(batch["row"]))))


def python_noise(batch: Any) -> Any:
    return with_noise(batch, torch.tensor([random.random() for _ in batch["row"]]))


class ModuleNoise(nn.Module):
    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        return generator_noise(batch, generator)


class CallableNoise:
    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        return generator_noise(batch, generator)


NOISES: dict[str, Callable[..., Any]] = {
    "generator": generator_noise,
    "keyword": keyword_noise,
    "partial": functools.partial(generator_noise),
    "module": ModuleNoise(),
    "callable": CallableNoise(),
    "torch": torch_noise,
    "numpy": numpy_noise,
    "python": python_noise,
}


def noises(loader: SuperBatchLoader, epoch: int = 0) -> list[list[list[float]]]:
    """The noise of each step and data device."""
    loader.set_epoch(epoch)
    return [[batch["noise"].tolist() for batch in super_batch.batches] for super_batch in loader]


class TestRandomness:
    @pytest.mark.parametrize("name", NOISES)
    def test_random_transform_repeats_exactly(self, numbered_store: Stores, name: str) -> None:
        make = functools.partial(make_loader, numbered_store(97, 24), 3, transform=NOISES[name])
        one, other = make(seed=4), make(seed=4)
        torch.rand(3), np.random.rand(3), random.random()
        # In another order of epochs too.
        assert [noises(one, 0), noises(one, 1)] == [noises(other, 1), noises(other, 0)][::-1]

    @pytest.mark.parametrize("name", NOISES)
    def test_random_transform_differs_by_step_device_epoch_and_seed(
        self, numbered_store: Stores, name: str
    ) -> None:
        make = functools.partial(make_loader, numbered_store(96, 24), 3, transform=NOISES[name])
        draws = [
            value
            for seed in (1, 2)
            for epoch in (0, 1)
            for step in noises(make(seed=seed), epoch)
            for batch in step
            for value in batch
        ]
        assert len(set(draws)) == len(draws) == 2 * 2 * 96

    def test_random_transform_of_a_consumer_is_the_same_however_consumers_are_grouped(
        self, numbered_store: Stores
    ) -> None:
        store = numbered_store(96, 24)
        together = noises(make_loader(store, 4, transform=torch_noise))
        apart = [
            noises(make_loader(store, 2, rank=rank, size=2, transform=torch_noise))
            for rank in range(2)
        ]
        for step, whole in enumerate(together):
            # Consumer w = r + R * d is data device d of process r.
            assert whole == [apart[w % 2][step][w // 2] for w in range(4)]

    @pytest.mark.parametrize("name", [*NOISES, "fails"])
    def test_random_transform_leaves_global_generators_alone(
        self, numbered_store: Stores, name: str
    ) -> None:
        def fail(batch: Any) -> Any:
            torch_noise(batch), numpy_noise(batch), python_noise(batch)
            raise RuntimeError("the transform's own error")

        before = global_states()
        loader = make_loader(numbered_store(97, 24), 3, transform=NOISES.get(name, fail))
        is_right = (
            pytest.raises(RuntimeError, match="own error") if name == "fails" else nullcontext()
        )
        with is_right:
            noises(loader)
        assert_states(before)


def global_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]


def assert_states(before: tuple[Any, ...]) -> None:
    after = global_states()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]


class Scale(nn.Module):
    """Counts its calls in a buffer, and scales by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        self.calls += 1
        return {"row": batch["row"] * self.weight, "calls": self.calls.expand(len(batch["row"]))}


class TestModules:
    def test_module_is_copied_to_each_data_device(self, numbered_store: Stores) -> None:
        module = Scale()
        loader = make_loader(numbered_store(96, 24), 2, 12, transform=module)
        with torch.no_grad():
            module.weight.fill_(100)
        calls = []
        for super_batch in loader:
            batch = super_batch.to(CPU)
            assert torch.equal(batch["row"] / 2, (batch["row"] / 2).round())
            calls.append(batch["calls"].unique().tolist())
        assert calls == [[1], [2], [3], [4]]
        assert module.calls == 0

    def test_module_on_another_device_is_moved_there(self) -> None:
        transform = DeviceTransform(Scale(), torch.device("meta"))
        batch = {"row": torch.ones(3, device="meta")}
        assert transform(batch, seed=0)["row"].device.type == "meta"


class TestOutput:
    @pytest.mark.parametrize("num_devices", [1, 3, 4])
    def test_transform_to_other_dtypes_shapes_and_structure_keeps_the_row_order(
        self, numbered_store: Stores, num_devices: int
    ) -> None:
        def reshape(batch: Any) -> Any:
            flat = batch["image"].flatten(1).float() / 255
            return flat, {"mean": flat.mean(1), "id": [batch["row"].int()]}

        loader = make_loader(
            numbered_store(97, 24), num_devices, 24 // num_devices, transform=reshape, shuffle=True
        )
        rows = []
        for super_batch in loader:
            flat, others = super_batch.to(CPU)
            assert flat.dtype == torch.float32
            assert others["id"][0].dtype == torch.int32
            images = image_of(others["id"][0]).flatten(1).float() / 255
            assert torch.equal(flat, images)
            assert torch.equal(others["mean"], images.mean(1))
            rows += others["id"][0].tolist()
        assert rows == order_rows(loader.order, 0, 0, 97)

    def test_transform_may_change_its_batch_in_place(self, numbered_store: Stores) -> None:
        def negate(batch: Any) -> Any:
            batch["row"].neg_()
            return batch

        store = numbered_store(97, 24)
        for residency in ("mmap", "device"):
            loader = make_loader(store, 2, transform=negate, residency=residency)
            for _ in range(2):
                rows = [row for step in loader for row in step.to(CPU)["row"].tolist()]
                assert rows == [-row for row in range(97)]

    @pytest.mark.parametrize(
        "second",
        [
            lambda batch: {"row": batch["row"]},
            lambda batch: {**batch, "more": batch["row"]},
            lambda batch: {"row": batch["row"], "picture": batch["image"]},
            lambda batch: [batch["row"], batch["image"]],
            lambda batch: {"row": batch["row"].float(), "image": batch["image"]},
            lambda batch: {"row": batch["row"], "image": batch["image"].flatten(1)},
        ],
        ids=["fewer", "more", "names", "containers", "dtypes", "shapes"],
    )
    def test_transform_that_differs_between_devices_raises(
        self, numbered_store: Stores, second: Callable[[Any], Any]
    ) -> None:
        def by_device(batch: Any) -> Any:
            # Unshuffled, data device 1 of 2 has the odd rows.
            return second(batch) if batch["row"][0] % 2 else dict(batch)

        loader = make_loader(numbered_store(96, 24), 2, transform=by_device)
        with pytest.raises(ValueError, match=r"transform: it returned .*data device 1"):
            next(iter(loader)).to(CPU)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
    @pytest.mark.parametrize("num_devices", [1, 2])
    @pytest.mark.parametrize(
        ("transform", "words"),
        [
            (lambda batch: batch["row"][1:], r"shape \(3,\) for a batch of 4 rows"),
            (lambda batch: batch["row"].sum(), r"shape \(\) for a batch of 4 rows"),
            (lambda batch: {"image": batch["image"].numpy()}, "ndarray"),
            (lambda batch: {"text": ["a"] * len(batch["row"])}, r"str at batch\['text'\].*RowList"),
            (lambda batch: nested_tensor([*batch["image"]]), r"layout torch\.strided at batch"),
        ],
    )
    def test_transform_that_returns_no_rows_is_refused(
        self, numbered_store: Stores, transform: Any, words: str, num_devices: int
    ) -> None:
        loader = make_loader(numbered_store(97, 24), num_devices, transform=transform)
        with pytest.raises((TypeError, ValueError), match=f"transform: it returned .*{words}"):
            next(iter(loader)).to(CPU)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    @pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
    def test_sparse_tensor_stays_as_it_is_or_is_refused_by_its_layout(
        self, numbered_store: Stores, sparse: Callable[[Tensor], Tensor]
    ) -> None:
        def transform(batch: Any) -> Any:
            return {"row": sparse(batch["row"][:, None])}

        store = numbered_store(97, 24)
        alone = next(iter(make_loader(store, transform=transform))).to(CPU)["row"]
        whole = next(iter(make_loader(store, 2, 2, transform=OnSuperBatch(transform)))).to(CPU)
        assert alone.layout == whole["row"].layout == sparse(torch.eye(1)).layout
        assert torch.equal(alone.to_dense(), whole["row"].to_dense())
        message = rf"layout {alone.layout} at batch\['row'\].*OnSuperBatch"
        with pytest.raises(TypeError, match=message):
            next(iter(make_loader(store, 2, transform=transform))).to(CPU)

    def test_transform_that_takes_no_batch_is_told_apart_from_one_that_fails(
        self, numbered_store: Stores
    ) -> None:
        def sums(batch: Any) -> Any:
            return {"row": sum(batch, start=None)}  # type: ignore[call-overload]

        def of_two(image: Any, label: Any) -> Any:
            return image, label

        for transform in (math.sqrt, of_two):
            with pytest.raises(TypeError, match=r"transform=.*: it cannot be called with a batch"):
                next(iter(make_loader(numbered_store(97, 24), transform=transform)))
        with pytest.raises(TypeError, match=r"^unsupported operand"):
            next(iter(make_loader(numbered_store(97, 24), transform=sums)))


def trim(batch: Any) -> Any:
    """As wide as the last digit of the largest row, and one: other shapes for other rows."""
    width = int((batch["row"] % 10).max()) + 1
    return {**batch, "wide": batch["row"][:, None].expand(-1, width)}


def jitter(batch: Any, generator: torch.Generator) -> Any:
    scale = int(torch.randint(1, 9, (), generator=generator))
    return {**batch, "wide": torch.rand(len(batch["row"]), scale, generator=generator)}


class Graph:
    """A batch of another library: no container that this package knows."""

    def __init__(self, nodes: Any, edges: Any) -> None:
        self.nodes, self.edges = nodes, edges


def vars_of(batches: list[Any]) -> list[Any]:
    return [vars(batch) if isinstance(batch, Graph) else batch for batch in batches]


class TestOnSuperBatch:
    @pytest.mark.parametrize("transform", [trim, jitter, nn.Identity()])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_transform_on_super_batches_is_the_same_on_any_number_of_devices(
        self, numbered_store: Stores, transform: Any, prefetch: int
    ) -> None:
        store = numbered_store(97, 24)
        runs = []
        for num_devices in (1, 2, 4):
            loader = make_loader(
                store,
                num_devices,
                8 // num_devices,
                shuffle=True,
                transform=OnSuperBatch(transform),
            )
            loader.set_epoch(1)
            runs.append(list(assembled(loader, CPU, prefetch=prefetch)))
        assert [len(run) for run in runs] == [12] * 3
        for steps in zip(*runs, strict=True):
            for step in steps[1:]:
                torch.testing.assert_close(step, steps[0], rtol=0, atol=0)
        if transform in (trim, jitter):
            assert len({step["wide"].shape[1] for step in runs[0]}) > 1

    def test_random_numbers_differ_between_processes_and_repeat_when_resumed(
        self, numbered_store: Stores
    ) -> None:
        store = numbered_store(96, 24)
        ranks = []
        for rank in range(2):
            make = functools.partial(
                make_loader, store, 2, 4, rank=rank, size=2, transform=OnSuperBatch(jitter)
            )
            loader = make()
            whole = [step.to(CPU)["wide"] for step in take_steps(loader, 3)]
            resumed = make()
            resumed.load_state_dict(loader.state_dict())
            whole += [step.to(CPU)["wide"] for step in resumed]
            again = [step.to(CPU)["wide"] for step in make()]
            torch.testing.assert_close(whole, again, rtol=0, atol=0)
            ranks.append(again)
        shapes = [[wide.shape for wide in rank] for rank in ranks]
        assert shapes[0] != shapes[1]

    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize(
        "change",
        [
            lambda batch: {key: value[:2] for key, value in batch.items()},
            lambda batch: {key: value.repeat_interleave(2, 0) for key, value in batch.items()},
            lambda batch: batch["row"].sum(),
            lambda batch: Graph(batch["row"], torch.stack([batch["row"][:-1], batch["row"][1:]])),
        ],
        ids=["fewer rows", "two views of each row", "one number", "graph"],
    )
    def test_transform_on_super_batches_may_return_anything(
        self, numbered_store: Stores, change: Any, prefetch: int
    ) -> None:
        runs = []
        for num_devices in (1, 2, 4):
            loader = make_loader(
                numbered_store(97, 24),
                num_devices,
                8 // num_devices,
                transform=OnSuperBatch(change),
            )
            plain = make_loader(numbered_store(97, 24), num_devices, 8 // num_devices)
            runs.append(list(assembled(loader, CPU, prefetch=prefetch)))
            expected = [change(step.to(CPU)) for step in plain]
            torch.testing.assert_close(vars_of(runs[-1]), vars_of(expected), rtol=0, atol=0)
        assert type(runs[0][0]) is type(expected[0])

    def test_strategies_train_on_the_same_batches(self, tmp_path: Path) -> None:
        seen = []
        for strategy, devices in (
            ("auto", 1), ("memmap_superbatch", 4), ("memmap_dp", 2), ("memmap_dp", 1)
        ):  # fmt: skip
            module = Widths()
            data = MemmapDataModule(
                Points(40),
                store_dir=tmp_path / "stores",
                batch_size=8 // devices,
                num_shards=4,
                transform=OnSuperBatch(trim),
            )
            make_trainer(tmp_path, strategy=strategy, devices=devices).fit(module, data)
            seen.append(module.found)
        assert seen == [seen[0]] * 4
        assert len({width for _, width in seen[0]}) > 1


class Widths(Regression):
    """Notes the rows of each batch, and how wide it is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.found = [*getattr(self, "found", []), (batch["row"].tolist(), batch["wide"].shape[1])]


def test_transform_that_returns_a_tensordict_keeps_its_batch_size(numbered_store: Stores) -> None:
    def boxed(batch: Any) -> Any:
        rows = {"row": batch["row"], "nested": TensorDict({"image": batch["image"]}, [])}
        return TensorDict(rows, [len(batch["row"])])

    (batch, *_) = assembled(make_loader(numbered_store(97, 24), 3, 4, transform=boxed))
    assert batch.batch_size == torch.Size([12])
    assert batch["row"].tolist() == list(range(12))
    assert torch.equal(batch["nested", "image"], image_of(batch["row"]))
