"""The program of docs/data_bench.md, at tiny size."""

import re
from pathlib import Path

import pytest

from examples.data.digits import Digits
from tests.programs.examples.test_examples import ROOT, run

pytest.importorskip("cleanlab", reason="needs cleanlab, which the extra 'examples' installs")


@pytest.mark.slow
def test_data_bench_writes_its_figures_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nearlier\n<!-- end of figures -->\nafter\n")
    options = ["--num_seeds", "1", "--num_folds", "2", "--max_epochs", "1", "--page", str(page)]
    run(tmp_path, str(ROOT / "examples" / "data_bench.py"), *options)
    text = page.read_text()
    assert text.startswith("before\n<!-- figures -->\n1,257 digits")
    assert text.endswith("<!-- end of figures -->\nafter\n")
    assert "earlier" not in text
    accuracies = re.findall(r"^\| .* \| (\d\.\d+) \(", text, re.MULTILINE)
    # By chance: 0.1.
    assert len(accuracies) == 5
    assert all(float(accuracy) > 0.8 for accuracy in accuracies)
    ((named, right),) = re.findall(r"names (\d+) labels, and (\d+)", text)
    # By chance: 0.16.
    assert int(right) > 0.6 * int(named) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_noisy_digits_have_other_labels_in_changed_rows() -> None:
    from examples.data_bench import NoisyDigits

    noisy, digits = NoisyDigits(0.2), Digits("train")
    pairs = zip(noisy.labels, digits.labels, strict=True)
    assert [wrong != right for wrong, right in pairs] == noisy.is_wrong.tolist()
    assert {noisy[row]["label"] for row in range(len(noisy))} == {*range(10)}
    assert 200 < noisy.is_wrong.sum() < 300
