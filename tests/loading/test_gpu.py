"""What the loading of data does on a GPU, against the same on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap.loading import device_streams
from lightning_memmap.loading.device_streams import upload
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.nested import dense_tensors, named_leaves, send_leaf, with_leaves
from lightning_memmap.loading.split import load_split
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.loading.variable_rows import make_variable_rows
from lightning_memmap.placement.plan import Residency, plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import ShuffledSampler
from lightning_memmap.schema.fields import DTYPES, Field
from lightning_memmap.schema.forms import read_layouts
from lightning_memmap.store import Store, build_store
from lightning_memmap.transforms import OnSuperBatch
from tests.support.datasets import DECODE, EncodedImages, Ragged, assert_images, assert_ragged
from tests.support.models import IS_SIMULATED
from tests.support.rows import CPU, assembled, loader_over, make_loader, size_of, split_with

Stores = Callable[..., Store]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: So many bytes in each row, and so many operators of a transform, that copies and computations
#: overlap. Simulated devices need no time.
HEAVY, MANY = (2**12, 2) if IS_SIMULATED else (2**18, 50)


def scaled(batch: Any, generator: torch.Generator) -> Any:
    """Long enough on a side stream that a use without a wait would come too early."""
    image = batch["image"].float()
    for _ in range(MANY):
        image = image * 1.5 / 1.5
    noise = torch.rand(len(image), generator=generator, device=image.device)
    return {**batch, "noise": noise, "image": image.round().to(torch.uint8)}


def gpu_loader(store: Store, residency: str, **options: Any) -> SuperBatchLoader:
    devices = (torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1))
    topology = DataTopology(devices)
    placement = plan_placement(
        {"train": size_of(store.manifest, topology)},
        topology,
        residency,
        budget_bytes=dict.fromkeys((*devices, torch.device("cpu")), 2**40),
    )
    split = load_split(store, topology, placement.splits["train"])
    return loader_over(store, split, 2, topology, shuffle=True, **options)


@pytest.mark.parametrize("residency", ["device", "host", "mmap"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("transform", [None, scaled])
def test_batches_on_a_gpu_are_those_on_the_cpu(
    numbered_store: Stores, residency: str, prefetch: int, transform: Any
) -> None:
    store, root = numbered_store(96, 24, HEAVY), torch.device("cuda", 0)
    expected = make_loader(store, 2, 2, shuffle=True)
    loader = gpu_loader(store, residency, transform=transform)
    for epoch in range(2):
        expected.set_epoch(epoch)
        loader.set_epoch(epoch)
        found = []
        for batch in assembled(loader, root, prefetch=prefetch):
            # At once, on the current sampler.
            found.append({key: batch[key] * 1 for key in ("row", "image")})
            assert {leaf.device for leaf in batch.values()} == {root}
        for one, other in zip(found, expected, strict=True):
            whole = other.to("cpu")
            assert all(torch.equal(one[key].cpu(), whole[key]) for key in one)


def moved_to_last(batch: Any, generator: torch.Generator) -> Any:
    """Leaves a tensor on another device than that of the batch, and one on the CPU."""
    batch, last = scaled(batch, generator), torch.device("cuda", torch.cuda.device_count() - 1)
    return {**batch, "image": batch["image"].to(last) * 2, "row": batch["row"].cpu()}


@pytest.mark.parametrize("residency", ["device", "host"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_transform_may_move_tensors_of_a_super_batch(
    numbered_store: Stores, residency: str, prefetch: int
) -> None:
    store, root = numbered_store(96, 24, HEAVY), torch.device("cuda", 0)
    expected = make_loader(store, 2, 2, shuffle=True)
    loader = gpu_loader(store, residency, transform=OnSuperBatch(moved_to_last))
    batches = [batch | {"image": batch["image"] * 1} for batch in loader.assembled(root, prefetch)]
    assert {batch["image"].device.index for batch in batches} == {torch.cuda.device_count() - 1}
    for batch, other in zip(batches, expected, strict=True):
        whole = other.to("cpu")
        assert torch.equal(batch["row"], whole["row"])
        assert torch.equal(batch["image"].cpu(), whole["image"] * 2)


def test_super_batch_of_a_gpu_that_is_brought_to_the_cpu_is_there(numbered_store: Stores) -> None:
    store = numbered_store(96, 24, HEAVY)
    pairs = zip(gpu_loader(store, "device"), make_loader(store, 2, 2, shuffle=True), strict=True)
    for one, other in pairs:
        found, expected = one.to("cpu"), other.to("cpu")
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_staging_brings_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_streams, "_PINNED_BYTES", 40_000)
    rows = torch.randint(0, 256, (1000, 3001), dtype=torch.uint8)
    target = torch.zeros_like(rows, device="cuda")
    upload([rows], target)
    assert torch.equal(target.cpu(), rows)


@pytest.fixture(scope="module")
def ragged_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(Ragged(96), tmp_path_factory.mktemp("ragged") / "s", progress=False)


@pytest.mark.parametrize("form", ["pad", "jagged", "list"])
@pytest.mark.parametrize(
    ("residency", "transform"),
    [("device", None), ("device", dict), ("host", None), ("mmap", dict)],
)
def test_rows_that_differ_in_length_on_a_gpu_are_those_of_the_dataset(
    ragged_store: Store, form: str, residency: str, transform: Any
) -> None:
    dataset, root, store = Ragged(96), torch.device("cuda", 0), ragged_store
    layout: dict[str, Any] = dict.fromkeys(("sound", "ids"), form)
    layout["image"] = "list" if form == "jagged" else form
    collate = LayoutCollate(store.schema, read_layouts(layout))
    loader = gpu_loader(store, residency, transform=transform, collate=collate)
    order = loader.order.dataset_rows(0, range(96)).tolist()
    for batch in loader.assembled(root, prefetch=2):
        rows, order = order[: len(batch["row"])], order[len(batch["row"]) :]
        tensors = [tensor for _, leaf in named_leaves(batch) for tensor in dense_tensors(leaf)]
        assert all(tensor.device == root for tensor in tensors)
        on_cpu = with_leaves(batch, iter([send_leaf(leaf, CPU) for _, leaf in named_leaves(batch)]))
        assert_ragged(on_cpu, [dataset[row] for row in rows])
    assert not order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_variable", [1, 2])
def test_rows_of_any_dtype_are_padded_and_packed_on_a_gpu(dtype: str, num_variable: int) -> None:
    random = np.random.default_rng(num_variable)
    shapes = random.integers(0, 5, (7, num_variable)).tolist()
    rows = [torch.from_numpy(random.integers(0, 2, (*shape, 3))) for shape in shapes]
    field = Field("x", DTYPES[dtype], (*[None] * num_variable, 3))
    (here,) = make_variable_rows(field, [row.to(field.dtype) for row in rows]).split_with_sizes([7])
    there, some = here.to(torch.device("cuda", 0)), np.array([3, 1, 0, 6])
    torch.use_deterministic_algorithms(True)
    try:
        pairs = [
            (here.padded(1, 4).values, there.padded(1, 4).values),
            (here[some].concatenated(), there[some].concatenated()),
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for expected, found in pairs:
        assert found.is_cuda
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("transform", [None, dict])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("residency", ["device", "host", "mmap"])
def test_decoded_images_are_copied_to_the_data_devices(
    tmp_path: Path, residency: str, prefetch: int, transform: Any
) -> None:
    store = build_store(EncodedImages(90), tmp_path / "s", num_shards=12, progress=False)
    root = torch.device("cuda", 0)
    for devices in ((root,), (root, root), (CPU, root)):
        placed = residency if CPU not in devices else "mmap"
        topology = DataTopology(devices)
        rows = split_with(store, topology, (Residency(placed),) * 12, decode=DECODE)
        sampler = ShuffledSampler(rows.pool, 3)
        loader = SuperBatchLoader(
            rows, topology, sampler, 12 // len(devices), transform=transform,
            collate=LayoutCollate(store.schema, None, DECODE),
        )  # fmt: skip
        order = sampler.dataset_rows(0, range(90)).tolist()
        for batch in loader.assembled(root, prefetch):
            assert batch["image"].device == batch["mask"].device == root
            count = len(batch["row"])
            assert_images({name: leaf.cpu() for name, leaf in batch.items()}, order[:count])
            del order[:count]
        assert not order
        for step in loader:
            assert [batch["image"].device for batch in step.batches] == [*devices]
        rows.release()
