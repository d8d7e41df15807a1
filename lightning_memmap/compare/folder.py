"""The folder of a comparison, and what may be replaced in it.

out/report.json             names the schema of this package
out/report.html             names this package as its generator
out/variants/NAME/RUN/      has a spec.json, written first, that names the schema of runs
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memmap.tables import is_our_page

REPORT, PAGE, VARIANTS, SPEC = "report.json", "report.html", "variants", "spec.json"
#: What ``schema`` is in a report, and in the file of a run.
REPORT_SCHEMA, RUN_SCHEMA = "lightning_memmap.compare", "lightning_memmap.compare.run"


@dataclass(frozen=True)
class ComparisonFolder:
    """A folder that has a comparison, or that will have one."""

    path: Path

    def check(self) -> None:
        """Check that a comparison may be written here without replacing anything else.

        Raises:
            ValueError: The path isn't a folder, or the folder holds something other than an
                earlier comparison.
        """
        path = self.path.resolve()
        existing = next(each for each in (path, *path.parents) if each.exists())
        if not existing.is_dir():
            raise ValueError(f"out={str(self.path)!r}: {existing} is not a folder: choose another")
        if existing != path:
            return
        for path in self._foreign():
            raise ValueError(
                f"out={str(self.path)!r}: {path} is not from a comparison, and would be replaced:"
                " choose another folder"
            )
        names = {path.name for path in self.path.iterdir()}
        if names - {REPORT, PAGE, VARIANTS} and REPORT not in names and not [*self._runs()]:
            raise ValueError(
                f"out={str(self.path)!r} holds something other than a comparison: choose another"
                " folder"
            )

    def clear(self) -> None:
        """Remove an earlier comparison, and nothing else.

        Raises:
            ValueError: See `check`.
            OSError: A file cannot be removed.
        """
        self.check()
        for run in [*self._runs()]:
            shutil.rmtree(run)
        for name in (REPORT, PAGE):
            (self.path / name).unlink(missing_ok=True)

    def _runs(self) -> Iterator[Path]:
        """Yield the folders of earlier runs."""
        for spec in (self.path / VARIANTS).glob(f"*/*/{SPEC}"):
            if _schema_of(spec) == RUN_SCHEMA:
                yield spec.parent

    def _foreign(self) -> Iterator[Path]:
        """Yield what has the path of something that a comparison writes, and isn't from one."""
        report, page, variants = (self.path / name for name in (REPORT, PAGE, VARIANTS))
        if _is_there(report) and _schema_of(report) != REPORT_SCHEMA:
            yield report
        if _is_there(page) and not is_our_page(page):
            yield page
        if not _is_there(variants):
            return
        runs = {*self._runs()}
        # The folder of a run without its first file is empty: its process was killed before.
        pending = [variants]
        while pending:
            path = pending.pop()
            if path.is_symlink() or not path.is_dir():
                yield path
            elif path not in runs:
                pending += sorted(path.iterdir())


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _schema_of(path: Path) -> Any:
    """Return what a JSON file names as its schema; None for any other file."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found.get("schema") if isinstance(found, dict) else None
