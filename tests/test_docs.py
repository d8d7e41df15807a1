"""The README and the pages of ``docs/``: their Python runs, their configs parse, their links lead
somewhere, and the options in their commands exist.

The Python blocks of a page run in one program, from top to bottom. `tests.docs_prelude` defines
what pages leave to their reader. A comment ``<!-- test: ... -->`` in a page holds lines that run
there without being shown, such as an assertion about the block above.
"""

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.preloaded import python

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
CODE = re.compile(r"^```python\n(.*?)^```|<!-- test:(.*?)-->", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
#: What the Trainers of the pages leave open.
TRAINER = {"ACCELERATOR": "cpu", "LOGGER": "False", "MAX_EPOCHS": "1"}


def pages_with(pattern: re.Pattern[str]) -> Any:
    return pytest.mark.parametrize(
        "page", [page for page, text in PAGES.items() if pattern.search(text)]
    )


def run(directory: Path, *arguments: str) -> str:
    """Run a Python program on the CPU; its standard output."""
    environment = {f"PL_TRAINER_{name}": value for name, value in TRAINER.items()}
    done = subprocess.run(
        [python(), *arguments],
        cwd=directory,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pages_with(CODE)
def test_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    lines = [""] * PAGES[page].count("\n")
    lines[0] = "from tests.docs_prelude import *"
    for match in CODE.finditer(PAGES[page]):
        # On the lines that it has in the page, for the sake of tracebacks.
        code = match[1] or match[2].lstrip(" ")
        first = PAGES[page].count("\n", 0, match.start(match.lastindex or 0))
        lines[first : first + code.count("\n") + 1] = code.split("\n")
    program = tmp_path / Path(page).with_suffix(".py").name
    program.write_text("\n".join(lines), encoding="utf-8")
    run(tmp_path, str(program))


@pages_with(YAML)
def test_configs_of_a_page_parse(page: str, tmp_path: Path) -> None:
    digits = str(ROOT / "examples" / "configs" / "digits.yaml")
    for number, (config,) in enumerate(map(re.Match.groups, YAML.finditer(PAGES[page]))):
        path = tmp_path / f"{number}.yaml"
        path.write_text(config, encoding="utf-8")
        options = ["--config", digits, "--config", str(path), "--print_config"]
        parsed = yaml.safe_load(run(tmp_path, "-m", "lightning_memmap", "fit", *options))
        assert_within(yaml.safe_load(config), parsed)


def assert_within(given: Any, parsed: Any) -> None:
    """Check that a config has everything that was given; it has defaults as well."""
    if isinstance(given, dict):
        assert given.keys() <= parsed.keys()
        for key, value in given.items():
            assert_within(value, parsed[key])
    elif isinstance(given, list):
        for value, found in zip(given, parsed, strict=True):
            assert_within(value, found)
    else:
        assert given == parsed


@pages_with(re.compile("^ *(?:.*/)?lightning-memmap [a-z]", re.MULTILINE))
def test_options_in_the_commands_of_a_page_exist(page: str) -> None:
    for block in BASH.findall(PAGES[page]):
        for line in block.replace("\\\n", " ").splitlines():
            _, found, command = line.partition("#")[0].rpartition("lightning-memmap ")
            if found:
                names, _, options = command.partition(" --")
                words = names.split()[: 2 if names.startswith("store") else 1]
                for option in re.findall(r"--([a-z_]+)", f"--{options}"):
                    assert re.search(rf"--{option}\b", help_of(*words)), line


@cache
def help_of(*command: str) -> str:
    return run(ROOT, "-m", "lightning_memmap", *command, "--help")


@pages_with(re.compile(r"\]\("))
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", PAGES[page])):
        if not link.startswith(("http://", "https://")):
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            assert not anchor or anchor in anchors(path), link


def anchors(path: Path) -> set[str]:
    """The names of the headings of a page, as GitHub makes them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
