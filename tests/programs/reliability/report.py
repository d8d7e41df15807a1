"""The table: counted, printed, noted case by case, and written into the page of the docs."""

import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.programs.reliability.kinds import BROKEN_OFF, KINDS, Case
from tests.programs.reliability.outcome import Fault, Outcome

BEGIN = "<!-- the table of python -m tests.programs.reliability begins -->"
END = "<!-- the table of python -m tests.programs.reliability ends -->"
_HEADER = ["kind", "runs", *(fault.value for fault in Fault), "time (s)"]


class Report:
    """What came of all cases."""

    def __init__(self, outcomes: Iterable[tuple[Case, Outcome]] = ()) -> None:
        self._outcomes = dict(outcomes)

    def __contains__(self, case: Case) -> bool:
        return case in self._outcomes

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self._outcomes[case] = outcome

    @property
    def num_faults(self) -> int:
        """Whatever went wrong."""
        return sum(len(outcome.faults) for outcome in self._outcomes.values())

    def rows(self, *, by_change: bool = False) -> list[list[str]]:
        """The rows of the table: kind, runs, one count of each fault, seconds."""
        titles: dict[str, list[str]] = {}
        for name, kind in KINDS.items():
            is_change = name.startswith(BROKEN_OFF)
            title = kind.title.rpartition(", ")[0] if by_change and is_change else kind.title
            titles.setdefault(title, []).append(name)
        rows = []
        for title, names in titles.items():
            outcomes = [each for case, each in self._outcomes.items() if case.kind in names]
            if outcomes:
                faults = Counter(fault for outcome in outcomes for fault, _ in outcome.faults)
                runs = sum(outcome.runs for outcome in outcomes)
                seconds = sum(outcome.seconds for outcome in outcomes)
                counts = [f"{faults[fault]:,}" for fault in Fault]
                rows.append([title, f"{runs:,}", *counts, f"{seconds:,.0f}"])
        return rows

    def notes(self) -> Counter[str]:
        """What else was counted."""
        notes: Counter[str] = Counter()
        for outcome in self._outcomes.values():
            notes.update(outcome.notes)
        return notes

    def table(self, *, by_change: bool = False) -> str:
        """The table, in Markdown."""
        rows = [_HEADER, ["---", *["---:"] * (len(_HEADER) - 1)], *self.rows(by_change=by_change)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def write(self, page: Path, command: str) -> None:
        """Put the table into a page, between two marks."""
        text = page.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            raise ValueError(f"{page} has no place for the table: {BEGIN!r} and {END!r}")
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        body = f"{_circumstances(command)}\n\n{self.page_table()}"
        page.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")

    def page_table(self) -> str:
        """The table of the page, in Markdown: faults are named where there are any."""
        names = [fault.value for fault in Fault]
        lines = ["| kind | runs | faults |", "|---|---:|---|"]
        for title, runs, *counts, _ in self.rows(by_change=True):
            faults = [
                f"{count} {name}" for count, name in zip(counts, names, strict=True) if count != "0"
            ]
            lines.append(f"| {title} | {runs} | {', '.join(faults) or '0'} |")
        return "\n".join(lines)


def _circumstances(command: str) -> str:
    packages = ("lightning_memmap", "torch", "lightning", "tensordict", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d}: {_processor()}, {psutil.cpu_count()}"
        f" cores, {memory:.0f} GiB; Linux {platform.release()}, Python"
        f" {platform.python_version()}, {versions}."
    )


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


class Log:
    """Finished cases, a line each, so that a run that was interrupted can go on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def outcomes(self, cases: Sequence[Case]) -> list[tuple[Case, Outcome]]:
        """Those of some cases that are noted."""
        if self._path is None or not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        noted = (json.loads(line) for line in lines)
        wanted = set(cases)
        return [
            (case, _from_json(body))
            for body in noted
            if (case := Case.parse(body["case"])) in wanted
        ]

    def add(self, case: Case, outcome: Outcome) -> None:
        """Note a case."""
        if self._path is None:
            return
        body = {
            "case": str(case),
            "runs": outcome.runs,
            "seconds": round(outcome.seconds, 3),
            "faults": [[fault.name, text] for fault, text in outcome.faults],
            "notes": outcome.notes,
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(body) + "\n")


def _from_json(body: dict[str, Any]) -> Outcome:
    faults = [(Fault[name], text) for name, text in body["faults"]]
    return Outcome(faults, Counter(body["notes"]), body["runs"], body["seconds"])
