"""Plants single-line faults in the package, one at a time, and counts those that tests find.

    python -m tests.mutation                 # 60 faults
    python -m tests.mutation --count 4 --rooms '[sampling]' --seed 1
    python -m tests.mutation --only lightning_memmap/sampling/pool.py:57:order

A fault is looked for by the files of tests that name most of what its file defines. Each is planted
in a copy of the repository, so the one that runs this stays as it is. A fault that survives would
not be noticed by these tests, or changes nothing.
"""

import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

# Imported once, for all the processes that run tests: they are forked.
import lightning  # noqa: F401
import pytest
from jsonargparse import auto_cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_memmap"
#: By folder of the package, where the tests are that should find a fault in it, and which of them.
ROOMS = {
    "sampling": (("tests/unit/sampling", "tests/unit"), ""),
    "store": (("tests/unit/store",), "not slow"),
    "loading": (("tests/unit/loading", "tests/unit"), "not slow"),
    "strategies": (("tests/unit/strategies", "tests/strategies", "tests/distributed"), ""),
}
#: Methods without which something is read or freed too early, or not seen by others.
WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "record_stream", "join", "barrier"}
WAITS |= {"result", "flush", "fsync", "notify", "notify_all", "set", "release", "close"}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}


@dataclass(frozen=True)
class Fault:
    """One line of a file, changed."""

    path: str
    line: int
    kind: str
    before: str
    after: str

    @property
    def room(self) -> str:
        return Path(self.path).parts[1]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.kind}\n    {self.before}\n    {self.after}"


def faults_of(path: str) -> Iterator[Fault]:
    """The faults that can be planted in a file, in the order of its nodes."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.split("\n")

    def fault(kind: str, node: ast.expr | ast.stmt, new: str, begin: int, end: int = 0) -> Fault:
        line, end = lines[node.lineno - 1], end or node.end_col_offset or 0
        after = line[:begin] + new + line[end:]
        return Fault(path, node.lineno, kind, line.strip(), after.strip())

    def between(kind: str, a: ast.expr, b: ast.expr, old: str, new: str) -> Iterator[Fault]:
        """The operator between two operands on one line."""
        if a.end_lineno == b.lineno == a.lineno:
            begin, end = a.end_col_offset or 0, b.col_offset
            found = re.search(rf"(?<!\w){re.escape(old)}(?!\w)", lines[a.lineno - 1][begin:end])
            if found:
                yield fault(kind, a, new, begin + found.start(), begin + found.end())

    for node in _code(ast.parse(text)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            words = COMPARISONS[type(node.ops[0])]
            yield from between("comparison", node.left, node.comparators[0], *words)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield from between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between("logic", node.values[0], node.values[1], *words)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield fault("number", node, str(node.value + 1), node.col_offset)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            if node.test.lineno == node.test.end_lineno:
                yield fault("check", node.test, "False", node.test.col_offset)
        elif isinstance(node, ast.With) and "lock" in ast.unparse(node.items[0]).lower():
            line = lines[node.lineno - 1]
            if len(node.items) == 1 and line.endswith(":"):
                yield fault("lock", node, "if True:", node.col_offset, len(line))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            is_wait = isinstance(called, ast.Attribute) and called.attr in WAITS
            if is_wait and node.lineno == node.end_lineno:
                yield fault("wait", node, "pass", node.col_offset)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, decorators, messages or default values."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.Raise, ast.JoinedStr)):
                yield child
                yield from _code(child)


def drawn(count: int, seed: int, rooms: list[str]) -> list[Fault]:
    """Faults in turn from each folder, and there in turn of each kind."""
    generator, by_room = random.Random(seed), []
    for room in rooms:
        by_kind: dict[str, list[Fault]] = {}
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            for fault in faults_of(str(path.relative_to(ROOT))):
                by_kind.setdefault(fault.kind, []).append(fault)
        for faults in by_kind.values():
            generator.shuffle(faults)
        by_room.append([f for turn in zip_longest(*by_kind.values()) for f in turn if f])
    return [f for turn in zip_longest(*by_room) for f in turn if f][:count]


def tests_of(fault: Fault, copy: Path, num_files: int) -> list[str]:
    """The files of tests that name most of what the file of a fault defines, itself included."""
    path = copy / fault.path
    text = path.read_text(encoding="utf-8")
    names = re.findall(r"^ *(?:class|def) (_?[a-zA-Z]\w{3,})", text, re.MULTILINE)
    pattern = re.compile(rf"\b(?:{'|'.join([path.stem.strip('_'), *names])})\b")
    counts = {}
    for folder in ROOMS[fault.room][0]:
        for test in sorted((copy / folder).glob("test_*.py")):
            found = pattern.findall(test.read_text(encoding="utf-8"))
            counts[test] = (test.stem == f"test_{path.stem.strip('_')}", len(set(found)))
    best = sorted(counts, key=lambda test: counts[test], reverse=True)[:num_files]
    return [str(test.relative_to(copy)) for test in best if any(counts[test])]


def first_failure(copy: Path, tests: list[str], marker: str, timeout_s: float) -> str:
    """The first test that fails, in a process of its own; nothing if all pass."""
    if not tests:
        return ""
    output = copy / "output.txt"
    child = os.fork()
    if not child:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        sys.argv = ["pytest"]
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", marker]
        try:
            code = int(pytest.main([*options, *tests]))
        except BaseException:
            code = 1
        sys.stdout.flush()
        os._exit(code)
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it hangs"
        time.sleep(0.1)
    if os.waitstatus_to_exitcode(ended[1]) in (0, 5):  # 5: there are no tests.
        return ""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output.read_text(), re.MULTILINE)
    return found[0] if found else "it crashes"


def main(
    count: int = 60,
    seed: int = 0,
    rooms: list[str] | None = None,
    only: str | None = None,
    num_files: int = 6,
    timeout_s: float = 300.0,
) -> None:
    """Plant faults, and print what became of them.

    Args:
        count: Number of faults.
        seed: Draws them.
        rooms: Folders of the package that get faults; all by default.
        only: One fault, as ``path:line:kind``, in place of drawn ones.
        num_files: Files of tests that look for a fault.
        timeout_s: Tests that take longer are taken to hang.
    """
    faults = drawn(10**9 if only else count, seed, rooms or list(ROOMS))
    faults = [f for f in faults if only in (None, f"{f.path}:{f.line}:{f.kind}")]
    found: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "runs", "stores", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        skipped: list[str] = []
        for fault in faults:
            path, text = copy / fault.path, (copy / fault.path).read_text(encoding="utf-8")
            lines, tests = text.split("\n"), tests_of(fault, copy, num_files)
            marker = ROOMS[fault.room][1]
            lines[fault.line - 1] = lines[fault.line - 1].replace(fault.before, fault.after)
            while True:
                path.write_text("\n".join(lines), encoding="utf-8")
                by = first_failure(copy, [*tests, *skipped], marker, timeout_s)
                path.write_text(text, encoding="utf-8")
                # Names of parameters may have spaces.
                name = by.partition("[")[0]
                if "::" not in by or not first_failure(copy, [name], marker, timeout_s):
                    break
                print(f"fails without a fault: {name}", flush=True)
                skipped.append(f"--deselect={name}")
            found.setdefault(fault.room, []).append(bool(by))
            print(f"{'found' if by else 'SURVIVED'} {fault}\n    {by or tests}", flush=True)
            table = {**found, "all": [each for results in found.values() for each in results]}
            if len(table["all"]) % 10 == 0 or fault is faults[-1]:
                print("\n| folder | faults | found | share |\n|---|---|---|---|")
                for room, each in table.items():
                    share = f"{sum(each) / len(each):.0%}"
                    print(f"| {room} | {len(each)} | {sum(each)} | {share} |", flush=True)


if __name__ == "__main__":
    auto_cli(main)
