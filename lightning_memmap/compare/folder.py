"""The folder of a comparison, and which files in it may be replaced.

out/report.json             names the schema of this package
out/report.html             names this package as its generator
out/variants/NAME/RUN/      has a spec.json, written first, that names the schema of runs
"""

import json
import shutil
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


def check_folder(out: Path) -> list[Path]:
    """Check that a comparison can be written to a folder without replacing any other file.

    Returns:
        The folders of the runs of an earlier comparison.

    Raises:
        ValueError: The path isn't a folder, or the folder holds something other than an
            earlier comparison.
    """
    path = out.resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"out={str(out)!r}: {existing} is not a folder: choose another")
    if existing != path:
        return []
    runs, foreign = _find_runs(out)
    if foreign:
        raise ValueError(
            f"out={str(out)!r}: {foreign[0]} is not from a comparison, and would be replaced:"
            " choose another folder"
        )
    names = {child.name for child in out.iterdir()}
    if names - {REPORT, PAGE, VARIANTS} and REPORT not in names and not runs:
        raise ValueError(
            f"out={str(out)!r} holds something other than a comparison: choose another folder"
        )
    return runs


def clear_folder(out: Path) -> None:
    """Remove an earlier comparison, and nothing else.

    Raises:
        ValueError: See `check_folder`.
        OSError: A file cannot be removed.
    """
    for folder in check_folder(out):
        shutil.rmtree(folder)
    for name in (REPORT, PAGE):
        (out / name).unlink(missing_ok=True)


def _find_runs(out: Path) -> tuple[list[Path], list[Path]]:
    """Find the folders of runs, and files in place of a comparison's that aren't from one."""
    report, page, variants = (out / name for name in (REPORT, PAGE, VARIANTS))
    runs = []
    foreign = [report] if _exists(report) and _read_schema(report) != REPORT_SCHEMA else []
    foreign += [page] if _exists(page) and not is_our_page(page) else []
    # A run whose process was killed before it wrote its spec leaves an empty folder.
    pending = [variants] if _exists(variants) else []
    while pending:
        path = pending.pop()
        if path.is_symlink() or not path.is_dir():
            foreign.append(path)
        elif _read_schema(path / SPEC) == RUN_SCHEMA:
            runs.append(path)
        else:
            pending += sorted(path.iterdir())
    return runs, foreign


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
