"""Reading ahead: the rows of the mapping, in bounded memory, by a thread that always ends."""

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.store import Store, build_store
from tests.support.preloaded import END_WHOLLY, run
from tests.support.rows import (
    CPU,
    NumberedRows,
    epoch_rows,
    joined,
    loader_over,
    make_loader,
    make_split,
    rows_of,
)

pytestmark = pytest.mark.slow


Stores = Callable[..., Store]
ROOT = Path(__file__).parents[2]


def untouched(batch: Any) -> Any:
    """With a transform, every data device takes a batch of its own."""
    return batch


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "block-reader" in thread.name]


class TestRows:
    def test_all_dtypes_and_shapes_are_read_as_they_are(self, tmp_path: Path) -> None:
        store = build_store(Kinds(), tmp_path / "kinds", num_shards=3, progress=False)
        batches = []
        for residency in ("stream", "mmap"):
            loader = make_loader(
                store, 2, 5, residency=residency, window=4, shuffle=True, transform=untouched
            )
            batches.append([super_batch.to(CPU) for super_batch in loader])
        for one, other in zip(*batches, strict=True):
            assert one.keys() == other.keys()
            for name, found in one.items():
                assert found.dtype == other[name].dtype
                assert found.shape == other[name].shape
                assert torch.equal(found, other[name])

    def test_loader_that_shuffles_in_larger_windows_than_there_is_memory_for_is_refused(
        self, numbered_store: Stores
    ) -> None:
        store = numbered_store(181, 24)
        split = make_split(store, residency="stream", window=3)
        loader = loader_over(store, split, 4, shuffle=True, shuffle_block=5)
        with pytest.raises(ValueError, match=r"residency='stream'.* 72 "):
            next(iter(loader))
        smaller = loader_over(store, split, 4, shuffle=True, shuffle_block=2)
        assert sorted(joined(epoch_rows(smaller))) == list(range(181))


class Kinds(torch.utils.data.Dataset[Any]):
    """Rows of many dtypes and shapes, one of them without a byte."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < 40:
            raise IndexError(index)
        row = torch.tensor(index)
        return {
            "bool": row % 3 == 0,
            "bytes": (row + torch.arange(4096)).to(torch.uint8),
            "half": (row / 7).to(torch.bfloat16).expand(3),
            "complex": torch.complex(row * 1.0, row * 2.0).expand(2, 2),
            "wide": row.to(torch.float64),
            "none": torch.empty(0, 4),
        }


@pytest.mark.parametrize(
    ("num_rows", "window", "size", "expected"),
    # Two windows; a single one, of 5 rows of each shard; those of a process of several.
    [(600, 3, 1, 2 * 3 * 24), (100, 10**9, 1, 5 * 24), (600, 12, 4, 2 * 12 * 6)],
)
def test_windows_are_all_there_is(
    numbered_store: Stores, num_rows: int, window: int, size: int, expected: int
) -> None:
    # Rows of 128 KiB and more.
    store, before, most = numbered_store(num_rows, 24, 2**17), large_tensors(), 0
    options = {"window": window, "rank": size - 1, "size": size}
    loader = make_loader(store, residency="stream", shuffle=True, **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for step, super_batch in enumerate(loader):
            if step % 20 == 9:
                most = max(most, sum((large_tensors() - before).values()))
            del super_batch
    assert most == expected * 2**17
    loader._rows.release()
    assert not large_tensors() - before


def large_tensors() -> Counter[int]:
    """By address, the bytes of all memory of tensors that is larger than a step here."""
    found: Counter[int] = Counter()
    for tensor in gc.get_objects():
        # Other tests may have left some that have no storage, such as sparse ones.
        is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
        if is_dense and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage.nbytes() > 2**23:
                found[storage._cdata] = storage.nbytes()
    return found


class TestThread:
    def make(self, stores: Stores, **options: Any) -> SuperBatchLoader:
        return make_loader(stores(400, 7), residency="stream", window=5, shuffle=True, **options)

    @pytest.mark.parametrize("end", ["fails", "left", "dropped"])
    def test_epoch_that_is_left_early_leaves_no_thread(
        self, numbered_store: Stores, end: str
    ) -> None:
        steps: Iterator[SuperBatch] | None = iter(self.make(numbered_store))
        assert steps is not None
        with suppress(KeyError):
            for super_batch in steps:
                assert reading_threads()
                del super_batch
                if end == "fails":
                    raise KeyError
                break
        if end == "left":
            steps.close()  # type: ignore[attr-defined]
        del steps
        assert not reading_threads()

    def test_release_ends_the_thread_and_the_iteration(self, numbered_store: Stores) -> None:
        loader = self.make(numbered_store)
        steps = iter(loader)
        next(steps)
        loader._rows.release()
        assert not reading_threads()
        with pytest.raises(RuntimeError, match=r"freed by teardown\(\)"):
            # Small steps that were taken before may still come.
            list(steps)
        with pytest.raises(RuntimeError, match=r"freed by teardown\(\)"):
            next(iter(loader))

    def test_several_iterations_at_once_do_not_disturb_each_other(
        self, numbered_store: Stores
    ) -> None:
        loader = self.make(numbered_store)
        whole = epoch_rows(loader)
        one, other = iter(loader), iter(loader)
        found: list[list[list[int]]] = [[], []]
        for _ in range(3):
            found[0].append(rows_of(next(one).to(CPU)))
        for super_batch in other:
            found[1].append(rows_of(super_batch.to(CPU)))
            del super_batch
        found[0] += [rows_of(super_batch.to(CPU)) for super_batch in one]
        assert found == [whole, whole]


class TestFailures:
    @pytest.mark.parametrize("with_direct_reads", [True, False])
    def test_file_cut_short_while_it_is_read_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_direct_reads: bool
    ) -> None:
        if not with_direct_reads:
            monkeypatch.delattr(os, "O_DIRECT")
        dataset = NumberedRows(400, 5000)
        store = build_store(dataset, tmp_path / "rows", num_shards=4, progress=False)
        loader = make_loader(store, residency="stream", window=5)
        steps = iter(loader)
        next(steps)
        os.truncate(store.files / "pad.memmap", 600_001)
        with pytest.raises(StoreError, match=r"pad\.memmap has 600001 bytes"):
            list(steps)
        assert not reading_threads()
        # It does not go on with other rows.
        assert next(steps, None) is None

    def test_disk_that_cannot_be_read_is_an_error_that_names_the_file(self, tmp_path: Path) -> None:
        store = build_store(NumberedRows(400), tmp_path / "rows", num_shards=4, progress=False)
        loader = make_loader(store, residency="stream", window=5)
        path = store.files / "image.memmap"
        broken = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            # The kernel fails to read where no memory is mapped, as it fails at a broken disk.
            for name in os.listdir("/proc/self/fd"):
                if link_of(name) == str(path):
                    os.dup2(broken, int(name))
        finally:
            os.close(broken)
        with pytest.raises(OSError, match=r"Input/output error.*image\.memmap") as caught:
            next(iter(loader))
        assert caught.value.filename == str(path)
        assert not reading_threads()

    def test_store_replaced_while_it_is_opened_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows"
        store = build_store(NumberedRows(400), path, num_shards=4, progress=False)
        build_store(NumberedRows(400, 3), path, num_shards=4, overwrite=True, progress=False)
        with pytest.raises(StoreError, match="replaced or removed"):
            make_split(store, residency="stream")


def link_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


PROGRAM = """
import os, sys
from lightning_memmap import open_store
from tests.support.rows import CPU, epoch_rows, joined, make_loader, rows_of

loader = make_loader(open_store(sys.argv[1]), residency="stream", window=5, shuffle=True)
steps = iter(loader)
seen = rows_of(next(steps).to(CPU))
child = os.fork()
rest = [row for batch in steps for row in rows_of(batch.to(CPU))]
again = joined(epoch_rows(loader))
assert seen + rest == again
assert sorted(again) == list(range(400))
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
# Two iterations are under way, and their threads wait: one that would go on, and one that fails.
left = [iter(loader), iter(loader)]
print([rows_of(next(steps).to(CPU)) == seen for steps in left], flush=True)
raise KeyError("mine")
"""


def test_program_forks_and_ends_while_rows_are_read(tmp_path: Path) -> None:
    store = build_store(NumberedRows(400), tmp_path / "rows", num_shards=7, progress=False)
    program = run("-W", "ignore", "-c", PROGRAM, store.path, cwd=ROOT, **{END_WHOLLY: "1"})
    assert (program.returncode, program.stdout) == (1, "[True, True]\n"), program.stderr
    # Of the one error, and of no thread.
    assert program.stderr.count("Traceback") == 1
    assert program.stderr.endswith("KeyError: 'mine'\n")
