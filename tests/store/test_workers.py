"""Worker processes: whatever a dataset does in them ends in an error, and never in a wait."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from lightning_memmap.errors import DatasetError
from lightning_memmap.store.workers import Workers, make_task_runner


def fails_at_length(_: Any, __: Any) -> None:
    raise ValueError("x" * 1_000_000)


def test_large_error_and_large_tasks_do_not_wait_for_each_other() -> None:
    # No connection has room for either.
    tasks = [np.arange(200_000)] * 3
    with pytest.raises(DatasetError, match=r"ValueError: x+\.\.\.$"), Workers(None, 1) as workers:
        workers.run(make_task_runner(fails_at_length), tasks, lambda *_: None)


def dies_with_a_child(_: Any, __: Any) -> None:
    if os.fork() == 0:
        # It has the connection of its parent.
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_process_that_dies_is_noticed_although_what_it_forked_lives() -> None:
    begin = time.monotonic()
    with pytest.raises(DatasetError, match="has died"), Workers(None, 2) as workers:
        workers.run(make_task_runner(dies_with_a_child), range(4), lambda *_: None)
    assert time.monotonic() - begin < 50
