"""The page of a report: whole in itself, careful with names, and readable in a real browser."""

import html as html_module
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from lightning_memmap.compare.metrics import TABLES
from lightning_memmap.compare.report import Report, render_html
from tests.compare.reports import MODEL, make_parity, make_report, make_variant

pytestmark = pytest.mark.slow


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
REPORT = make_report(
    make_variant("memmap_superbatch", (900.0, 950.0)),
    make_variant("auto"),
    make_variant("auto+workers2", (500.0, 700.0)),
    make_variant("auto+ideal", (1200.0, 1210.0)),
    make_variant("ddp"),
    make_variant("fsdp", (), status="refused", reason="needs GPUs", parity=None),
)
#: Widths in CSS pixels: a small phone, a usual one, a desktop.
WIDTHS = (320, 390, 1280)


def with_problem() -> Report:
    parity = make_parity(holds=False, problems=("weights differ by 2.0e-01; 1e-03 is allowed",))
    return make_report(make_variant("auto"), make_variant("ddp", parity=parity))


def test_page_has_parity_before_speed_and_every_variant() -> None:
    page = render_html(REPORT)
    assert page.index("<h2>Parity with auto</h2>") < page.index("<h2>Speed: the median")
    for variant in REPORT.variants:
        assert f"<td>{variant.variant}</td>" in page
    for title in ("Losses of the check runs", *TABLES.values()):
        assert (f"<h2>{title}" in page) == (title != TABLES["devices"])
    # The losses of the first and the last step of the check runs.
    assert page.count("<td>1</td>") == page.count("<td>0.1</td>") == 5
    assert "needs GPUs" in page


def test_difference_is_marked_before_anything_else() -> None:
    page = render_html(with_problem())
    assert "Parity does not hold: ddp" in page
    assert page.index('class="bad">ddp: weights differ by 2.0e-01') < page.index("<h2>")


def test_names_are_no_markup() -> None:
    hostile = '<script>alert("x")</script>'
    variant = make_variant("auto", status="failed", reason=hostile)
    page = render_html(
        make_report(variant, command=hostile, model={**MODEL, "model_class": hostile})
    )
    assert "<script" not in page
    assert page.count(str(escape(hostile))) == 3


@pytest.mark.parametrize("variants", [(), (make_variant("auto", (), status="pending"),)])
def test_page_of_an_interrupted_report_is_a_page(variants: Any) -> None:
    report = make_report(*variants, interrupted=True)
    assert "Interrupted" in render_html(report)


#: Put at the end of the page: tells what the browser made of it.
PROBE = """
<script>
const box = (e) => e.getBoundingClientRect();
document.documentElement.dataset.layout = JSON.stringify({
  width: window.innerWidth,
  scrollWidth: document.documentElement.scrollWidth,
  tables: document.querySelectorAll("table").length,
  verdictBottom: box(document.querySelector(".verdict")).bottom,
});
</script>
"""


def layouts(page: str, path: Path) -> dict[int, dict[str, Any]]:
    """What a browser makes of a page, by the width of its window."""
    # A window is never as narrow as a phone; a frame is. Its page is of the same origin.
    frames = "".join(
        f'<iframe id="w{width}" style="width:{width}px;height:900px;border:0"'
        f' srcdoc="{html_module.escape(page + PROBE)}"></iframe>'
        for width in WIDTHS
    )
    collect = """<script>window.onload = () => {
      for (const f of document.querySelectorAll("iframe"))
        f.dataset.layout = f.contentDocument.documentElement.dataset.layout;
    };</script>"""
    (path / "frames.html").write_text(f"<!doctype html>{frames}{collect}", encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path / 'user'}",
         "--virtual-time-budget=20000", "--dump-dom", str(path / "frames.html")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r'<iframe id="w(\d+)"[^>]*? data-layout="([^"]*)"', done.stdout)
    return {int(width): json.loads(html_module.unescape(layout)) for width, layout in found}


@needs_browser
def test_page_fits_a_phone_and_a_desktop(tmp_path: Path) -> None:
    found = layouts(render_html(REPORT), tmp_path)
    assert set(found) == set(WIDTHS)
    for width, layout in found.items():
        assert layout["width"] == width
        # Wide tables scroll within themselves: the page does not.
        assert layout["scrollWidth"] <= width
        assert layout["tables"] == 7
        assert layout["verdictBottom"] < 600, "the verdict is on the first screen"
