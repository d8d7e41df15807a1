"""Hooks of the site: examples and figures become pages, and all pages are in the navigation."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: A link of a page to an example, which is outside of docs/.
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.(?:py|ipynb)\)")
#: The full figures of the benchmarks, which are outside of docs/, too.
FIGURES = "tests/programs/benchmarks/README.md"
#: In the navigation, the section that takes pages which it does not name.
SECTION = "In depth"


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add a page for each example, and each page to the navigation."""
    examples = []
    for path in sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]):
        if path.stem != "__init__":
            text = path.read_text(encoding="utf-8")
            text = _of_notebook(text) if path.suffix == ".ipynb" else _of_program(path.name, text)
            name = f"examples/{path.stem}.md"
            files.append(File.generated(config, name, content=text))
            examples.append(name)
    figures = (ROOT / FIGURES).read_text(encoding="utf-8")
    files.append(File.generated(config, "figures.md", content=figures))
    assert config.nav is not None
    config.nav.append({"Examples": examples})
    named = set(_names(config.nav))
    (section,) = (entry[SECTION] for entry in config.nav if SECTION in entry)
    section += [page.src_uri for page in files.documentation_pages() if page.src_uri not in named]
    return files


def _of_program(name: str, text: str) -> str:
    return f"# {name}\n\n```python\n{text}```\n"


def _of_notebook(text: str) -> str:
    """The cells of a notebook one after the other, with links as they are from a page."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    shown = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
    return "\n\n".join(shown).replace("](../docs/", "](../")


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [name for entry in entries for name in _names(entry)]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to examples and figures lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"](../{FIGURES})", "](figures.md)")
    return EXAMPLE.sub(rf"]({up}examples/\1.md)", markdown)
