"""The command ``lightning-memmap store``: what it prints, and its exit codes."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from lightning_memmap import MemmapDataModule, build_store, open_store
from lightning_memmap.commands import store_rates
from lightning_memmap.errors import DatasetError, SchemaError, StoreNotFoundError
from tests.support.command_line import CommandLine
from tests.support.datasets import Counting, Ragged
from tests.support.models import Points
from tests.support.store.layout import files_of

#: 60 rows of 8 + 32 + 4 bytes in 24 shards: twelve of 3 rows (132 bytes), twelve of 2 (88 bytes).
POINTS = ("--dataset", "tests.support.models.Points", "--dataset.num_rows", "60")


class Command(CommandLine):
    """Runs ``lightning-memmap store``."""

    def table(self) -> list[list[str]]:
        """The cells of the printed table, row by row."""
        lines = iter(self.out.splitlines())
        next((line for line in lines if line.startswith("──")), None)
        cell = re.compile(r"[\d.]+ [KMG]?i?B|as stored|\S+")
        return [
            cell.findall(line) for line in lines if line.endswith(("as stored", "re-striped", "B"))
        ]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Command(capsys, "store")


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return build_store(Points(60), tmp_path / "points", progress=False).path


class TestBuild:
    def test_build_stores_the_dataset_and_describes_it(
        self, command: Command, tmp_path: Path
    ) -> None:
        assert command("build", tmp_path / "made", *POINTS, "--num_shards", 12) == 0
        store = open_store(tmp_path / "made")
        assert (store.num_rows, store.num_shards) == (60, 12)
        assert store[7]["row"] == 7
        assert "60 rows" in command.out
        assert "12 shards" in command.out

    def test_build_of_another_dataset_needs_overwrite(
        self, command: Command, store_path: Path
    ) -> None:
        other = (*POINTS[:-1], "61")
        assert command("build", store_path, *other) == 2
        assert "61 rows, the store 60" in command.err
        assert open_store(store_path).num_rows == 60
        assert command("build", store_path, *other, "--overwrite") == 0
        assert open_store(store_path).num_rows == 61

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("--dataset", "tests.support.models.Nothing"),
            ("--dataset", "tests.support.models.Regression"),
        ],
        ids=["none", "unknown", "other class"],
    )
    def test_build_without_a_dataset_is_refused(
        self, command: Command, tmp_path: Path, arguments: tuple[str, ...]
    ) -> None:
        assert command("build", tmp_path / "made", *arguments) == 2
        assert "dataset" in command.err
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_error_of_a_dataset_has_its_traceback(
        self, command: Command, tmp_path: Path, num_workers: int
    ) -> None:
        given = ("--dataset", "tests.support.datasets.Failing", "--num_workers", num_workers)
        assert command("build", tmp_path / "made", *given) == 2
        assert "in __getitem__" in command.err
        *_, last = command.err.splitlines()
        assert last.startswith("error: the dataset raised at row 3: KeyError")

    def test_page_replaces_a_page_and_nothing_else(
        self, command: Command, store_path: Path
    ) -> None:
        out = store_path.parent / "notes.html"
        out.write_text("<html>mine</html>")
        assert command("show", store_path, "--out", out) == 2
        assert f"out='{out}'" in command.err
        assert out.read_text() == "<html>mine</html>"
        out.unlink()
        for _ in range(2):
            assert command("show", store_path, "--out", out) == 0
        assert out.stat().st_size > 1000


class TestParts:
    def test_parts_are_built_and_finished(
        self, command: Command, tmp_path: Path, store_path: Path
    ) -> None:
        made = tmp_path / "train"
        for index in (2, 0):
            assert command("build", made, *POINTS, "--part", f"{index}/3") == 0
        told = f"40 of 60 rows are there: its build in 3 parts is not finished: .*{made} --finish"
        assert command("info", made) == 0
        assert re.search(told, command.out)
        with pytest.raises(StoreNotFoundError, match=told):
            open_store(made)
        data = MemmapDataModule(store_dir=tmp_path)
        data.setup("fit")
        with pytest.raises(StoreNotFoundError, match=r"train_dataset=None.* \(40 of 60"):
            data.train_dataloader()
        assert command("build", made, "--finish") == 2
        assert "part 1 is missing. Run these parts again" in command.err
        assert command("build", made, *POINTS, "--part", "1/3") == 0
        assert command("build", made, "--finish") == 0
        assert "60 rows" in command.out
        assert open_store(made).manifest.content == open_store(store_path).manifest.content

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((*POINTS, "--part", "3/3"), "part=3/3"),
            ((*POINTS, "--part", "1"), "part='1'"),
            ((*POINTS, "--finish"), "--finish with --dataset"),
            (("--finish", "--part", "0/2"), "--finish with --part"),
            (("--finish", "--num_shards", "3"), "--finish with --num_shards"),
            (("--finish",), "no part of a store at"),
        ],
        ids=str,
    )
    def test_wrong_arguments_of_parts_are_refused(
        self, command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        assert command("build", tmp_path / "made", *arguments) == 2
        assert message in command.err


class TestAppend:
    def test_append_adds_rows(self, command: Command, store_path: Path) -> None:
        assert command("append", store_path, *POINTS[:-1], "25") == 0
        assert "85 rows" in command.out
        assert open_store(store_path)[60]["row"] == 0


class TestPushAndPull:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LIGHTNING_MEMMAP_CACHE", str(tmp_path / "cache"))

    def test_stores_of_splits_go_to_a_url_and_back(self, command: Command, tmp_path: Path) -> None:
        data = MemmapDataModule(Points(60), {"a": Points(25)}, store_dir=tmp_path / "here")
        data.prepare_data()
        url = (tmp_path / "far").as_uri()
        assert command("push", tmp_path / "here", url) == 0
        assert command.out.split() == [f"{url}/train", f"{url}/val/a"]
        assert command("info", url) == 0
        assert "25 rows" in command.out
        assert command("pull", url, tmp_path / "back") == 0
        assert command("verify", tmp_path / "back") == 0
        for name in ("train", "val/a"):
            found = open_store(tmp_path / "back" / name).manifest
            assert found.content == open_store(tmp_path / "here" / name).manifest.content
        assert command("push", tmp_path / "here", url, "--overwrite") == 0
        assert command("push", tmp_path / "here", tmp_path / "back") == 2
        assert "s3://bucket/stores/train" in command.err
        assert command("pull", url + "/none", tmp_path / "other") == 2
        assert "none" in command.err


class TestInfo:
    def test_info_names_rows_shards_and_fields(self, command: Command, store_path: Path) -> None:
        assert command("info", store_path) == 0
        assert str(store_path) in command.out
        for words in ("60 rows", "24 shards", "tests.support.models.Points"):
            assert words in command.out
        # The bytes per shard are those of the largest shard.
        assert command.table() == [
            ["row", "int64", "()", "numbers", "8", "480 B", "24 B"],
            ["x", "float32", "(8,)", "numbers", "32", "1.9 KiB", "96 B"],
            ["y", "float32", "(1,)", "numbers", "4", "240 B", "12 B"],
        ]

    def test_info_tells_fields_whose_rows_differ_in_length(
        self, command: Command, tmp_path: Path
    ) -> None:
        store = build_store([b"abc", b"", b"d"], tmp_path / "s", progress=False)
        assert store.manifest.num_bytes == 4
        assert command("info", tmp_path / "s") == 0
        assert "(None,)" in command.out
        assert "2 on average" in command.out

    def test_folders_beside_stores_are_skipped_with_a_line(
        self, command: Command, store_path: Path
    ) -> None:
        (store_path.parent / "notes").mkdir()
        assert command("info", store_path.parent) == 0
        assert str(store_path) in command.out
        assert command.err == f"skipped {store_path.parent / 'notes'}: it is not a store\n"

    def test_unfinished_build_that_cannot_be_read_hides_no_store(
        self, command: Command, store_path: Path
    ) -> None:
        made = store_path.parent / "made"
        assert command("build", made, "--dataset", "tests.support.datasets.Failing") == 2
        assert command("info", store_path.parent) == 0
        assert "of 20 rows are there" in command.out
        for task in (("verify",), ("show", "--out", str(store_path.parent / "store.html"))):
            assert command(task[0], store_path.parent, *task[1:]) == 0
            assert "its build is not finished" in command.out
        (draft,) = made.glob("g-*/build.json")
        draft.write_text("{}")
        assert command("info", store_path.parent) == 0
        assert "60 rows" in command.out
        assert f"skipped {made}" in command.err


class TestVerify:
    def test_verify_of_an_intact_store_passes(self, command: Command, store_path: Path) -> None:
        assert command("verify", store_path) == 0
        # One checksum for each of the 24 shards of three fields.
        assert f"{store_path}: all 72 checksums match" in command.out

    def test_verify_of_a_damaged_store_names_shard_and_field(
        self, command: Command, store_path: Path
    ) -> None:
        # Shards 0 to 4 have three rows of 32 bytes before those of shard 5.
        flip_byte(files_of(store_path) / "x.memmap", 5 * 3 * 32)
        flip_byte(files_of(store_path) / "y.memmap", 60 * 4 - 1)
        assert command("verify", store_path) == 1
        assert "field 'x', shard 5 is damaged" in command.out
        assert "field 'y', shard 23 is damaged" in command.out
        assert command.out.count("is damaged") == 2
        assert "match" not in command.out

    def test_verify_names_files_that_are_not_part_of_the_store(
        self, command: Command, store_path: Path
    ) -> None:
        (store_path / "meta.json").write_text("{}")
        (store_path / "a\x1b[2Jb").touch()
        assert command("verify", store_path) == 0
        assert f"{store_path}: meta.json is not part of the store" in command.out
        assert "a?[2Jb is not part of the store" in command.out
        assert "checksums match" in command.out


def flip_byte(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """A folder of three stores, the middle one of which cannot be read."""
    for name in ("test", "train", "val"):
        build_store(Points(60), tmp_path / "splits" / name, progress=False)
    (tmp_path / "splits" / "train" / "manifest.json").write_text("{")
    return tmp_path / "splits"


class TestFolder:
    def test_others_go_on_after_a_store_that_cannot_be_read(
        self, command: Command, splits: Path
    ) -> None:
        assert command("info", splits) == 2
        assert str(splits / "train") in command.err
        assert command.out.count("60 rows") == 2
        assert command("verify", splits) == 1
        (line,) = [line for line in command.err.splitlines() if line.startswith("error: ")]
        assert str(splits / "train") in line
        for name in ("test", "val"):
            assert f"{splits / name}: all 72 checksums match" in command.out

    @pytest.mark.parametrize("task", ["info", "verify", "plan"])
    def test_terminal_codes_in_a_name_are_not_printed(
        self, command: Command, store_path: Path, task: str
    ) -> None:
        path = store_path.rename(store_path.parent / "a\x1b[2J\nb")
        given = ("--devices", "1") if task == "plan" else ()
        assert command(task, path, *given) == 0
        assert "a?[2J?b" in command.out
        (path / "manifest.json").write_text("{")
        assert command(task, path, *given) == 2
        assert "\x1b" not in command.out + command.err


class TestPlan:
    def test_plan_shows_what_fits_where(self, command: Command, store_path: Path) -> None:
        arguments = ("--devices", "1..5", "--memory", "1000", "--memory_fraction", "0.7")
        assert command("plan", store_path, *arguments, "--host_memory", "2000") == 0
        # Device d of D holds the shards c with c % D == d while they fit into 700 bytes:
        # 1: 5 x 132 = 660;  2: 5 x 132 = 660;  3: 4 x 132 + 88 = 616;  4: 3 x 132 + 3 x 88 = 660,
        # which is all;  5: 25 shards, of which each device has 2 x 132 + 3 x 88 = 528, all.
        # The host has 1400 bytes for shards, and with one device the rest is 1980.
        assert command.table() == [
            ["1", "0 B", "0 B", "2.6 KiB", "0 B", "stream", "as stored"],
            ["2", "1.3 KiB", "1.3 KiB", "0 B", "660 B", "auto", "as stored"],
            ["3", "1.8 KiB", "792 B", "0 B", "616 B", "auto", "as stored"],
            ["4", "2.6 KiB", "0 B", "0 B", "660 B", "device", "as stored"],
            ["5", "2.6 KiB", "0 B", "0 B", "528 B", "device", "re-striped"],
        ]
        assert re.search(r"^4 .*\n.*reads all 2.6 KiB", command.out, re.MULTILINE)

    def test_plan_for_more_devices_than_rows(self, command: Command, store_path: Path) -> None:
        build_store(Points(2), store_path.parent / "tiny", progress=False)
        assert command("plan", store_path.parent, "--devices", "2..3") == 0
        assert len(command.table()) == 1
        assert re.search(r"3 +- +- +- +- +none +tiny has 2\n", command.out)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--devices", "0..4"), "devices='0..4'"),
            (("--memory", "lots"), "memory='lots'"),
            (("--memory_fraction", "1.5"), "memory_fraction=1.5"),
            (("--rows", "7"), "rows=7"),
            (POINTS, "path="),
        ],
    )
    def test_plan_with_bad_argument_says_so(
        self, command: Command, store_path: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        assert command("plan", store_path, *arguments) == 2
        assert message in command.err
        assert command.table() == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of builds end once they have stored some rows."""
    monkeypatch.setattr(store_rates, "_MIN_TRIAL_S", 0.0)
    monkeypatch.setattr(store_rates, "_MAX_BYTES", 2**16)


@pytest.mark.usefixtures("quick")
class TestPlanOfData:
    def test_rows_of_some_bytes(self, command: Command) -> None:
        sizes = ("--row-bytes", "1000", "--rows", "48", "--devices=1..2", "--memory", "40000")
        assert command("plan", *sizes, "--host-memory", "0.1M") == 0
        # 28000 of 48000 bytes fit on a device: 14 of 24 shards.
        assert command.table() == [
            ["1", "27.3 KiB", "19.5 KiB", "0 B", "27.3 KiB", "auto", "as stored"],
            ["2", "46.9 KiB", "0 B", "0 B", "23.4 KiB", "device", "as stored"],
        ]
        assert re.search(r"Writing .* 32 rows", command.out)

    def test_dataset_is_tried_out_and_nothing_is_left(
        self, command: Command, tmp_path: Path
    ) -> None:
        path, devices = tmp_path / "new" / "train", ("--devices", "3", "--memory", "10K")
        points = (*POINTS[:-1], "6000")
        assert command("plan", path, *points, *devices, "--host_memory", "1G") == 0
        ((count, *_, residency, _),) = command.table()
        assert (count, residency) == ("3", "auto")
        assert "257.8 KiB of 6,000 rows of tests.support.models.Points" in command.out
        assert re.search(r"Building .* 32 rows", command.out)
        assert [*tmp_path.iterdir()] == []

    def test_rows_that_differ_in_length_have_their_mean(self, command: Command) -> None:
        ragged = ("--dataset", "tests.support.datasets.Ragged", "--dataset.num_rows", "32")
        assert command("plan", *ragged, "--devices", "1") == 0
        sizes = [len(bytes(Ragged(32)[row]["text"], "utf-8")) for row in range(32)]
        stored = store_rates.try_build(Ragged(32), Path(tempfile.gettempdir()))
        assert stored.trial_rows == stored.num_rows == 32
        assert stored.row_bytes > sum(sizes) / 32 + 8

    def test_stream_needs_its_rows_and_ends(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="--rows"):
            store_rates.try_build(iter([]), tmp_path)
        trial = store_rates.try_build(Stream(500), tmp_path, num_rows=10_000)
        assert (trial.num_rows, trial.trial_rows) == (10_000, 32)
        trial = store_rates.try_build(Stream(7), tmp_path, num_rows=10_000)
        assert (trial.num_rows, trial.trial_rows, trial.row_bytes) == (7, 7, 8)

    def test_trial_grows_to_its_goal_and_its_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_rates, "_MIN_TRIAL_S", 1e9)
        assert store_rates.try_build(Points(300), tmp_path).trial_rows == 300
        # 44 bytes each, at most 65,536.
        assert store_rates.try_build(Points(6000), tmp_path).trial_rows == 2**16 // 44

    def test_rows_of_a_dataset_are_spread_over_it(self, tmp_path: Path) -> None:
        counting = Counting(Points(3200))
        store_rates.try_build(counting, tmp_path)
        assert min(counting.rows) < 10
        assert max(counting.rows) > 2800

    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("raises", [False, True])
    def test_error_names_the_row_of_the_dataset(
        self, tmp_path: Path, raises: bool, num_workers: int
    ) -> None:
        kind = DatasetError if raises else SchemaError
        with pytest.raises(kind, match=r"row \d+") as caught:
            store_rates.try_build(Late(raises), tmp_path, num_workers=num_workers)
        (row,) = re.findall(r"row (\d+)", str(caught.value))
        assert int(row) >= 1000

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "path"),
            (("--row_bytes", "10"), "row_bytes=10: --rows"),
            ((*POINTS, "--row_bytes", "10"), "row_bytes=10"),
            ((*POINTS, "--rows", "10"), "rows=10"),
        ],
    )
    def test_bad_argument_says_so(
        self, command: Command, arguments: tuple[str, ...], message: str
    ) -> None:
        assert command("plan", *arguments) == 2
        assert message in command.err
        assert command.table() == []


class Stream(IterableDataset[int]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_rows))


class Late(Dataset[int]):
    """3200 rows, of which those from 1000 on cannot be stored."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def __len__(self) -> int:
        return 3200

    def __getitem__(self, row: int) -> Any:
        if row >= 1000 and self.raises:
            raise OSError("no such file")
        return {"x": 1.0 if row < 1000 else "text"}


class TestProgram:
    @pytest.mark.parametrize("arguments", [("nothing",), ("info",), ("info", "a", "b")])
    def test_bad_arguments_are_refused(self, command: Command, arguments: tuple[str, ...]) -> None:
        assert command(*arguments) == 2
        assert "error" in command.err
        assert command.out == ""

    def test_dataset_in_the_working_directory_is_found(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "own_dataset.py").write_text(
            "from torch.utils.data import Dataset\n"
            "class Squares(Dataset):\n"
            "    def __len__(self): return 5\n"
            "    def __getitem__(self, index): return index * index\n"
        )
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StoreNotFoundError):
            open_store("made")
        assert command("build", "made", "--dataset", "own_dataset.Squares") == 0
        assert [int(value) for value in open_store("made")] == [0, 1, 4, 9, 16]
        del sys.modules["own_dataset"]
