"""Guards around every test, warnings of other packages to ignore, and shared stores."""

import atexit
import functools
import gc
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import pytest

# Many processes share few cores. Set before torch is imported, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of programs import the package: it is compiled once, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What is fetched or indexed is kept until the tests end.
if "LIGHTNING_MEMMAP_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="lightning_memmap_cache")
    atexit.register(_cache.cleanup)
    os.environ["LIGHTNING_MEMMAP_CACHE"] = _cache.name
# Lightning sets it where there are GPUs, and a test leaves the environment as it was.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
if version("lightning").startswith("2.5."):
    # It calls functions that jsonargparse has replaced since.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

try:
    import hypothesis
except ModuleNotFoundError:  # A machine with GPUs and without network runs only the tests for GPUs.
    hypothesis = None

if TYPE_CHECKING:
    from lightning_memmap.store import Store
    from tests.support.store.build_server import BuildServer

# torch and the package are imported where they are used: what hands out the tests to processes
# needs neither, and they start after it.

#: Warnings of other packages that say nothing about this one. All others are errors.
_FOREIGN_WARNINGS = (
    # Tests train for fewer steps than Lightning's logging interval.
    "ignore:The number of training batches .* is smaller than the logging interval",
    # Tests run on the CPU even if there is a GPU.
    "ignore:GPU available but not used",
    # torch's loaders fork by default, which Python warns about.
    "ignore:This process .* is multi-threaded, use of fork",
    # Several fits of a test share a directory.
    "ignore:Checkpoint directory .* exists and is not empty",
    # torch's loaders in tests have a few rows and need no worker process.
    "ignore:The '.*_dataloader' does not have many workers",
    # Tests train without rows to validate on, and resume with other callbacks or with none.
    "ignore:You defined a `validation_step`",
    "ignore:Be aware that when using `ckpt_path`",
    # Lightning looks for a checkpoint where it finds a callback that saves some.
    "ignore:.*was called without a model",
    "ignore:.*there is no last checkpoint available",
    # Modules in tests override hooks that data modules have too.
    "ignore:You have overridden `.*` in `LightningModule` but have passed in a",
    # Lightning builds its tree specs from a torch class that torch has renamed.
    "ignore:.*isinstance\\(treespec, LeafSpec\\).* is deprecated",
)
_SETTLE_S = 5.0
_TESTS = Path(__file__).parent


#: All tests of these folders are slow. Elsewhere, modules and tests have the marker.
_SLOW = (
    "contract/resume",
    "contract/strategies",
    "programs/benchmarks",
    "programs/reliability",
)


# What is imported stays: it is looked through for garbage once, when the tests are collected.
gc.disable()

# `--hypothesis-profile thorough` looks for rarer mistakes.
if hypothesis is not None:
    hypothesis.settings.register_profile("quick", max_examples=25, deadline=None)
    hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None)
    hypothesis.settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    for line in _FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    # No test cuts the power: its files need not be on the disk before it goes on.
    os.fsync = lambda descriptor: None
    # pytest-xdist would begin with the modules that have the most tests: the longest test, alone in
    # its module, would come last, and all other processes would wait for it.
    config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier imports no module whose tests are all slow.

    The tests for GPUs import no other modules: a machine with GPUs may lack what these need, and
    pytest runs nothing where one module can't be imported.
    """
    if not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    if config.option.markexpr == "gpu":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return (config.option.markexpr == "not slow" and is_slow(collection_path)) or None


def is_in_slow_folder(path: Path) -> bool:
    return path.relative_to(_TESTS).as_posix().startswith(_SLOW)


@functools.cache
def is_slow(path: Path) -> bool:
    """Whether all tests of a module are slow."""
    return is_in_slow_folder(path) or bool(
        re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow", path.read_text(), re.M)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.installed import remember_entry_points

    remember_entry_points()
    # None of the modules that take long is then what the other processes wait for.
    items.sort(key=lambda item: not is_slow(item.path))
    for item in items:
        if is_in_slow_folder(item.path):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def guard_environment() -> Iterator[None]:
    """A test leaves the environment variables as it found them."""
    before = _environment()
    yield
    after = _environment()
    for name in before.keys() | after.keys():
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    leaked = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    assert not leaked, f"the test changed environment variables: {leaked}"


def _environment() -> dict[str, str]:
    # Until 2.12, torch leaves the place of its own cache there.
    left = "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"
    return {name: value for name, value in os.environ.items() if name not in left}


@pytest.fixture(autouse=True)
def restore_interrupts() -> Iterator[None]:
    """Programs that a test starts can be interrupted, like those that a user starts.

    Otherwise they would inherit an ignored SIGINT from a shell that runs the tests in the
    background, or from Lightning, which ignores it after an interrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def guard_process_group() -> Iterator[None]:
    """A test leaves no process group behind."""
    yield
    import torch

    leaked = torch.distributed.is_available() and torch.distributed.is_initialized()
    if leaked:
        torch.distributed.destroy_process_group()
    assert not leaked, "the test left a process group behind"


@pytest.fixture(autouse=True)
def guard_threads() -> Iterator[None]:
    """A test leaves no thread running."""
    before = _threads()
    yield
    if _threads() - before:
        # An error's traceback may hold a DataLoader's iterator, in a cycle, and it its threads.
        gc.collect()
    deadline = monotonic() + _SETTLE_S
    while (leaked := _threads() - before) and monotonic() < deadline:
        sleep(0.01)
    assert not leaked, f"the test left threads running: {leaked}"


def _threads() -> set[threading.Thread]:
    # The monitor of tqdm and the event loops of zarr and fsspec serve the whole process and never
    # end.
    kept = ("tqdm_monitor", "zarr_io", "asyncio_", "fsspecIO")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(kept)}


@pytest.fixture
def quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes short runs fast that search all objects of the process for parameters: the search
    leaves out the objects that exist already."""
    # Restores the variables that seed_everything sets.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    gc.collect()
    gc.freeze()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each read of rows from a disk."""
    from lightning_memmap.loading.row_file import RowFile

    found: list[int] = []
    read_bytes = RowFile.read_bytes

    def counted(self: RowFile, begin: int, end: int, memory: memoryview) -> None:
        found.append(end - begin)
        read_bytes(self, begin, end, memory)

    monkeypatch.setattr(RowFile, "read_bytes", counted)
    return found


@pytest.fixture(scope="session")
def numbered_store(tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Store]":
    """Builds stores of numbered rows, by rows, shards and extra bytes per row, each one once."""
    from lightning_memmap.store import build_store
    from tests.support.rows import NumberedRows

    directory = tmp_path_factory.mktemp("numbered")

    @functools.cache
    def build(num_rows: int, num_shards: int, pad_bytes: int = 0) -> "Store":
        path = directory / f"{num_rows}-{num_shards}-{pad_bytes}"
        dataset = NumberedRows(num_rows, pad_bytes)
        return build_store(dataset, path, num_shards=num_shards, progress=False)

    return build


@pytest.fixture(scope="session")
def server() -> "Iterator[BuildServer]":
    """The process that starts builders."""
    from tests.support.store.build_server import BuildServer

    with BuildServer() as started:
        yield started


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of stores at URLs. Failed requests are repeated at once."""
    from lightning_memmap.store.remote import files
    from lightning_memmap.store.remote.cache import DIRECTORY

    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_FIRST_PAUSE_S", 0.001)
    return tmp_path / "cache"
