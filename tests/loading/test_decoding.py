"""Encoded images: decoded as they are stored decoded, from any place, in any order."""

import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import DatasetError
from lightning_memmap.loading import Scaled, decoding, fetch
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.schema import Decode
from lightning_memmap.store import Store, build_store
from tests.support.datasets import DECODE, HEIGHT, WIDTH, EncodedImages, assert_images, encoded
from tests.support.models import Brightness, make_trainer
from tests.support.rows import cpus, make_split
from tests.support.rows import loader_over as rows_loader

NUM_ROWS = 90


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("images") / "s"
    return build_store(EncodedImages(NUM_ROWS), path, num_shards=12, progress=False)


def loader_over(
    store: Store, rows: SplitRows, batch_size: int, shuffled: bool = True, **options: Any
) -> SuperBatchLoader:
    options = {"collate": LayoutCollate(store.schema, None, DECODE), **options}
    return rows_loader(store, rows, batch_size, shuffle=shuffled, seed=3, **options)


def take_all(loader: SuperBatchLoader) -> None:
    for step in loader:
        step.to("cpu")


class Counter:
    """Counts the images that are decoded, and the threads that do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.threads: set[str] = set()
        self._decode = decoding.decode_image
        monkeypatch.setattr(decoding, "decode_image", self)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        self.threads.add(threading.current_thread().name)
        sleep(0.001)
        return self._decode(*arguments)


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_next_step_is_decoded_while_a_step_is_used_and_each_image_once(
    store: Store, num_devices: int, transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise, the images of steps that are as small as these are in one fetch.
    monkeypatch.setattr(fetch, "_FETCH_STEPS", 1)
    rows = make_split(store, num_devices, decode=DECODE)
    counter = Counter(monkeypatch)
    loader = loader_over(
        store, rows, 12 // num_devices, transform=transform, topology=cpus(num_devices)
    )
    together = 12
    steps = iter(loader)
    next(steps)
    deadline = monotonic() + 20
    while counter.count < 2 * min(2 * together, NUM_ROWS) and monotonic() < deadline:
        sleep(0.01)
    assert counter.count == 2 * min(2 * together, NUM_ROWS)
    for _ in steps:
        pass
    # Except the last two steps, which are shorter than the ones before.
    assert 2 * NUM_ROWS <= counter.count <= 2 * (NUM_ROWS + 12)


def test_epoch_that_is_alive_as_the_interpreter_ends_is_closed_quietly(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shutdown(*_: object, **__: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'Empty'")

    steps = iter(loader_over(store, make_split(store, 1, decode=DECODE), 6))
    next(steps)
    with monkeypatch.context() as patched:
        # As it is then: the modules that this needs are gone.
        patched.setattr(ThreadPoolExecutor, "shutdown", shutdown)
        patched.setattr(sys, "is_finalizing", lambda: True)
        steps.close()  # type: ignore[attr-defined]
    del steps
    gc.collect()
    while _num_threads():
        sleep(0.001)


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "released"])
def test_threads_end_with_the_epoch(
    store: Store, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_FETCH_STEPS", 1)
    rows = make_split(store, 2, decode=DECODE)
    steps = iter(loader_over(store, rows, 6, transform=lambda batch: batch, topology=cpus(2)))
    next(steps)
    assert _num_threads() > 0
    if end == "exhausted":
        for _ in steps:
            pass
    elif end == "closed":
        steps.close()  # type: ignore[attr-defined]
    elif end == "dropped":
        del steps
        gc.collect()
    else:
        rows.release()
        assert _num_threads() == 0
        with pytest.raises(RuntimeError, match="were freed by teardown"):
            next(steps)
    assert _num_threads() == 0


def _num_threads() -> int:
    return sum(thread.name.startswith("decode") for thread in threading.enumerate())


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "None"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 10\n", "known format"),
        (b"plainly no image", "known format"),
        (EncodedImages(1)[0]["image"][:200], "it cannot be decoded"),
    ],
)
def test_row_that_is_no_image_is_named(
    tmp_path: Path, data: bytes, reason: str, num_devices: int
) -> None:
    dataset = EncodedImages(40, broken={29: data, 31: data})
    store = build_store(dataset, tmp_path / "s", num_shards=4, progress=False)
    rows = make_split(store, num_devices, decode=DECODE)
    loader = loader_over(store, rows, 20 // num_devices, shuffled=False, topology=cpus(num_devices))
    with pytest.raises(DatasetError, match=f"^field 'image', row 29: .*{reason}.*: repair"):
        take_all(loader)


def test_image_of_another_size_is_named_with_the_ways_out(tmp_path: Path) -> None:
    turned = encoded(np.zeros((WIDTH, HEIGHT, 3), np.uint8))
    larger = encoded(np.zeros((HEIGHT + 1, WIDTH, 3), np.uint8))
    for name, other in (("turned", turned), ("larger", larger)):
        dataset = EncodedImages(20, broken={7: other})
        store = build_store(dataset, tmp_path / name, num_shards=4, progress=False)
        loader = loader_over(store, make_split(store, 1, decode=DECODE), 5)
        with pytest.raises(
            DatasetError,
            match=rf"row 7: .*\d+ x \d+ .*{HEIGHT} x {WIDTH}"
            r".*Decode\(size=.*or store them decoded",
        ):
            take_all(loader)
        decode = {**DECODE, "image": Decode(size=(5, 6))}
        for step in loader_over(store, make_split(store, 1, decode=decode), 5):
            assert step.to("cpu")["image"].shape[1:] == (3, 5, 6)


def test_first_row_that_is_no_image_is_named_at_set_up(tmp_path: Path) -> None:
    dataset = EncodedImages(20, broken={0: b"nothing"})
    store = build_store(dataset, tmp_path / "s", num_shards=4, progress=False)
    with pytest.raises(DatasetError, match="field 'image', row 0: "):
        make_split(store, 1, decode=DECODE)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"image": torch.zeros(3, 4, 4, dtype=torch.uint8)}, "stored decoded, leave it out"),
        ({"image": "a.png"}, "return bytes in the dataset"),
        ({"image": 5}, "return bytes in the dataset"),
    ],
)
def test_field_that_has_no_bytes_is_not_decoded(
    tmp_path: Path, sample: dict[str, Any], words: str
) -> None:
    store = build_store([sample] * 4, tmp_path / "s", progress=False)
    with pytest.raises(ValueError, match=f"field 'image' is .*{words}"):
        make_split(store, 1, decode={"image": Decode()})
    with pytest.raises(ValueError, match=f"field 'image' is .*{words}"):
        LayoutCollate(store.schema, None, {"image": Decode()})


@pytest.mark.parametrize("residency", ["mmap", "stream"])
def test_process_that_was_forked_meanwhile_goes_on(
    store: Store, residency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_FETCH_STEPS", 1)
    rows = make_split(store, 1, residency=residency, window=1, decode=DECODE)
    options: Any = {"shuffled": False, "shuffle_block": 1, "transform": lambda batch: batch}
    loader = loader_over(store, rows, 6, **options)
    order = loader.order.dataset_rows(0, range(NUM_ROWS)).tolist()
    steps = iter(loader)
    next(steps)
    if (child := os.fork()) == 0:
        status = 1
        try:
            assert_images(next(steps).to("cpu"), order[6:12])
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert_images(next(steps).to("cpu"), order[6:12])
    steps.close()  # type: ignore[attr-defined]


def test_images_that_are_none_are_refused(tmp_path: Path) -> None:
    pixels = np.zeros((4, 5, 3), np.uint8)
    rows: Any = [{"i": encoded(pixels) if row % 3 else None} for row in range(24)]
    data = MemmapDataModule(rows, store_dir=tmp_path, batch_size=8, decode={"i": Decode()})
    data.prepare_data()
    with pytest.raises(ValueError, match="field 'i' may be missing or several"):
        _first_batch(data)


def _first_batch(data: MemmapDataModule) -> Any:
    data.setup("fit")
    return next(iter(data.train_dataloader()))


class Dots:
    """Photographs of one white pixel each, in files of many sizes, and where that pixel is."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        random = np.random.default_rng(row)
        height, width = (int(size) for size in random.integers(40, 90, 2))
        # Inside of the part that is not cut off.
        side = min(height, width) // 2 - 9
        x = width // 2 + int(random.integers(-side, side))
        y = height // 2 + int(random.integers(-side, side))
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[y - 2 : y + 3, x - 2 : x + 3] = 255
        return {"image": encoded(pixels), "row": row, "point": torch.tensor([x + 0.5, y + 0.5])}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("residency", ["mmap", "stream"])
@pytest.mark.parametrize("numbered", [False, True])
def test_scale_and_offset_bring_points_of_a_file_to_its_scaled_image(
    tmp_path: Path, devices: int, residency: str, numbered: bool
) -> None:
    data = MemmapDataModule(
        Dots(),
        store_dir=tmp_path,
        batch_size=8,
        residency=residency,
        decode={"image": Decode(size=(64, 48), with_scale=True)},
        with_row_numbers=numbered,
        transform=(lambda batch: batch) if devices > 1 else None,
    )
    batches: list[Any] = []

    class Module(Brightness):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(batch)
            return 0 * torch.stack([each.sum() for each in self.parameters()]).sum()

    trainer = make_trainer(
        tmp_path,
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=1,
        limit_val_batches=0,
    )
    trainer.fit(Module(), datamodule=data)
    assert sorted(row for batch in batches for row in batch["row"].tolist()) == [*range(40)]
    for batch in batches:
        assert isinstance(batch["image"], Scaled)
        values, scale, offset = batch["image"]
        assert values.shape[1:] == (3, 64, 48)
        if numbered:
            assert torch.equal(batch["row"], batch["row_number"])
        grey = values.float().mean(1)
        grey = grey / grey.sum((1, 2), keepdim=True)
        y = (grey.sum(2) * (torch.arange(64) + 0.5)).sum(1)
        x = (grey.sum(1) * (torch.arange(48) + 0.5)).sum(1)
        expected = batch["point"] * scale[:, None] + offset
        torch.testing.assert_close(torch.stack([x, y], 1), expected, rtol=0, atol=0.3)
