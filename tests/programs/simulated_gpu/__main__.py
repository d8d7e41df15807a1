"""``python -m tests.programs.simulated_gpu [arguments]``: pytest on simulated GPUs.

Without options it runs the tests that are marked ``gpu``, of the files given or of all.

With ``--program FILE [arguments]``, another program on them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.programs.simulated_gpu.build import build_library

_TESTS = Path(__file__).parents[2]


def main(arguments: list[str]) -> int:
    # Before torch is imported. All children use the same library.
    os.environ["SIMULATED_GPU_LIBRARY"] = str(build_library())
    if arguments[:1] == ["--program"]:
        from tests.support.preloaded import python

        # The processes that it starts have the devices, too.
        return subprocess.call([python(), *arguments[1:]])
    import pytest

    # The first of these imports torch.
    from tests.programs.simulated_gpu import devices

    class Reports:
        """Fails a test in which a device reported a fault."""

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
            devices.reports.clear()
            result = yield
            devices.check_open_copies()
            if devices.reports:
                text = "\n".join(map(str, devices.reports[:5]))
                pytest.fail(f"{len(devices.reports)} reports:\n{text}", pytrace=False)
            return result

    given = arguments or marked_files()
    if not any(each.startswith("-") for each in given):
        given = ["-m", "gpu", "--tb=short", "--show-capture=no", *given]
    return pytest.main(["-p", "no:xdist", *given], plugins=[Reports()])


def marked_files() -> list[str]:
    """The files with tests that are marked ``gpu``."""
    files = sorted(_TESTS.rglob("test_*.py"))
    return [str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
