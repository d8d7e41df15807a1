"""``lightning-memmap completion``: what a shell offers after a word."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memmap import cli
from lightning_memmap.cli import main
from lightning_memmap.commands.completion import SHELLS

# LightningCLI uses names that jsonargparse has changed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)
OFFER = """
source "$1"; shift
COMP_WORDS=(lightning-memmap "$@"); COMP_CWORD=$#
$(complete -p lightning-memmap | sed "s/.*-F \\([^ ]*\\).*/\\1/")
printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(printed("bash"))
    return path


def printed(shell: str) -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as out, pytest.raises(SystemExit) as end:
        main(["completion", shell])
    assert end.value.code == 0
    return out.getvalue()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["do"], {"doctor"}),
        (["store", "pl"], {"plan"}),
        (["store", "plan", "--mem"], {"--memory", "--memory_fraction"}),
        (["compare", "--dev"], {"--devices"}),
        (["fit", "--trainer.max_e"], {"--trainer.max_epochs"}),
        (["predict", "--trainer.max_e"], {"--trainer.max_epochs"}),
        (["rows", "--ep"], {"--epoch"}),
        (["completion", ""], set(SHELLS)),
    ],
)
def test_bash_offers_what_a_word_begins(
    bash_script: Path, words: list[str], offered: set[str]
) -> None:
    command = ["bash", "--norc", "-c", OFFER, "bash", str(bash_script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == offered, done.stderr


def test_every_command_of_the_help_is_offered(
    bash_script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0] for line in lines if line.startswith("  ") and "  " in line.strip()}
    script = bash_script.read_text()
    (offered,) = [line for line in script.splitlines() if "_memmap_subparsers=(" in line]
    assert named == set(offered.partition("(")[2].rstrip(")").split())


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str) -> None:
    assert "memory_fraction" in printed(shell)


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["completion", "bash"])
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert "pip install 'lightning_memmap[completion]'" in error
    assert len(error.splitlines()) == 1
