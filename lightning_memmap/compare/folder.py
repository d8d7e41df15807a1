"""The folder of a comparison, and which files in it may be replaced.

out/report.json             names the schema of this package
out/report.html             names this package as its generator
out/variants/NAME/RUN/      has a spec.json, written first, that names the schema of runs
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_memmap.tables import is_our_page

REPORT = "report.json"
PAGE = "report.html"
VARIANTS = "variants"
SPEC = "spec.json"
#: The weights of the reference run, in its folder.
WEIGHTS = "weights.pt"
#: The value of ``schema`` in a report, and in the spec of a run.
REPORT_SCHEMA = "lightning_memmap.compare"
RUN_SCHEMA = "lightning_memmap.compare.run"


def check_folder(out: Path) -> None:
    """Check that a comparison can be written to a folder without replacing any other file.

    Raises:
        ValueError: The path isn't a folder, or the folder holds something other than an
            earlier comparison.
    """
    path = out.resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"out={str(out)!r}: {existing} is not a folder: choose another")
    if existing != path:
        return
    for foreign in _foreign_paths(out):
        raise ValueError(
            f"out={str(out)!r}: {foreign} is not from a comparison, and would be replaced:"
            " choose another folder"
        )
    names = {child.name for child in out.iterdir()}
    if names - {REPORT, PAGE, VARIANTS} and REPORT not in names and not [*_run_folders(out)]:
        raise ValueError(
            f"out={str(out)!r} holds something other than a comparison: choose another folder"
        )


def clear_folder(out: Path) -> None:
    """Remove an earlier comparison, and nothing else.

    Raises:
        ValueError: See `check_folder`.
        OSError: A file cannot be removed.
    """
    check_folder(out)
    for folder in [*_run_folders(out)]:
        shutil.rmtree(folder)
    for name in (REPORT, PAGE):
        (out / name).unlink(missing_ok=True)


def _run_folders(out: Path) -> Iterator[Path]:
    for spec in (out / VARIANTS).glob(f"*/*/{SPEC}"):
        if _read_schema(spec) == RUN_SCHEMA:
            yield spec.parent


def _foreign_paths(out: Path) -> Iterator[Path]:
    """Yield files with the path of a comparison's file that are not from a comparison."""
    report, page, variants = (out / name for name in (REPORT, PAGE, VARIANTS))
    if _exists(report) and _read_schema(report) != REPORT_SCHEMA:
        yield report
    if _exists(page) and not is_our_page(page):
        yield page
    if not _exists(variants):
        return
    runs = {*_run_folders(out)}
    # A run whose process was killed before it wrote its spec leaves an empty folder.
    pending = [variants]
    while pending:
        path = pending.pop()
        if path.is_symlink() or not path.is_dir():
            yield path
        elif path not in runs:
            pending += sorted(path.iterdir())


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _read_schema(path: Path) -> Any:
    """Return the ``schema`` of a JSON file; None for any other file."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content.get("schema") if isinstance(content, dict) else None
