"""The rows of the table: what is done again and again, and how often."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tests.reliability import blows, damage, manifests, planted, strangers
from tests.reliability.changes import CHANGES
from tests.reliability.forks import wait_for_orphans
from tests.reliability.outcome import Outcome, Subject


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Args:
        kills: Kills of each kind, and failures.
        flips: Flipped bits.
        resizes: Files cut off or grown.
        manifests: Fuzzed manifests.
        every_plant: Take every so-and-so-many-th of the planted things; 1: all.
        strangers: Answers of hostile servers, caches that vanish, and values of an index.
    """

    kills: int = 200
    flips: int = 500
    resizes: int = 200
    manifests: int = 30_000
    every_plant: int = 1
    strangers: int = 200


QUICK = Scale(kills=2, flips=50, resizes=20, manifests=300, every_plant=67, strangers=10)


@dataclass(frozen=True)
class Case:
    """One run of a kind. All that is random in it comes from these three.

    Args:
        kind: Name of the kind.
        number: Which of its cases.
        seed: Seed of the program.
    """

    kind: str
    number: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that a line names.

        Raises:
            ValueError: It names none.
        """
        kind, number, seed = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        return cls(kind, int(number), int(seed))


Check = Callable[[Subject, Path, Path, random.Random, int], Outcome]


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Args:
        title: Its name in the table.
        check: Runs the case with a number, given what is tested, the directory that `prepare`
            has filled, and an empty one.
        numbers: The cases that a scale asks for, given the directory that `prepare` has filled.
    """

    title: str
    check: Check
    numbers: Callable[[Scale, Path], Sequence[int]]


_CALLS = "calls.json"


def prepare(beginnings: Path) -> None:
    """Make what the cases start from. Run it in a process that may fork."""
    for name, change in CHANGES.items():
        change.prepare(beginnings / name)
    damage.prepare(beginnings)
    calls = {}
    if blows.can_trace():
        with TemporaryDirectory(dir=beginnings.parent) as scratch:
            calls = {name: blows.calls_of(beginnings, Path(scratch), name) for name in CHANGES}
    (beginnings / _CALLS).write_text(json.dumps(calls))


def run_case(subject: Subject, beginnings: Path, case: Case) -> Outcome:
    """Run one case, in a process that may fork and has no children."""
    started = monotonic()
    rng = random.Random(str(case))
    with TemporaryDirectory(dir=beginnings.parent) as scratch:
        outcome = KINDS[case.kind].check(subject, beginnings, Path(scratch), rng, case.number)
        # A check that ends early may leave some.
        wait_for_orphans(0.0)
    outcome.seconds = monotonic() - started
    return outcome


def cases(scale: Scale, seed: int, beginnings: Path, names: Sequence[str]) -> list[Case]:
    """The cases of some kinds."""
    return [
        Case(name, number, seed)
        for name in names
        for number in KINDS[name].numbers(scale, beginnings)
    ]


def _at_calls(name: str, *, kills: bool) -> Kind:
    def calls(beginnings: Path) -> list[tuple[str, int]]:
        found = json.loads((beginnings / _CALLS).read_text()).get(name, [])
        return blows.possible([(called, number) for called, number in found], kills=kills)

    def check(
        subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, number: int
    ) -> Outcome:
        called = calls(beginnings)[number]
        return blows.go_wrong_at_call(subject, beginnings, scratch, rng, name, called, kills=kills)

    def numbers(scale: Scale, beginnings: Path) -> Sequence[int]:
        """As many as the scale asks for, evenly spread over all calls."""
        count = len(calls(beginnings))
        return sorted(
            {index * count // scale.kills for index in range(scale.kills)} if count else ()
        )

    what = "killed at a system call" if kills else "a system call fails"
    return Kind(f"{CHANGES[name].title}, {what}", check, numbers)


def _kinds() -> Iterator[tuple[str, Kind]]:
    for name, change in CHANGES.items():
        for victim in ("parent", "worker") if change.is_build else ("parent",):

            def kill(
                subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int,
                name: str = name, victim: str = victim,
            ) -> Outcome:  # fmt: skip
                return blows.kill_at_random_moment(subject, beginnings, scratch, rng, name, victim)

            title = f"{change.title}, {victim} killed at a random moment"
            yield f"kill-{name}-{victim}", Kind(title, kill, lambda scale, _: range(scale.kills))
        yield f"calls-{name}", _at_calls(name, kills=True)
        yield f"errors-{name}", _at_calls(name, kills=False)
    for name, (title, flip, count) in _DAMAGES.items():
        check = partial(_without_number, flip)
        yield name, Kind(title, check, lambda scale, _, count=count: range(count(scale)))
    yield (
        "plants",
        Kind(
            "links, fifos, deep or endless files planted",
            lambda subject, beginnings, scratch, _, number: planted.meet(
                subject, beginnings, scratch, number
            ),
            lambda scale, _: range(0, planted.NUM_CASES, scale.every_plant),
        ),
    )


def _without_number(
    check: Callable[[Subject, Path, Path, random.Random], Outcome],
    subject: Subject,
    beginnings: Path,
    scratch: Path,
    rng: random.Random,
    _: int,
) -> Outcome:
    return check(subject, beginnings, scratch, rng)


_STRANGERS = {
    name: (title, check, lambda scale: scale.strangers)
    for name, (title, check) in strangers.KINDS.items()
}
_DAMAGES: dict[str, tuple[str, Any, Callable[[Scale], int]]] = {
    **_STRANGERS,
    "flips": ("bit flipped in a file of a store", damage.flip_a_bit, lambda scale: scale.flips),
    "sizes": (
        "file of a store cut off or grown",
        damage.resize_a_file,
        lambda scale: scale.resizes,
    ),
    "manifests": (
        "manifest fuzzed, and signed again",
        manifests.open_fuzzed,
        lambda scale: scale.manifests // manifests.BATCH,
    ),
}
KINDS = dict(_kinds())
