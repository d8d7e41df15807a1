"""The notebook of the examples runs from top to bottom, and is kept without outputs."""

import json
import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.support.preloaded import python

ROOT = Path(__file__).resolve().parents[3]
PATH = ROOT / "examples" / "first_hour.ipynb"


def test_notebook_is_kept_without_outputs() -> None:
    for cell in nbformat.read(PATH, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
# A client of Jupyter leaves sockets and event loops to the collector of garbage.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # The kernel of this environment, not one that a user has installed under the same name.
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": "Preloaded"}))
    notebook = nbformat.read(PATH, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, resources=resources).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert [path.name for path in (tmp_path / "stores" / "notebook").glob("[!.]*[!k]")]
