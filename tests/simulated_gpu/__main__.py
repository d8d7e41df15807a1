"""``python -m tests.simulated_gpu [arguments]``: pytest on simulated GPUs."""

import os
import sys
from collections.abc import Iterator

from tests.simulated_gpu.build import UnavailableError, build_library

#: The exit code where the devices cannot be simulated.
UNAVAILABLE = 77
_TESTS = ("tests/simulated_gpu", "tests/unit/loading", "tests/strategies")


def main(arguments: list[str]) -> int:
    # Before torch is imported. All children use the same library.
    try:
        os.environ["SIMULATED_GPU_LIBRARY"] = str(build_library())
    except UnavailableError as error:
        print(error)
        return UNAVAILABLE
    from tests.simulated_gpu import devices

    import pytest

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

    given = arguments or ["-m", "gpu", *_TESTS]
    return pytest.main(["-p", "no:xdist", *given], plugins=[Reports()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
