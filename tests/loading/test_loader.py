"""The zipped loader: which rows, in which order, once each, and never overwritten."""

import dataclasses
import functools
import gc
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_sharer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict, is_tensor_collection, tensorclass
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.sampling import Sampler
from lightning_memmap.sampling.rows import round_up_shards
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.store import Store, build_store
from tests.loading.holder import keep_batches
from tests.support.datasets import assert_same
from tests.support.preloaded import preloaded_processes
from tests.support.rows import (
    CPU,
    assembled,
    check_save_and_resume,
    cpus,
    epoch_rows,
    joined,
    make_loader,
    make_sampler,
    make_split,
    order_rows,
    rows_of,
    sampler_over,
    take_steps,
)

Stores = Callable[..., Store]
#: So many bytes in each row that four of them are a take: no memory serves two steps.
HEAVY = 64 * 2**10

device_counts = st.sampled_from([1, 2, 3, 4, 8])
residencies = st.sampled_from(["mmap", "device"])


def untouched(batch: Any) -> Any:
    """A transform that changes nothing: with it, every data device takes its own batch."""
    return batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to load a store."""

    num_rows: int
    num_shards: int
    num_devices: int
    size: int
    batch_size: int
    residency: str
    options: dict[str, Any]

    @property
    def num_data_devices(self) -> int:
        return self.num_devices * self.size

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.num_data_devices

    @property
    def sampler(self) -> Sampler:
        shards = round_up_shards(self.num_shards, self.num_data_devices)
        return make_sampler(self.num_rows, shards, self.options["seed"], self.options["shuffle"])

    def loaders(self, stores: Stores) -> list[SuperBatchLoader]:
        """One loader for each process."""
        return [
            make_loader(
                stores(self.num_rows, self.num_shards),
                self.num_devices,
                self.batch_size,
                residency=self.residency,
                rank=rank,
                size=self.size,
                **self.options,
            )
            for rank in range(self.size)
        ]

    def steps(self) -> list[tuple[int, int]]:
        plan = BatchSchedule(
            self.num_rows, self.global_batch, self.sampler.num_shards, self.options["drop_last"]
        )
        return [plan.bounds(step) for step in range(len(plan))]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    num_devices, size = draw(device_counts), draw(st.integers(1, 4))
    num_shards = draw(st.sampled_from([1, 4, 7, 12, 24]))
    batch_size = draw(st.integers(1, 9))
    # From a few stores, so that not each example builds its own.
    num_rows = draw(st.sampled_from([1, 5, 24, 37, 97, 100, 181]))
    drop_last = draw(st.booleans())
    topology = num_devices * size
    assume(num_rows >= topology * (batch_size if drop_last else 1))
    options = {
        "drop_last": drop_last,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**40)),
        "transform": draw(st.sampled_from([None, untouched])),
    }
    residency = draw(residencies)
    return Layout(num_rows, num_shards, num_devices, size, batch_size, residency, options)


class TestRows:
    @given(layout=layouts(), epoch=st.integers(0, 3))
    def test_epoch_over_all_processes_is_the_stream(
        self, numbered_store: Stores, layout: Layout, epoch: int
    ) -> None:
        loaders = layout.loaders(numbered_store)
        for loader in loaders:
            loader.set_epoch(epoch)
        steps = [epoch_rows(loader) for loader in loaders]

        bounds = layout.steps()
        assert {len(loader) for loader in loaders} == {len(bounds)}
        assert {len(rank_steps) for rank_steps in steps} == {len(bounds)}
        assert all(rows for rank_steps in steps for rows in rank_steps)
        for step, (first, last) in enumerate(bounds):
            for rank in range(layout.size):
                # Rank r serves the positions p with p % R == r, in their order.
                expected = order_rows(layout.sampler, epoch, first, last)
                mine = slice((rank - first) % layout.size, None, layout.size)
                assert steps[rank][step] == expected[mine]

        delivered = [row for rank_steps in steps for rows in rank_steps for row in rows]
        assert len(set(delivered)) == len(delivered)
        if not layout.options["drop_last"]:
            assert sorted(delivered) == list(range(layout.num_rows))

    @given(layout=layouts())
    def test_batches_of_devices_are_rows_of_their_own_shards(
        self, numbered_store: Stores, layout: Layout
    ) -> None:
        total, shards = layout.num_data_devices, layout.sampler.num_shards
        for rank, loader in enumerate(layout.loaders(numbered_store)):
            for super_batch in loader:
                whole = rows_of(super_batch.to(CPU))
                assert len(super_batch) == super_batch.num_rows == len(whole)
                assert len(super_batch.batches) == layout.num_devices
                parts = [rows_of(batch) for batch in super_batch.batches]
                assert sorted(joined(parts)) == sorted(whole)
                for index, rows in enumerate(parts):
                    consumer = rank + layout.size * index
                    assert {row % shards % total for row in rows} <= {consumer}
                    # What a device delivers, it delivers in the order of the epoch.
                    assert rows == [row for row in whole if row in set(rows)]

    def test_many_small_steps_cross_the_blocks_of_the_order(self, numbered_store: Stores) -> None:
        # More rows than are ordered at once, in steps of which many are taken together.
        store = numbered_store(9_000, 24)
        loader = make_loader(store, 4, 1, shuffle=True)
        sampler = make_sampler(9_000, 24, 0, True)
        rows = epoch_rows(loader)
        assert {len(step) for step in rows} == {4}
        assert joined(rows) == order_rows(sampler, 0, 0, 9_000)


def test_drop_last_that_leaves_no_step_is_refused(numbered_store: Stores) -> None:
    words = r"37 rows do not fill one step of 40.*drop_last=False"
    with pytest.raises(ValueError, match=words):
        make_loader(numbered_store(37, 24), 4, 10, drop_last=True)


class TestResume:
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_resume_after_any_step_goes_on_with_the_next_row(
        self, numbered_store: Stores, drop_last: bool
    ) -> None:
        make = functools.partial(make_loader, numbered_store(97, 24), shuffle=True)
        check_save_and_resume(functools.partial(make, 4, 3, drop_last=drop_last), 2)
        # On other devices, with another batch size.
        for num_devices, batch_size in ((1, 5), (8, 1), (3, 20)):
            other = functools.partial(make, num_devices, batch_size)
            check_save_and_resume(functools.partial(make, 4, 3), 1, other)

    def test_state_over_several_processes_is_the_same(self, numbered_store: Stores) -> None:
        ranks = [make_loader(numbered_store(97, 24), 2, 3, rank=r, size=3) for r in range(3)]
        for loader in ranks:
            loader.set_epoch(4)
        for _ in zip(*ranks, strict=True):
            states = [loader.state_dict() for loader in ranks]
            assert states[0] == states[1] == states[2]
        assert states[0]["epoch"] == 4
        assert states[0]["position"] == 97

    def test_each_process_continues_with_its_own_positions(self, numbered_store: Stores) -> None:
        store = numbered_store(97, 24)
        # The position of the state is not a multiple of the number of processes.
        saved = make_loader(store, 1, 5, shuffle=True)
        list(take_steps(saved, 1))
        for rank in range(2):
            loader = make_loader(store, 1, 6, rank=rank, size=2, shuffle=True, residency="host")
            rows = joined(epoch_rows(_with_state(loader, saved)))
            assert rows == order_rows(loader.order, 0, 0, 97)[5 + (rank - 5) % 2 :: 2]

    @pytest.mark.parametrize("transform", [None, untouched])
    @pytest.mark.parametrize(("num_devices", "size"), [(8, 1), (1, 8), (2, 4)])
    def test_state_that_leaves_too_few_rows_is_refused(
        self, numbered_store: Stores, num_devices: int, size: int, transform: Any
    ) -> None:
        store = numbered_store(97, 24)
        # One row more or less than there are data devices.
        enough, too_few = (make_loader(store, 1, 1) for _ in range(2))
        list(take_steps(enough, 89)), list(take_steps(too_few, 90))
        rows = []
        for rank in range(size):
            make = functools.partial(
                make_loader, store, num_devices, 4, rank=rank, size=size, transform=transform
            )
            rows += epoch_rows(_with_state(make(), enough))
            with pytest.raises(ValueError, match=r"7 rows .* for 8.*at most 7"):
                len(_with_state(make(), too_few))
            assert epoch_rows(_with_state(make(drop_last=True), too_few)) == []
        assert [len(step) for step in rows] == [8 // size] * size
        assert sorted(joined(rows)) == list(range(89, 97))


def _with_state(loader: SuperBatchLoader, saved: SuperBatchLoader) -> SuperBatchLoader:
    loader.load_state_dict(saved.state_dict())
    return loader


class Pairs(torch.utils.data.Dataset[Any]):
    """Samples of a given structure around a vector, an array and a number."""

    def __init__(self, structure: Callable[..., Any] = lambda *leaves: (leaves[0], leaves[2])):
        self.structure = structure

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < 20:
            raise IndexError(index)
        return self.structure(torch.full((2,), float(index)), np.arange(3) + index, index)


Named = namedtuple("Named", ["vector", "number"])


@tensorclass
class Example:
    vector: Tensor
    number: Tensor


@dataclasses.dataclass
class Mutable:
    vector: Any
    inner: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    vector: Any
    number: Any

    def __post_init__(self) -> None:
        assert isinstance(self.number, int), "a batch is not made by __init__"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    vector: Any
    number: Any


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name))
    else:
        for child in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(child)


STRUCTURES: dict[str, Callable[..., Any]] = {
    "tensor": lambda vector, array, number: vector,
    "number": lambda vector, array, number: number,
    "tuple": lambda vector, array, number: (vector, array, number),
    "list": lambda vector, array, number: [vector, number],
    "dict": lambda vector, array, number: {"vector": vector, "number": number},
    "int keys": lambda vector, array, number: {0: vector, 7: number},
    "namedtuple": lambda vector, array, number: Named(vector, number),
    "nested": lambda vector, array, number: (
        {"a": [vector, {"b": array}], "c": Named(number, (vector, {"d.e": number}))},
        number,
    ),
}


class TestStructure:
    @pytest.mark.parametrize("transform", [None, untouched])
    @pytest.mark.parametrize("num_devices", [1, 2])
    @pytest.mark.parametrize("name", STRUCTURES)
    def test_batch_of_any_structure_is_that_of_default_collate(
        self, tmp_path: Path, name: str, num_devices: int, transform: Any
    ) -> None:
        dataset = Pairs(STRUCTURES[name])
        batches = load_pairs(dataset, tmp_path, num_devices, transform)
        samples = [dataset[index] for index in range(8)]
        assert_same(batches[0], default_collate(samples))

    def test_batch_of_dataclasses_is_one_with_batched_fields(self, tmp_path: Path) -> None:
        dataset = Pairs(
            lambda vector, _, number: Mutable(Frozen(vector, number), Named(vector, number))
        )
        batch = load_pairs(dataset, tmp_path, 2, untouched)[0]
        assert (type(batch), type(batch.vector), type(batch.inner)) == (Mutable, Frozen, Named)
        for part in (batch.vector, batch.inner):
            assert part.number.tolist() == part.vector[:, 0].tolist() == list(range(8))

    @pytest.mark.parametrize(
        "make",
        [
            lambda vector, number: defaultdict(list, a=vector, b=number),
            lambda vector, number: OrderedDict(b=number, a=vector),
            lambda vector, number: deque([vector, number], maxlen=2),
            lambda vector, number: Slotted(vector, number),
            lambda vector, number: Mutable(vector, Slotted(number, [vector])),
            lambda vector, number: MappingProxyType({"a": vector, "b": number}),
            lambda vector, number: ChainMap({"a": vector, "b": number}),
            lambda vector, number: Example(vector, number, batch_size=[len(number)]),
            lambda vector, number: TensorDict(
                {"part": Example(vector, number, batch_size=[len(number)])}, [len(number)]
            ),
        ],
        ids=[
            *(
                "defaultdict",
                "OrderedDict",
                "deque",
                "slots",
                "nested dataclasses",
                "proxy",
                "chain",
            ),
            *("tensorclass", "tensorclass in a TensorDict"),
        ],
    )
    def test_container_that_a_transform_makes_is_kept(self, tmp_path: Path, make: Any) -> None:
        def transform(batch: Any) -> Any:
            vector, number = batch
            return make(vector, number)

        dataset = Pairs()
        found = load_pairs(dataset, tmp_path, 2, transform)[0]
        expected = make(*load_pairs(dataset, tmp_path, 2, None)[0])
        assert type(found) is type(expected)
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        torch.testing.assert_close(list(tensors_in(found)), list(tensors_in(expected)))
        if is_tensor_collection(found):
            assert found.batch_size == expected.batch_size
            assert (found.clone() == expected).all()


def load_pairs(dataset: Pairs, path: Path, num_devices: int, transform: Any) -> list[Any]:
    store = build_store(dataset, path / "store", num_shards=4, progress=False)
    split, collate = make_split(store, num_devices), store.schema.make_builder(dataset[0])
    loader = SuperBatchLoader(
        split,
        cpus(num_devices),
        sampler_over(split.pool),
        8 // num_devices,
        collate=collate,
        transform=transform,
    )
    return [super_batch.to(CPU) for super_batch in loader]


class Weighted(torch.autograd.Function):
    """Saves its input for backward, as it is."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(batch)
        return (batch * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (batch,) = ctx.saved_tensors
        return None, gradient * batch.sum()


def saved_for_backward(super_batch: SuperBatch) -> tuple[Tensor, Tensor]:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    return Weighted.apply(super_batch.to(CPU)["row"], weight), weight


def gradient(kept: tuple[Tensor, Tensor]) -> Any:
    return torch.autograd.grad(*kept, retain_graph=True)[0].tolist()


#: Ways to hold on to memory of a super-batch: what is kept, and how it is read.
KEEPERS: dict[str, tuple[Callable[[SuperBatch], Any], Callable[[Any], Any]]] = {
    "super-batch": (lambda step: step, lambda kept: rows_of(kept.to(CPU))),
    "batch": (lambda step: step.to(CPU), rows_of),
    "leaf": (lambda step: step.to(CPU)["image"], Tensor.tolist),
    "view": (lambda step: step.to(CPU)["image"][-1:, 0, 1], Tensor.tolist),
    "detached": (lambda step: step.to(CPU)["row"].detach(), Tensor.tolist),
    "other dtype": (lambda step: step.to(CPU)["row"].view(torch.uint8), Tensor.tolist),
    "transposed": (lambda step: step.to(CPU)["image"].mT, Tensor.tolist),
    "numpy": (lambda step: step.to(CPU)["image"].numpy(), np.ndarray.tolist),
    "numpy view": (lambda step: step.to(CPU)["row"].numpy()[1:], np.ndarray.tolist),
    "memoryview": (lambda step: memoryview(step.to(CPU)["row"].numpy()), memoryview.tolist),
    "dlpack": (lambda step: np.from_dlpack(step.to(CPU)["row"]), np.ndarray.tolist),
    "storage": (lambda step: step.to(CPU)["image"].untyped_storage(), list),
    "parts": (lambda step: step.batches, lambda kept: [rows_of(batch) for batch in kept]),
    "one part": (lambda step: step.batches[-1]["row"], Tensor.tolist),
    "backward": (saved_for_backward, gradient),
}


class Kept:
    """Memory that is held, and what was in it when it was taken hold of."""

    def __init__(self, name: str, super_batch: SuperBatch) -> None:
        keep, self._read = KEEPERS[name]
        self._kept = keep(super_batch)
        self._expected = self._read(self._kept)

    def check(self) -> None:
        assert self._read(self._kept) == self._expected


class TestKeeping:
    @pytest.mark.parametrize("keeper", KEEPERS)
    @pytest.mark.parametrize("transform", [None, untouched])
    @pytest.mark.parametrize("num_devices", [1, 4])
    def test_everything_kept_of_an_epoch_is_never_overwritten(
        self, numbered_store: Stores, num_devices: int, transform: Any, keeper: str
    ) -> None:
        loader = make_loader(
            numbered_store(96, 24, HEAVY), num_devices, 12 // num_devices, transform=transform
        )
        kept = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            kept += [Kept(keeper, super_batch) for super_batch in loader]
        for one in kept:
            one.check()

    @pytest.mark.parametrize("transform", [None, untouched])
    @pytest.mark.slow
    def test_batches_kept_in_another_process_are_never_overwritten(
        self, numbered_store: Stores, transform: Any
    ) -> None:
        expected = []
        with holding_process() as (inbox, outbox):
            store = numbered_store(96, 24, HEAVY)
            for super_batch in make_loader(store, 2, 4, transform=transform):
                batch = super_batch.to(CPU)
                expected.append(rows_of(batch))
                inbox.put(batch["row"])
                del batch, super_batch
                # Now the other process holds it, and this one does not.
                assert outbox.get(timeout=60) == len(expected)
            inbox.put(None)
            assert outbox.get(timeout=60) == expected

    @pytest.mark.parametrize("transform", [None, untouched])
    def test_batches_not_kept_use_the_same_memory(
        self, numbered_store: Stores, transform: Any
    ) -> None:
        loader = make_loader(numbered_store(96, 24, HEAVY), 2, 2, transform=transform)
        addresses: Counter[int] = Counter()
        for super_batch in loader:
            batch = super_batch.to(CPU)
            addresses[batch["row"].untyped_storage().data_ptr()] += 1
            del batch, super_batch
        assert sum(addresses.values()) == 24
        assert len(addresses) <= 2

    def test_small_steps_share_memory_and_use_it_again(self, numbered_store: Stores) -> None:
        loader = make_loader(numbered_store(9_000, 24), 2, 15)
        addresses: Counter[int] = Counter()
        for super_batch in loader:
            addresses[super_batch.to(CPU)["row"].untyped_storage().data_ptr()] += 1
            del super_batch
        assert sum(addresses.values()) == 300
        assert len(addresses) <= 4


@pytest.mark.parametrize("transform", [None, untouched])
def test_loader_used_in_inference_mode_trains_after_it(
    numbered_store: Stores, transform: Any
) -> None:
    loader = make_loader(numbered_store(97, 24), 2, transform=transform)
    with torch.inference_mode():
        inside = epoch_rows(loader)
        steps = iter(loader)
        next(steps).to(CPU)
    # The epoch that was begun there, and another one.
    for each in (steps, loader):
        train(each)
    with torch.inference_mode():
        assert epoch_rows(loader) == inside


def train(steps: Iterator[SuperBatch] | SuperBatchLoader) -> None:
    """What training does with a batch and inference tensors forbid: save it, change it."""
    for super_batch in steps:
        batch = super_batch.to(CPU)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss = Weighted.apply(batch["row"], weight)
        loss.backward()
        assert weight.grad == batch["row"].sum()
        batch["row"].add_(1)


class holding_process:  # noqa: N801  (used as a function)
    """A process that keeps what is put into its inbox."""

    def __enter__(self) -> tuple[Any, Any]:
        context = torch.multiprocessing.get_context("spawn")
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=keep_batches, args=(self.inbox, self.outbox))
        with preloaded_processes():
            self.process.start()
        return self.inbox, self.outbox

    def __exit__(self, *exception: object) -> None:
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for queue in (self.inbox, self.outbox):
            queue.close()
            queue.join_thread()
        resource_sharer.stop()
        assert self.process.exitcode == 0


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("residency", ["mmap", "device", "stream"])
def test_loader_that_is_dropped_lets_go_of_its_rows_at_once(
    numbered_store: Stores, residency: str, shuffle: bool
) -> None:
    # Rows may be gigabytes of a device: they must not wait for the garbage collector.
    gc.collect()
    gc.disable()
    try:
        loader = make_loader(numbered_store(97, 24), residency=residency, shuffle=shuffle)
        on_device = assembled(loader)
        steps = iter(on_device)
        next(steps)
        split = weakref.ref(loader._rows)
        assert split() is not None
        del loader, on_device, steps
        assert split() is None
    finally:
        gc.enable()
