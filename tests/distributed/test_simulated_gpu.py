"""Several processes, each with a simulated GPU."""

import pytest

from tests.test_simulated_gpu import (
    SEVERAL,
    TIMEOUT_S,
    needs_simulation,
    run_on_simulated_devices,
)


@needs_simulation
@pytest.mark.timeout(TIMEOUT_S)
def test_strategies_of_several_processes_pass_on_simulated_devices() -> None:
    run_on_simulated_devices([SEVERAL])
