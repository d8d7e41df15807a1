"""The rows of the table: what is done again and again, and how often."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from tests.reliability import damage, kills, manifests, planted, versions
from tests.reliability.calls import Mode, makes_sense
from tests.reliability.forks import wait_for_orphans
from tests.reliability.outcome import Outcome, Subject

KILLS: tuple[Mode, ...] = ("before", "after", "torn")
FAILURES: tuple[Mode, ...] = ("ENOSPC", "EIO", "short")


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Args:
        kills: Random kills of each kind.
        every_call: Take every so-and-so-many-th call to the file system; 1: all.
        flips: Flipped bits.
        resizes: Files cut off or grown.
        manifests: Fuzzed manifests.
        every_plant: Take every so-and-so-many-th of the planted things; 1: all.
    """

    kills: int = 200
    every_call: int = 1
    flips: int = 500
    resizes: int = 200
    manifests: int = 30_000
    every_plant: int = 1


QUICK = Scale(kills=2, every_call=61, flips=50, resizes=20, manifests=300, every_plant=67)


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


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Args:
        name: Its name in the program's options.
        title: Its name in the table.
        check: Runs the case with a number, given what is tested, the directory that `prepare`
            has filled, and an empty one.
        numbers: The cases that a scale asks for, given the directory that `prepare` has filled.
    """

    name: str
    title: str
    check: Callable[[Subject, Path, Path, random.Random, int], Outcome]
    numbers: Callable[[Scale, Path], Sequence[int]]


def prepare(beginnings: Path) -> None:
    """Make what the cases start from. Run it in a process that may fork."""
    kills.prepare(beginnings)
    damage.prepare(beginnings)
    versions.prepare(beginnings / _VERSIONS)
    with TemporaryDirectory(dir=beginnings.parent) as scratch:
        names = {
            f"{beginning} {victim}": kills.calls_of(
                Subject(), beginnings, Path(scratch), beginning=beginning, victim=victim
            )
            for beginning in kills.BEGINNINGS
            for victim in kills.VICTIMS
        }
        names |= {
            way: versions.calls_of(beginnings / _VERSIONS, Path(scratch), way=way)
            for way in versions.WAYS
        }
    (beginnings / _CALLS).write_text(json.dumps(names))


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


_CALLS, _VERSIONS = "calls.json", "versions"


def _random_kills(beginning: kills.Beginning, victim: kills.Victim) -> Kind:
    def check(
        subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
    ) -> Outcome:
        return kills.kill_at_random_moment(
            subject, beginnings, scratch, rng, beginning=beginning, victim=victim
        )

    return Kind(
        f"kill-{beginning}-{victim}",
        f"{beginning} build, {victim} killed at a random moment",
        check,
        lambda scale, _: range(scale.kills),
    )


def _at_calls(
    name: str,
    title: str,
    beginning: kills.Beginning,
    victim: kills.Victim,
    modes: Sequence[Mode],
) -> Kind:
    def check(
        subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, number: int
    ) -> Outcome:
        call, mode = divmod(number, len(modes))
        return kills.go_wrong_at_call(
            subject,
            beginnings,
            scratch,
            rng,
            beginning=beginning,
            victim=victim,
            number=call,
            mode=modes[mode],
        )

    return Kind(name, title, check, _numbers_of(f"{beginning} {victim}", modes))


def _change_at_calls(name: str, title: str, way: versions.Way, modes: Sequence[Mode]) -> Kind:
    def check(
        subject: Subject, beginnings: Path, scratch: Path, _: random.Random, number: int
    ) -> Outcome:
        call, mode = divmod(number, len(modes))
        return versions.go_wrong_at_call(
            subject, beginnings / _VERSIONS, scratch, way=way, number=call, mode=modes[mode]
        )

    return Kind(name, title, check, _numbers_of(way, modes))


def _numbers_of(counted: str, modes: Sequence[Mode]) -> Callable[[Scale, Path], Sequence[int]]:
    """The cases of calls that were counted: each call in each mode that makes sense for it."""

    def numbers(scale: Scale, beginnings: Path) -> Sequence[int]:
        calls = json.loads((beginnings / _CALLS).read_text())[counted]
        possible = [
            call * len(modes) + index
            for call, called in enumerate(calls)
            for index, mode in enumerate(modes)
            if makes_sense(mode, called)
        ]
        return possible[:: scale.every_call]

    return numbers


def _kinds() -> Iterator[Kind]:
    for beginning in kills.BEGINNINGS:
        for victim in kills.VICTIMS:
            yield _random_kills(beginning, victim)
    for beginning in kills.BEGINNINGS:
        for victim in kills.VICTIMS:
            yield _at_calls(
                f"calls-{beginning}-{victim}",
                f"{beginning} build, {victim} killed at every file-system call",
                beginning,
                victim,
                KILLS,
            )
    for beginning in kills.BEGINNINGS:
        yield _at_calls(
            f"errors-{beginning}",
            f"{beginning} build, every file-system call fails once",
            beginning,
            "parent",
            FAILURES,
        )
    titles: dict[versions.Way, str] = {
        "parts": "build in two parts",
        "append": "append",
        "pull": "pull from a URL over another store",
    }
    for way, title in titles.items():
        title_of_kills = f"{title}, killed at every file-system call"
        yield _change_at_calls(f"calls-{way}", title_of_kills, way, KILLS)
        title_of_errors = f"{title}, every file-system call fails once"
        yield _change_at_calls(f"errors-{way}", title_of_errors, way, FAILURES)
    yield Kind(
        "flips",
        "bit flipped in a file of a store",
        lambda subject, beginnings, scratch, rng, _: damage.flip_a_bit(
            subject, beginnings, scratch, rng
        ),
        lambda scale, _: range(scale.flips),
    )
    yield Kind(
        "sizes",
        "file of a store cut off or grown",
        lambda subject, beginnings, scratch, rng, _: damage.resize_a_file(
            subject, beginnings, scratch, rng
        ),
        lambda scale, _: range(scale.resizes),
    )
    yield Kind(
        "manifests",
        "manifest fuzzed, and signed anew",
        lambda subject, beginnings, scratch, rng, _: manifests.open_fuzzed(
            subject, beginnings, scratch, rng
        ),
        lambda scale, _: range(scale.manifests // manifests.BATCH),
    )
    yield Kind(
        "plants",
        "links, fifos, deep or endless files planted",
        lambda subject, beginnings, scratch, _, number: planted.meet(
            subject, beginnings, scratch, number
        ),
        lambda scale, _: range(0, planted.NUM_CASES, scale.every_plant),
    )


KINDS = {kind.name: kind for kind in _kinds()}
