"""The rows of the table: what is done again and again, and how often."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from tests.programs.reliability import blows, damage, manifests, planted, strangers
from tests.programs.reliability.changes import CHANGES
from tests.programs.reliability.forks import wait_for_orphans
from tests.programs.reliability.outcome import Outcome, Subject


@dataclass(frozen=True)
class Scale:
    """How often each is done: kills and failures of each change, flipped bits, files cut off or
    grown, fuzzed manifests, planted things (by default all), and each kind of stranger."""

    kills: int = 200
    flips: int = 500
    resizes: int = 200
    manifests: int = 30_000
    plants: int = planted.NUM_CASES
    strangers: int = 200


QUICK = Scale(kills=2, flips=50, resizes=20, manifests=300, plants=15, strangers=10)


@dataclass(frozen=True)
class Case:
    """One run of a kind. All that is random in it comes from these three."""

    kind: str
    number: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that a line names."""
        kind, number, seed = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        return cls(kind, int(number), int(seed))


@dataclass(frozen=True)
class Kind:
    """A kind of case: its title, what runs the case of a number, and the numbers of a scale. Both
    are given the directory that `prepare` has filled."""

    title: str
    check: Callable[[Subject, Path, Path, random.Random, int], Outcome]
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
    """The cases of some kinds, of which all get their turn."""
    numbers = [KINDS[name].numbers(scale, beginnings) for name in names]
    return [
        Case(name, number, seed)
        for turn in zip_longest(*numbers)
        for name, number in zip(names, turn, strict=True)
        if number is not None
    ]


def _calls(beginnings: Path, name: str, *, kills: bool) -> list[tuple[str, int]]:
    found = json.loads((beginnings / _CALLS).read_text()).get(name, [])
    return blows.possible([(called, number) for called, number in found], kills=kills)


def _at_calls(name: str, *, kills: bool) -> Kind:
    def check(
        subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, number: int
    ) -> Outcome:
        called = _calls(beginnings, name, kills=kills)[number]
        return blows.go_wrong_at_call(subject, beginnings, scratch, rng, name, called, kills=kills)

    def numbers(scale: Scale, beginnings: Path) -> Sequence[int]:
        """As many as the scale asks for, spread over all calls, and in any order."""
        count = len(_calls(beginnings, name, kills=kills))
        spread = {index * count // scale.kills for index in range(scale.kills if count else 0)}
        return random.Random(name).sample(sorted(spread), len(spread))

    what = "killed at a system call" if kills else "a system call fails"
    return Kind(f"{CHANGES[name].title}, {what}", check, numbers)


def _by(count: str) -> Callable[[Scale, Path], range]:
    return lambda scale, _: range(getattr(scale, count))


def _limits(scale: Scale, _: Path) -> range:
    return range(min(scale.kills, blows.NUM_LIMITS))


def _kinds() -> Iterator[tuple[str, Kind]]:
    for name, change in CHANGES.items():
        for victim in ("parent", "worker") if change.is_build else ("parent",):
            check = partial(blows.kill_at_random_moment, name=name, victim=victim)
            title = f"{change.title}, {victim} killed at a random moment"
            yield f"kill-{name}-{victim}", Kind(title, check, _by("kills"))
        yield f"calls-{name}", _at_calls(name, kills=True)
        yield f"errors-{name}", _at_calls(name, kills=False)
        if name != "threads":  # Python itself waits for ever for a thread without memory.
            check = partial(blows.run_short_of_memory, name=name)
            yield f"memory-{name}", Kind(f"{change.title}, short of memory", check, _limits)
    for name, (title, check) in strangers.KINDS.items():
        yield name, Kind(title, check, _by("strangers"))
    yield "flips", Kind("bit flipped in a file of a store", damage.flip_a_bit, _by("flips"))
    title = "file of a store cut off or grown"
    yield "sizes", Kind(title, damage.resize_a_file, _by("resizes"))
    yield (
        "manifests",
        Kind(
            "manifest fuzzed, and signed again",
            manifests.open_fuzzed,
            lambda scale, _: range(scale.manifests // manifests.BATCH),
        ),
    )
    yield (
        "plants",
        Kind(
            "links, fifos, deep or endless files planted",
            planted.meet,
            lambda scale, _: [
                index * planted.NUM_CASES // scale.plants for index in range(scale.plants)
            ],
        ),
    )


KINDS = dict(_kinds())
#: By kind of case, the changes that it breaks off.
BROKEN_OFF = ("kill-", "calls-", "errors-", "memory-")
