"""The program of docs/data_bench.md, at tiny size."""

import re
from pathlib import Path

import pytest

from examples.data_bench import BEGIN, END, NoisyDigits
from tests.programs.examples.test_examples import ROOT, run


@pytest.mark.slow
def test_program_writes_its_figures_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    options = ["--num_rows", "240", "--num_seeds", "1", "--num_folds", "2", "--max_epochs", "2"]
    run(tmp_path, str(ROOT / "examples" / "data_bench.py"), *options, "--page", str(page))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n240 digits")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    accuracies = re.findall(r"^\| .* \| (0\.\d+|1\.0+) \(", text, re.MULTILINE)
    assert len(accuracies) == 5
    named, right = map(int, re.findall(r"names (\d+) labels, and (\d+)", text)[0])
    assert right <= named <= 240


def test_noisy_digits_have_other_labels_in_changed_rows() -> None:
    noisy = NoisyDigits(200, 0.2)
    differs = [noisy[row]["label"] != noisy.digits[row]["label"] for row in range(200)]
    assert differs == noisy.is_wrong.tolist()
    assert 20 < sum(differs) < 60
