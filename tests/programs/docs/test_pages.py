"""The README and the pages of ``docs/``: their Python runs, their configs parse, their links lead
somewhere, and the options in their commands exist.

The Python blocks of a page run in one program, from top to bottom. `tests.programs.docs.prelude`
defines what pages leave to their reader. A comment ``<!-- test: ... -->`` in a page has lines that
run there without being shown, such as an assertion about the block above. After a comment ``<!--
test: new program -->`` another program begins. A program that imports what is not installed is
skipped.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

# For the configs. Imported before the tests, since what it imports changes the environment.
import examples.digits  # noqa: F401
from lightning_memmap.cli import main
from tests.support.preloaded import run

# LightningCLI uses names that jsonargparse has changed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]
ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
CODE = re.compile(r"^```python\n(.*?)^```|^<!-- test:(.*?)-->", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:.*/)?lightning-memmap ([a-z][^#\n]*)", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
#: Defaults of the Trainers in the pages.
TRAINER = {"ACCELERATOR": "cpu", "LOGGER": "False", "MAX_EPOCHS": "1"}


def pages_with(pattern: re.Pattern[str]) -> Any:
    return pytest.mark.parametrize(
        "page", [page for page, text in PAGES.items() if pattern.search(text)]
    )


@pages_with(CODE)
def test_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    environment = {f"PL_TRAINER_{name}": value for name, value in TRAINER.items()}
    for number, lines in enumerate(programs(PAGES[page])):
        # On the lines that it has in the page, for the sake of tracebacks.
        program = tmp_path / f"{Path(page).stem}_{number}.py"
        program.write_text("\n".join(lines), encoding="utf-8")
        done = run(program, cwd=tmp_path, **environment, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"


def programs(page: str) -> Iterator[list[str]]:
    """The programs of a page as lists of lines, empty where the page has something else."""
    prelude = ["from tests.programs.docs.prelude import *", *[""] * page.count("\n")]
    lines = prelude.copy()
    for match in CODE.finditer(page):
        shown, hidden = match.groups()
        if hidden and hidden.strip() == "new program":
            yield lines
            lines = prelude.copy()
        else:
            code = (shown or hidden.lstrip(" ")).rstrip().split("\n")
            first = page.count("\n", 0, match.start(match.lastindex or 0))
            lines[first : first + len(code)] = code
    yield lines


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs ``lightning-memmap`` in this process and returns what it prints."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lightning-memmap"])

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert end.value.code == 0, err
        return str(out)

    return run


@pages_with(YAML)
def test_configs_of_a_page_parse(page: str, tmp_path: Path, command: Callable[..., str]) -> None:
    digits = str(ROOT / "examples" / "configs" / "digits.yaml")
    for config in YAML.findall(PAGES[page]):
        path = tmp_path / "config.yaml"
        path.write_text(config, encoding="utf-8")
        options = ["--config", digits, "--config", str(path), "--print_config"]
        assert_within(yaml.safe_load(config), yaml.safe_load(command("fit", *options)))


def assert_within(given: Any, parsed: Any) -> None:
    """Check that a parsed config has everything that was given, beside its defaults."""
    if isinstance(given, dict):
        assert given.keys() <= parsed.keys()
        for key, value in given.items():
            assert_within(value, parsed[key])
    elif isinstance(given, list):
        for value, found in zip(given, parsed, strict=True):
            assert_within(value, found)
    else:
        assert given == parsed


@pages_with(COMMAND)
def test_options_in_the_commands_of_a_page_exist(page: str, command: Callable[..., str]) -> None:
    for block in BASH.findall(PAGES[page]):
        for line in COMMAND.findall(block.replace("\\\n", " ")):
            names = line.split()[: 2 if line.startswith("store") else 1]
            known = set(re.findall(r"--[a-z_]+", command(*names, "--help")))
            assert set(re.findall(r"--[a-z_]+", line)) <= known, line


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


@pytest.mark.parametrize(
    ("page", "start", "end"),
    [("README.md", "## Why not", "## What is"), ("docs/benchmarks.md", "## Figures", "## What")],
)
def test_figures_are_those_of_the_benchmarks(page: str, start: str, end: str) -> None:
    figures = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
    measured = (ROOT / "tests/programs/benchmarks/README.md").read_text(encoding="utf-8")
    shown = figures.findall(PAGES[page].partition(start)[2].partition(end)[0])
    assert len(shown) > 5
    assert not set(shown) - set(figures.findall(measured))
