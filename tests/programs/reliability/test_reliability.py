"""A little of each kind of case; and the checks themselves, which find what is put there to be
found."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.errors import StoreError
from lightning_memmap.store import build_store, open_store
from tests.programs.reliability.blows import can_trace
from tests.programs.reliability.changes import NEW
from tests.programs.reliability.dataset import sample_of
from tests.programs.reliability.kinds import KINDS, Case, Scale, cases, prepare, run_case
from tests.programs.reliability.outcome import Fault, Outcome, Subject
from tests.programs.reliability.report import BEGIN, END, Log, Report
from tests.programs.reliability.runner import runners
from tests.support.datasets import Replaced
from tests.support.preloaded import python

SCALE = Scale(kills=1, flips=20, resizes=8, manifests=300, plants=8, strangers=3)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with runners(1) as started:
        # So that its threads are there before those of a test are counted.
        started.submit(os.getpid).result()
        yield started


@pytest.fixture(scope="module")
def beginnings(pool: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reliability") / "beginnings"
    pool.submit(prepare, path).result()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_cases_of_kind_find_nothing_wrong(
    pool: ProcessPoolExecutor, beginnings: Path, kind: str
) -> None:
    todo = cases(SCALE, 0, beginnings, [kind])
    if kind.startswith(("calls-", "errors-")) and not can_trace():
        # Nothing else stops a process at a chosen system call. Kills at random moments run anyway.
        pytest.skip("strace is not installed: apt-get install strace")
    assert todo
    futures = [pool.submit(run_case, Subject(), beginnings, case) for case in todo]
    faults = [
        f"{case}: {fault.value}: {text}"
        for case, future in zip(todo, futures, strict=True)
        for fault, text in future.result().faults
    ]
    assert not faults, "\n".join(faults)


# Deliberate faults


def one_wrong_row(dataset: Any, path: Path, **options: Any) -> Any:
    return build_store(Replaced(dataset, {77: dataset[78]}), path, **options)


def committed_before_its_rows(dataset: Any, path: Path, **options: Any) -> Any:
    """Puts a whole store in place, and then writes its rows one by one."""
    shutil.copytree(path.parents[2] / "beginnings" / "pull" / "far", path)
    (x,) = path.rglob("x.memmap")
    rows = x.read_bytes()
    x.write_bytes(bytes(len(rows)))
    with open(x, "r+b", buffering=0) as file:
        for start in range(0, len(rows), 32):
            time.sleep(0.01)
            file.write(rows[start : start + 32])


class _Remembered:
    """Rows that were read once are never read again, whatever the dataset says now."""

    def __init__(self, dataset: Any, memory: Path) -> None:
        self.dataset = dataset
        self.memory = memory

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        self.memory.touch()
        known = {int(line) for line in self.memory.read_text().split()}
        if row in known:
            return sample_of(len(self), row, NEW)
        if row % 50 == 7:
            with open(self.memory, "a") as file:
                file.write(f"{row}\n")
        return self.dataset[row]


def resumed_from_another_dataset(dataset: Any, path: Path, **options: Any) -> Any:
    memory = path.with_name("memory")
    store = build_store(_Remembered(dataset, memory), path, **options)
    memory.unlink()
    return store


def workers_left_behind(dataset: Any, path: Path, **options: Any) -> Any:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return build_store(dataset, path, **options)


def never_ending(dataset: Any, path: Path, **options: Any) -> Any:
    time.sleep(1000)


def foreign(*arguments: Any, **options: Any) -> Any:
    raise KeyError("num_rows")


def untidy(dataset: Any, path: Path, **options: Any) -> Any:
    store = build_store(dataset, path, **options)
    (path / "g-0123456789abcdef").mkdir()
    return store


def refusing(path: Path) -> Any:
    raise StoreError("half of it is missing")


def blind(path: Path) -> list[Any]:
    return []


def reading_elsewhere(path: Path) -> Any:
    Path("/etc/hostname").exists()
    with open("/etc/passwd") as file:
        file.read(1)
    return open_store(path)


def of_zeros(path: Path) -> Any:
    """Gives the first row that was asked for, whichever is asked for."""
    store = open_store(path)
    read, first = type(store).__getitem__, []

    class Stuck(type(store)):  # type: ignore[misc]
        def __getitem__(self, row: int) -> Any:
            first.append(row)
            return read(self, first[0])

    store.__class__ = Stuck
    return store


def running_code(path: Path) -> Any:
    os.system("true")
    return open_store(path)


@pytest.mark.parametrize(
    ("kind", "subject", "fault"),
    [
        ("kill-new-parent", Subject(build=one_wrong_row), Fault.WRONG_ROWS),
        ("kill-new-parent", Subject(build=committed_before_its_rows), Fault.WRONG_ROWS),
        ("kill-resumed-parent", Subject(build=resumed_from_another_dataset), Fault.WRONG_ROWS),
        ("kill-new-parent", Subject(build=workers_left_behind), Fault.ORPHAN),
        ("errors-new", Subject(build=never_ending, limit_s=1.0), Fault.HANG),
        ("errors-new", Subject(build=foreign), Fault.FOREIGN_ERROR),
        ("errors-new", Subject(build=untidy), Fault.LEFTOVER),
        ("kill-overwrite-parent", Subject(open=refusing), Fault.HALF_STORE),
        ("flips", Subject(verify=blind), Fault.WRONG_ROWS),
        ("indexes", Subject(verify=blind), Fault.WRONG_ROWS),
        ("caches", Subject(open=of_zeros), Fault.WRONG_ROWS),
        ("servers", Subject(open=foreign), Fault.FOREIGN_ERROR),
        ("manifests", Subject(open=foreign), Fault.FOREIGN_ERROR),
        ("manifests", Subject(open=reading_elsewhere), Fault.WRONG_ROWS),
        ("manifests", Subject(open=running_code), Fault.FOREIGN_ERROR),
    ],
)
def test_check_of_something_faulty_finds_it(
    pool: ProcessPoolExecutor, beginnings: Path, kind: str, subject: Subject, fault: Fault
) -> None:
    found: set[Fault] = set()
    for case in cases(replace(SCALE, kills=6), 0, beginnings, [kind]):
        outcome = pool.submit(run_case, subject, beginnings, case).result()
        found |= {seen for seen, _ in outcome.faults}
        if fault in found:
            return
    pytest.fail(f"only {found}")


# The report


def test_log_of_a_run_gives_the_cases_that_are_done(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    outcome = Outcome([(Fault.HANG, "it hung")], runs=3, seconds=1.5)
    outcome.notes["seen"] += 2
    case = Case("flips", 4, 1)
    log.add(case, outcome)
    assert log.outcomes([case, Case("flips", 5, 1)]) == [(case, outcome)]


def test_report_counts_runs_and_faults_and_writes_them_between_the_marks(tmp_path: Path) -> None:
    report = Report()
    report.add(Case("flips", 0), Outcome([(Fault.WRONG_ROWS, "unseen")], seconds=2.0))
    report.add(Case("flips", 1), Outcome(runs=999))
    assert report.num_faults == 1
    assert report.rows() == [[KINDS["flips"].title, "1,000", "1", *["0"] * 5, "2"]]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report.write(page, "the command")
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 1,000 | 1 wrong rows |" in text


def test_case_survives_its_text() -> None:
    case = Case("flips", 7, 3)
    assert Case.parse(str(case)) == case


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainings_that_end_early_go_on_as_one(tmp_path: Path) -> None:
    # Needs Lightning, which the processes that are forked for the other tests do without.
    from tests.programs.reliability import resumes

    assert [fault for number in range(12) for fault in resumes.run_case(tmp_path, number)] == []


@pytest.mark.slow
def test_results_of_killed_trainings_are_those_of_one_that_nobody_killed() -> None:
    command = [python(), "-m", "tests.programs.reliability.results", "--kills", "6"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| results per row") == 3
