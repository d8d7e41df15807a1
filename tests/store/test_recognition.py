"""Whether a store, or an interrupted build, is of the dataset that is given."""

import itertools
import os
import resource
import signal
import stat
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import DatasetError
from lightning_memmap.store import build_store, open_store, verify_store, writing
from lightning_memmap.store.recognition import check_dataset
from lightning_memmap.store.samples import choose_probe_rows
from tests.support.datasets import Counting
from tests.support.models import set_up
from tests.support.store.build_server import Deadly
from tests.support.store.layout import building_path, files_of, names_in

NUM_ROWS = 3000
UNPROBED = 1234
assert UNPROBED not in choose_probe_rows(NUM_ROWS)

#: Labels where no fingerprint looks for them, as in a file in a directory.
HIDDEN: dict[int, int] = {}


#: Rows that cannot be read, which is not part of any identity.
BROKEN: set[int] = set()


class Labelled(Dataset[int]):
    """Row ``i`` is a label; some were changed."""

    def __init__(self, labels: dict[int, int]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> int:
        if row in BROKEN:
            raise KeyboardInterrupt
        return self.labels.get(row, HIDDEN.get(row, row))


OLD, NEW = Labelled({}), Labelled({UNPROBED: -1})


@pytest.fixture(autouse=True)
def no_hidden_labels() -> None:
    HIDDEN.clear()


def build(dataset: Any, path: Path, **arguments: Any) -> Any:
    return build_store(dataset, path / "s", **{"num_shards": 3, "progress": False, **arguments})


def labels(path: Path) -> list[int]:
    store = open_store(path / "s")
    return [int(store[row]) for row in (0, UNPROBED, NUM_ROWS - 1)]


def interrupt(path: Path, dataset: Labelled, **arguments: Any) -> Path:
    """Begin a build, and end it after the first rows."""
    BROKEN.add(NUM_ROWS - 2)
    with (
        patch.object(writing, "_MAX_BLOCK_ROWS", 2048),
        patch.object(writing, "_MAX_BLOCKS", 1),
        pytest.raises(KeyboardInterrupt),
    ):
        build(Labelled(dataset.labels), path, **arguments)
    BROKEN.clear()
    building = building_path(path / "s")
    assert any((building / "journal").read_bytes())
    return building


# Resuming


def test_interrupted_build_says_what_is_kept_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(tmp_path, OLD)
    (line,) = caplog.messages
    assert line.startswith("interrupted: ")
    assert "of 3,000 rows are kept at" in line
    dataset = Counting(OLD)
    # The wrapper has another identity.
    build(dataset, tmp_path)
    assert set(dataset.rows) == set(range(NUM_ROWS))
    (tmp_path / "again").mkdir()
    interrupt(tmp_path / "again", OLD)
    caplog.clear()
    build(OLD, tmp_path / "again")
    assert caplog.messages[0].startswith("resuming: ")
    assert "to start again, remove" in caplog.messages[0]
    assert labels(tmp_path / "again") == [0, UNPROBED, NUM_ROWS - 1]


def test_build_notes_its_rows_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each look at the clock takes two seconds.
    monkeypatch.setattr(writing, "monotonic", itertools.count(step=2).__next__)
    # The third of ten ranges ends after more than five seconds, and so does every third from then.
    expected, found = {1200: 900, 2100: 1800, NUM_ROWS - 10: 2700}, dict[int, int]()

    class Watching(Labelled):
        def __getitem__(self, row: int) -> int:
            deadline = time.monotonic() + 60
            (journal,) = tmp_path.glob("s/g-*/journal") if row in found else (None,)
            while journal and found[row] < expected[row] and time.monotonic() < deadline:
                found[row] = journal.read_bytes().count(2)
            return row

    found.update(dict.fromkeys(expected, 0))
    monkeypatch.setattr(writing, "_MAX_BLOCK_ROWS", 300)
    monkeypatch.setattr(writing, "_MAX_BLOCKS", 1)
    build(Watching({}), tmp_path)
    assert all(expected[row] <= found[row] <= row for row in expected)


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (NEW, {}, "is not resumed: since then, attribute labels changed"),
        (NEW, {"overwrite": True}, None),
        (OLD, {"overwrite": True, "fingerprint": None}, None),
        (OLD, {"fingerprint": "version 2"}, "its fingerprint was 'version 1' and is 'version 2'"),
        (OLD, {"num_shards": 4}, "it has num_shards=3, and this one num_shards=4"),
    ],
)
def test_build_of_something_else_holds_no_row_of_the_interrupted_one(
    tmp_path: Path,
    dataset: Labelled,
    options: dict[str, Any],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"fingerprint": "version 1"} if dataset is OLD else {}
    interrupt(tmp_path, OLD, **given)
    HIDDEN[UNPROBED] = -1
    caplog.clear()
    build(dataset, tmp_path, **{**given, **options})
    assert labels(tmp_path) == [0, -1, NUM_ROWS - 1]
    assert (reason or "") in caplog.text


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.unlink()
        make(path)

    return plant


def linked(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def hard_linked(path: Path) -> None:
    os.link(path, path.parents[2] / "outside")


def long(path: Path) -> None:
    os.truncate(path, 2**40)


only_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may give a file to another user: run as root to test this"
)


def of_others(path: Path) -> None:
    os.chown(path, 12345, -1)


PLANTED: dict[str, Callable[[Path], None]] = {
    "link": linked,
    "hard link": hard_linked,
    "fifo": replace_by(os.mkfifo),
    "directory": replace_by(os.mkdir),
    "long": long,
    "short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
    "of others": of_others,
    "deep": lambda path: path.write_text("[" * 200_000) and None,
    "digits": lambda path: path.write_text('{"num_rows": ' + "9" * 5000 + "}") and None,
    "no text": lambda path: path.write_bytes(b"\xff\xfe") and None,
}


@pytest.mark.parametrize("name", ["build.json", "journal", "value.memmap"])
@pytest.mark.parametrize(
    "kind",
    [
        # The build looks at the real owner of a file, and the system lets root alone change it.
        pytest.param(kind, marks=only_root) if kind == "of others" else kind
        for kind in PLANTED
    ],
)
def test_build_neither_resumes_nor_follows_what_cannot_be_trusted(
    tmp_path: Path, kind: str, name: str
) -> None:
    building = interrupt(tmp_path, OLD)
    before = (building / name).read_bytes()
    PLANTED[kind](building / name)
    HIDDEN[UNPROBED] = -1  # Shows whether that row is read again.
    build(OLD, tmp_path)
    assert labels(tmp_path) == [0, -1, NUM_ROWS - 1]
    assert verify_store(tmp_path / "s") == []
    if (tmp_path / "outside").exists():
        assert (tmp_path / "outside").read_bytes() == before
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in files_of(tmp_path / "s").iterdir())


# A store that is there


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rebuild_of_a_mended_dataset_names_the_row(tmp_path: Path, num_workers: int) -> None:
    build(OLD, tmp_path)
    with pytest.raises(DatasetError, match=rf"row {UNPROBED} .*differs.*overwrite=True"):
        build(NEW, tmp_path, num_workers=num_workers)


def test_rebuild_of_another_identity_with_the_same_rows_compares_them_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(OLD, tmp_path)
    for num_read in (NUM_ROWS + 8, 8):
        dataset = Counting(OLD)
        build(dataset, tmp_path)
        assert len(dataset.rows) == num_read
    (line,) = caplog.messages
    assert "the class" in line
    assert "All 3,000 rows are compared" in line
    assert "--fingerprint" in line
    assert verify_store(tmp_path / "s") == []


def test_fingerprint_for_a_store_without_one_is_recorded_after_one_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(OLD, tmp_path)
    for num_read in (NUM_ROWS + 8, 0):
        dataset = Counting(OLD)
        build(dataset, tmp_path, fingerprint="v2")
        assert len(dataset.rows) == num_read
    (line,) = caplog.messages
    assert "All 3,000 rows are compared" in line
    assert "fingerprint='v2' is recorded" in line
    assert "of your own" not in line


def test_identity_whose_recording_was_killed_leaves_no_file_behind(tmp_path: Path) -> None:
    build(OLD, tmp_path)
    pid = os.fork()
    if not pid:
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        try:
            build(Counting(OLD), tmp_path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    store = tmp_path / "s"
    assert "manifest.json.tmp" in os.listdir(store)
    assert labels(tmp_path) == [0, UNPROBED, NUM_ROWS - 1]
    # The dataset that the store was built from, which has nothing to record.
    build(OLD, tmp_path)
    assert "manifest.json.tmp" not in os.listdir(store)


def test_identity_is_not_recorded_through_a_planted_link(tmp_path: Path) -> None:
    build(OLD, tmp_path)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "s" / "manifest.json.tmp").symlink_to(mine)
    build(Counting(OLD), tmp_path)
    assert mine.read_text() == "mine"
    assert verify_store(tmp_path / "s") == []
    assert names_in(tmp_path / "s") == ["manifest.json", "value.memmap"]


def test_rebuild_compares_probe_rows(tmp_path: Path) -> None:
    build(OLD, tmp_path)
    HIDDEN[UNPROBED] = -1
    build(OLD, tmp_path)
    HIDDEN[NUM_ROWS - 1] = -1
    with pytest.raises(DatasetError, match=f"row {NUM_ROWS - 1} "):
        build(OLD, tmp_path)


def test_rebuild_fingerprint_decides_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(OLD, tmp_path, fingerprint="version 1")
    dataset = Counting(NEW)
    with monkeypatch.context() as patched:
        # Neither rows nor attributes are read.
        patched.setattr("lightning_memmap.store.identity._Reader", None)
        build(dataset, tmp_path, fingerprint="version 1")
        assert dataset.rows == []
        with pytest.raises(DatasetError, match=r"fingerprint='version 2'.*'version 1'.*overwrite"):
            build(OLD, tmp_path, fingerprint="version 2")
    build(dataset, tmp_path, fingerprint="version 2", overwrite=True)
    assert labels(tmp_path) == [0, -1, NUM_ROWS - 1]


@pytest.mark.parametrize(("given", "error"), [(3, TypeError), ("", ValueError)])
def test_build_fingerprint_that_is_none_is_refused(
    tmp_path: Path, given: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="fingerprint"):
        build(OLD, tmp_path, fingerprint=given)


# Processes and files


class Sample(NamedTuple):
    value: torch.Tensor


class Archive:
    """A zip file that is opened by the first process that reads it, and is good for that one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: zipfile.ZipFile | None = None

    def read(self, name: str) -> bytes:
        if self.file is None:
            self.file = zipfile.ZipFile(self.path)
        return self.file.read(name)


class Archived(Dataset[Sample]):
    def __init__(self, archive: Archive, rows: range) -> None:
        self.archive = archive
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Sample:
        return Sample(torch.tensor([int(self.archive.read(str(self.rows[row])))]))


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_workers_open_the_files_of_a_dataset_themselves(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as file:
        for row in range(400):
            file.writestr(str(row), str(row))
    archive = Archive(tmp_path / "rows.zip")
    train, val = Archived(archive, range(300)), Archived(archive, range(300, 400))
    for changed in (False, True):
        train.changed = changed  # All rows are compared.
        module = MemmapDataModule(train, val, store_dir=tmp_path / "stores", num_workers=2)
        set_up(module, "fit")
        module.train_dataloader()
        module.teardown()
        # This process has opened nothing that its workers could share.
        assert archive.file is None
    for split, rows in (("train", train.rows), ("val", val.rows)):
        store = open_store(tmp_path / "stores" / split)
        assert [int(store[row].value) for row in range(len(rows))] == list(rows)


@pytest.mark.parametrize("row", [0, UNPROBED])
@pytest.mark.slow
def test_build_whose_worker_is_killed_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: int
) -> None:
    with pytest.raises(DatasetError, match=r"worker process .* has died.*num_workers") as kept:
        build(Deadly(OLD, row), tmp_path, num_workers=2, fingerprint="labels")
    # The other worker has ended as well, though the error is still there, as at a prompt.
    build(OLD, tmp_path, fingerprint="labels")
    assert kept.value.__traceback__ is not None
    assert "still alive" not in caplog.text
    assert labels(tmp_path) == [0, UNPROBED, NUM_ROWS - 1]


def test_build_of_many_fields_keeps_few_files_open(tmp_path: Path) -> None:
    rows = [{f"f{index}": index + row for index in range(300)} for row in range(5)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        store = build(rows, tmp_path, num_workers=0)
        assert [int(leaf) for leaf in store[3].values()] == list(range(3, 303))
        assert verify_store(tmp_path / "s") == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_rows_whose_bytes_are_divided_otherwise_are_told_apart(tmp_path: Path) -> None:
    def boxes(*shape: int) -> Any:
        return {"box": torch.arange(6).view(*shape)}

    variable = {"box": 2}
    for number, (one, other) in enumerate(
        (({"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}), (boxes(2, 3), boxes(3, 2)))
    ):
        given = variable if "box" in one else None
        store = build_store([one] * 9, tmp_path / str(number), progress=False, variable=given)
        with pytest.raises(DatasetError, match="row 0 of the dataset differs"):
            check_dataset(store, [other] * 9)
