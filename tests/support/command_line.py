"""The command ``lightning-memmap``, run in the process of the test."""

import pytest

from lightning_memmap.cli import main


class CommandLine:
    """Runs ``lightning-memmap`` in this process and keeps its output.

    Args:
        capsys: What captures the output.
        first: The arguments that stand before those of each call.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: object) -> None:
        self._capsys, self._first = capsys, first
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*map(str, (*self._first, *arguments))])
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code
