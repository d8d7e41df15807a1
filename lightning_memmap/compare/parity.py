"""Parity: do all arms train on the same rows, with the same losses, to the same weights?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.compare.launch import RunResult

#: How far losses and weights may differ, by precision of the Trainer. Sums in another order differ
#: by rounding, and optimizers that divide by the size of a gradient, as Adam does, enlarge that;
#: on GPUs, float32 products may be rounded to TensorFloat-32. docs/compare.md has what was seen.
TOLERANCES = {"64": 1e-6, "32": 1e-3, "16": 5e-2}


@dataclass(frozen=True)
class Parity:
    """What an arm's check run has in common with the reference.

    Args:
        held: Whether rows, losses and weights agree; None where what was compared agrees, and
            losses and weights could not be.
        rows: Steps whose rows are those of the global batch, and all steps.
        first_wrong_step: The first step with other rows.
        same_content: Whether the model was given the same bytes in all steps, which also depends
            on the transform. For information.
        same_initial: Whether the weights before the first step are bit for bit those of the
            reference.
        loss_difference: The largest difference of losses of a step, relative to the largest loss
            of the reference. None where it was not judged.
        weight_difference: Distance of the final weights from those of the reference, relative to
            how far training moved those (Euclidean norms). None where it was not judged.
        max_weight_difference: The largest difference of one weight, absolute. For information.
        tolerance: What the two differences may be.
        problems: What differs beyond that, in words.
        notes: What a reader must know.
    """

    held: bool | None
    rows: tuple[int, int]
    first_wrong_step: int | None = None
    same_content: bool | None = None
    same_initial: bool | None = None
    loss_difference: float | None = None
    weight_difference: float | None = None
    max_weight_difference: float | None = None
    tolerance: float = nan
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Check:
    """What a check run saw, over all of its processes."""

    taken: list[int]
    seen: list[int]
    losses: list[float]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    parameters: list[str]

    @classmethod
    def of(cls, result: RunResult) -> "Check":
        """Put together what the processes of a check run wrote."""
        by_part = parts_of(result.ranks)
        return cls(
            taken=[
                sum(step) % 2**64 for step in zip(*(p[0]["taken"] for p in by_part), strict=True)
            ],
            seen=[sum(step) % 2**64 for step in zip(*(p[0]["seen"] for p in by_part), strict=True)],
            losses=global_losses(result.ranks),
            initial=_load(result.out / "initial.pt"),
            final=_load(result.out / "final.pt"),
            parameters=list(result.ranks[0]["parameters"]),
        )


def parts_of(ranks: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The processes by the part of the global batch that they consume; several share one under
    tensor and pipeline parallelism."""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        parts.setdefault(rank["data_rank"], []).append(rank)
    return [parts[key] for key in sorted(parts)]


def global_losses(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The loss of each global batch: the mean over its equal parts. Of processes that share a
    part, those that know no loss, such as the first stages of a pipeline, do not count."""
    columns = []
    for part in parts_of(ranks):
        known = [rank["losses"] for rank in part if not all(map(isnan, rank["losses"]))]
        columns.append(known[-1] if known else part[0]["losses"])
    return [sum(step) / len(step) for step in zip(*columns, strict=True)]


def _load(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True, map_location="cpu")
    return loaded


def judge(
    check: Check,
    reference: Check,
    expected: Sequence[int],
    tolerance: float,
    *,
    is_random: bool,
    notes: Sequence[str] = (),
) -> Parity:
    """Compare an arm with the reference.

    Args:
        check: The arm's check run.
        reference: That of the reference, which may be the same.
        expected: The hash of each global batch, from the store.
        tolerance: See `Parity`.
        is_random: Whether the arms' batches differ by nature, so that losses and weights cannot
            be judged.
        notes: Handed on.
    """
    problems: list[str] = []
    notes = list(notes)
    steps = len(expected)
    wrong = [step for step in range(steps) if check.taken[step : step + 1] != [expected[step]]]
    if wrong:
        problems.append(f"other rows than the global batch's from step {wrong[0]} on")
    same_initial = _same(check.initial, reference.initial, check.parameters)
    if not same_initial:
        problems.append("the weights differ before the first step")
    loss = weight = largest = None
    if is_random:
        notes.append(
            "the training transform is random and there is no eval_transform that could stand in"
            " for it: losses and weights are not compared"
        )
    else:
        loss = _loss_difference(check.losses, reference.losses)
        if all(map(isnan, (*check.losses, *reference.losses))):
            notes.append("training_step returns no loss: weights alone are compared")
        elif loss is None:
            problems.append("a loss is missing or not finite")
        elif loss > tolerance:
            problems.append(f"losses differ by {loss:.1e}, and may by {tolerance:.0e}")
        if set(check.final) != set(reference.final):
            problems.append("the weights have other names than the reference's")
        else:
            weight, largest = _weight_difference(check, reference)
            if not weight <= tolerance:
                problems.append(f"weights differ by {weight:.1e}, and may by {tolerance:.0e}")
            if unlike := _trained(check) ^ _trained(reference):
                # However small a share of all weights they are.
                names = ", ".join(sorted(unlike))
                problems.append(f"trained in one of this arm and the reference alone: {names}")
        if check.seen != reference.seen:
            notes.append(
                "from the same rows the model was given other bytes than in the reference: what"
                " lies between, such as a transform or a cast, did not do exactly the same"
            )
    return Parity(
        held=False if problems else None if is_random else True,
        rows=(steps - len(wrong), steps),
        first_wrong_step=wrong[0] if wrong else None,
        same_content=check.seen == reference.seen,
        same_initial=same_initial,
        loss_difference=loss,
        weight_difference=weight,
        max_weight_difference=largest,
        tolerance=tolerance,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    return all(
        name in one and name in other and torch.equal(one[name], other[name]) for name in names
    )


def _trained(check: Check) -> set[str]:
    """The parameters that training has changed."""
    return {
        name
        for name in check.parameters
        if name in check.final and not torch.equal(check.initial[name], check.final[name])
    }


def _loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    if len(losses) != len(reference) or not all(map(isfinite, (*losses, *reference))):
        return None
    largest = max(abs(value) for value in reference) or 1.0
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True)) / largest


def _weight_difference(check: Check, reference: Check) -> tuple[float, float]:
    distance = moved = 0.0
    largest = 0.0
    for name in reference.parameters:
        if name not in reference.final:
            continue
        before = reference.initial[name].double()
        after = reference.final[name].double()
        difference = (check.final[name].double() - after).abs()
        distance += float(difference.square().sum())
        moved += float((after - before).square().sum())
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
    if distance == 0:
        return 0.0, 0.0
    return (distance / moved) ** 0.5 if moved else float("inf"), largest
