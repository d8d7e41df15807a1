"""Replicas that run side by side or one after the other, with barriers."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightning_memmap.strategies.replicas.threads import DivergedReplicasError, ReplicaThreads
from tests.rows import CPU

TOGETHER = [CPU] * 4
APART = [torch.device("cpu", index) for index in range(4)]
MIXED = [CPU, APART[1], CPU, APART[1]]


@pytest.fixture(params=[TOGETHER, APART, MIXED], ids=["together", "apart", "mixed"])
def threads(request: pytest.FixtureRequest) -> Iterator[ReplicaThreads]:
    made = ReplicaThreads(request.param)
    yield made
    made.close()


def test_barrier_brings_all_values_to_replica_0(threads: ReplicaThreads) -> None:
    acted = []

    def act(values: list[Any]) -> int:
        acted.append(values)
        return sum(values)

    def work(index: int) -> list[int]:
        return [threads.barrier(index, "sum", index + step, act) for step in range(200)]

    for _ in range(3):
        acted.clear()
        results = threads.run([partial(work, index) for index in range(4)])
        assert results == [[6 + 4 * step for step in range(200)]] * 4
        assert acted == [[step, step + 1, step + 2, step + 3] for step in range(200)]


def test_replicas_on_one_device_run_in_order() -> None:
    threads, order = ReplicaThreads(TOGETHER), []

    def work(index: int) -> None:
        for leg in range(50):
            order.append((leg, index))
            threads.barrier(index, "leg", None, lambda _: None)

    threads.run([partial(work, index) for index in range(4)])
    threads.close()
    assert order == [(leg, index) for leg in range(50) for index in range(4)]


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("when", ["before", "between", "in the action"])
def test_failure_of_a_replica_is_raised(threads: ReplicaThreads, failing: int, when: str) -> None:
    def act(values: list[Any]) -> None:
        if when == "in the action":
            raise KeyError(f"{when} {failing}")

    def work(index: int) -> None:
        if when == "before" and index == failing:
            raise KeyError(f"{when} {failing}")
        threads.barrier(index, "first", None, act)
        if when == "between" and index == failing:
            raise KeyError(f"{when} {failing}")
        threads.barrier(index, "second", None, act)

    for _ in range(2):  # They can be used again.
        with pytest.raises(KeyError, match=f"{when} {failing}"):
            threads.run([partial(work, index) for index in range(4)])
    assert threads.run([partial(int, index) for index in range(4)]) == [0, 1, 2, 3]


@pytest.mark.parametrize("other", range(4))
@pytest.mark.parametrize("kind", ["other name", "one more", "one less"])
def test_diverging_replicas_raise(threads: ReplicaThreads, other: int, kind: str) -> None:
    def work(index: int) -> None:
        if kind == "other name":
            threads.barrier(index, "here" if index == other else "there", None, list)
        if kind == "one less" or index == other:
            threads.barrier(index, "first", None, list)
        if kind == "one less" and index != other:
            threads.barrier(index, "second", None, list)

    with pytest.raises(
        DivergedReplicasError, match=r"replica . of 4 reached .*and replica . reached"
    ):
        threads.run([partial(work, index) for index in range(4)])


def test_fewer_replicas_than_devices_run(threads: ReplicaThreads) -> None:
    def work(index: int) -> int:
        count: int = threads.barrier(index, "count", None, len)
        return count

    assert threads.run([partial(work, index) for index in range(2)]) == [2, 2]
    assert threads.run([partial(work, 0)]) == [1]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_modes_are_those_of_the_caller(grad: bool, inference: bool, autocast: bool) -> None:
    def modes() -> Any:
        layer = torch.nn.Linear(2, 2)
        output = layer(torch.ones(1, 2))
        return output.dtype, output.requires_grad, output.is_inference()

    threads = ReplicaThreads(APART)
    with (
        torch.set_grad_enabled(grad),
        torch.inference_mode(inference),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        expected = modes()
        found = threads.run([modes] * 4)
    threads.close()
    assert found == [expected] * 4


def test_replicas_on_one_device_run_in_the_thread_of_the_caller() -> None:
    def work() -> Any:
        return threading.current_thread()

    caller = threading.current_thread()
    together, mixed = ReplicaThreads(TOGETHER), ReplicaThreads(MIXED)
    assert together.run([work] * 4) == [caller] * 4
    first, other, *rest = mixed.run([work] * 4)
    assert [first, other, *rest] == [caller, other] * 2
    assert other is not caller
    together.close()
    mixed.close()


def test_replicas_started_at_a_barrier_have_the_modes_of_the_caller() -> None:
    threads = ReplicaThreads(TOGETHER)

    def work(index: int) -> list[bool]:
        with torch.no_grad():
            threads.barrier(index, "within", None, len)
            inside = torch.is_grad_enabled()
        return [inside, torch.is_grad_enabled()]

    assert threads.run([partial(work, index) for index in range(4)]) == [[False, True]] * 4
    threads.close()


def test_barrier_outside_of_a_step_acts_at_once() -> None:
    threads = ReplicaThreads(TOGETHER)
    assert threads.barrier(2, "alone", 7, sum) == 7
    threads.close()
