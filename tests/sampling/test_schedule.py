"""Steps that are left out: all others stay as they are, whatever the division."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling.schedule import BatchSchedule, SkippedSteps, steps_to_skip


def bounds_of(schedule: BatchSchedule) -> list[tuple[int, int]]:
    return [schedule.bounds(step) for step in range(len(schedule))]


schedules = st.builds(
    BatchSchedule,
    st.integers(1, 200),
    st.integers(1, 40),
    st.integers(1, 48),
    st.booleans(),
).filter(len)


@given(schedules, st.sets(st.integers(0, 40)), st.data())
def test_all_other_steps_have_their_positions_and_a_resumed_epoch_has_those_left(
    whole: BatchSchedule, steps: set[int], data: st.DataObject
) -> None:
    count = len(whole)
    try:
        skipped = SkippedSteps().adding(steps_to_skip(sorted(steps)), whole)
    except ValueError:
        epochs = [{step % count for step in steps if step // count == e} for e in range(41)]
        assert any(len(found) == count for found in epochs)
        return
    for epoch in range(max(steps, default=0) // count + 2):
        kept = [whole.bounds(s) for s in range(count) if epoch * count + s not in steps]
        found = replace(whole, skipped=skipped.of_epoch(epoch, whole.num_positions))
        assert bounds_of(found) == kept
        at = data.draw(st.integers(0, len(kept) - 1))
        assert bounds_of(replace(found, start=kept[at][1])) == kept[at + 1 :]
        assert bounds_of(replace(found, start=kept[at][0])) == kept[at:]


@given(schedules, st.sets(st.integers(0, 40)), st.integers(1, 40))
def test_another_global_batch_leaves_out_the_same_positions(
    whole: BatchSchedule, steps: set[int], other: int
) -> None:
    whole = replace(whole, drop_last=False)
    try:
        skipped = SkippedSteps().adding(steps_to_skip(sorted(steps)), whole)
    except ValueError:
        return
    given_again = skipped.adding(skipped.steps, replace(whole, global_batch=other))
    assert given_again == skipped
    for epoch in skipped.epochs(whole.num_positions):
        spans = skipped.of_epoch(epoch, whole.num_positions)
        found = bounds_of(replace(whole, global_batch=other, skipped=spans))
        positions = [position for span in found for position in range(*span)]
        gone = {position for span in spans for position in range(*span)}
        assert positions == [p for p in range(whole.num_positions) if p not in gone]


def test_a_checkpoint_keeps_them() -> None:
    whole = BatchSchedule(100, 10, 24)
    found = SkippedSteps().adding(((3, 5), (19, 23)), whole)
    assert msgspec.convert(msgspec.to_builtins(found), SkippedSteps) == found
    assert found.positions == ((30, 50), (190, 230))
    # The others are numbered with the batch that they are left out with.
    more = found.adding(((4, 6),), replace(whole, global_batch=50))
    assert more.positions == (*found.positions, (250, 300))


@pytest.mark.parametrize(
    ("given_steps", "expected"),
    [
        (None, ()),
        (range(81_200, 10**15), ((81_200, 10**15),)),
        (range(9, 3, -2), ((5, 6), (7, 8), (9, 10))),
        ([7, 3, 4, 4], ((3, 5), (7, 8))),
        ([], ()),
        (range(5, 5), ()),
    ],
)
def test_steps_are_a_range_or_numbers(given_steps: Any, expected: Any) -> None:
    assert steps_to_skip(given_steps) == expected


@pytest.mark.parametrize("wrong", ["12", 12, [1.5], [-1], range(-3, 2), [True], [[1, 2]]])
def test_other_steps_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="skip_steps"):
        steps_to_skip(wrong)


@pytest.mark.parametrize(
    "saved", [3, [3], [[[1, 2]], [[1, 2, 3]]], [[[2, 1]], []], [[], [[5, 5]]], [[["1", 2]], []]]
)
def test_saved_steps_that_cannot_be_are_refused(saved: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the loader's state says whose they are)
        msgspec.convert(saved, SkippedSteps)
