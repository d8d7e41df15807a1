"""The parity check: do all variants train on the same rows, with equal losses, to equal weights?

Hashes of rows add up from data devices to processes to the global batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_memmap.compare.metrics import Rank, shares_of
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.transform import takes_generator
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies.microbatch import MicroBatches

MODULUS = 2**64


def batches_of(batch: Any) -> list[Any]:
    """The batches in what a callback receives as a batch."""
    if isinstance(batch, SuperBatch):
        return batch.batches
    return batch.parts if isinstance(batch, MicroBatches) else [batch]


def hash_batch(batch: Any) -> int:
    """Sum, modulo 2**64, the XXH3 of each row over the bytes of all leaves of a (super-)batch."""
    total = 0
    for part in batches_of(batch):
        leaves = (_rows_of(leaf) for _, leaf in named_leaves(part, whole=(Padded,)))
        for row in zip(*(rows for rows in leaves if rows is not None), strict=True):
            digest = xxhash.xxh3_64()
            for each in row:
                digest.update(each)
            total += digest.intdigest()
    return total % MODULUS


def _rows_of(leaf: Any) -> Sequence[Any] | None:
    """The bytes of each row of a leaf, without padding; None of one that has no rows or bytes."""
    if isinstance(leaf, Tensor) and not leaf.is_nested:
        return _bytes(leaf) if leaf.ndim and leaf.numel() else None
    if not isinstance(leaf, (Padded, RowList, Tensor)):
        return None
    rows = leaf.rows() if isinstance(leaf, Padded) else leaf
    return [
        row.encode("utf-8", "surrogatepass")
        if isinstance(row, str)
        else row
        if isinstance(row, bytes)
        else _bytes(row[None])[0]
        for row in rows
    ]


def _bytes(leaf: Tensor) -> Any:
    plain = leaf.detach().cpu().as_subclass(Tensor).contiguous()
    # A row may be empty.
    return plain.view(len(plain), plain[0].numel()).view(torch.uint8).numpy()


class HashedTransform(nn.Module):
    """A batch transform that appends the hash of its rows to a list before it changes them."""

    def __init__(self, transform: Callable[..., Any], hashes: list[int]) -> None:
        super().__init__()
        # As an attribute, a module is copied to the data device with this one.
        self.transform = transform
        # All copies of this bound method, one for each data device, append to one list.
        self._note = hashes.append
        self._takes_generator = takes_generator(transform)

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        """Record the hash of the rows, and transform them."""
        self._note(hash_batch(batch))
        options = {"generator": generator} if self._takes_generator else {}
        return self.transform(batch, **options)


#: How far losses and weights may differ, by precision of the Trainer. Sums in another order differ
#: by rounding, and optimizers that divide by the size of a gradient, as Adam does, enlarge that;
#: on GPUs, float32 products may be rounded to TensorFloat-32. docs/compare.md has what was seen.
_TOLERANCES = {"64": 1e-6, "32": 1e-3, "16": 5e-2}


def default_tolerance(precision: str) -> float:
    """The largest relative difference that counts as equal under a precision of the Trainer."""
    return next((value for key, value in _TOLERANCES.items() if key in precision), 1e-3)


@dataclass(frozen=True)
class Parity:
    """What a variant's check run has in common with the reference."""

    holds: bool
    rows: list[int]
    loss_difference: float | None = None
    weight_difference: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckedRun:
    """What a check run saw, over all of its processes; and what it trained."""

    hashes: list[int]
    losses: list[float]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    parameters: Sequence[str]
    #: Parts of a step's rows that go through the module by themselves.
    num_parts: int

    @classmethod
    def of(cls, ranks: Sequence[Rank], folder: Path) -> "CheckedRun":
        """Put together what the processes of a check run wrote into their folder."""
        shares = [processes[0] for processes in shares_of(ranks)]
        return cls(
            hashes=_add(share.hashes for share in shares),
            losses=global_losses(ranks),
            initial=torch.load(folder / "initial.pt", weights_only=True),
            final=torch.load(folder / "final.pt", weights_only=True),
            parameters=ranks[0].parameters,
            num_parts=sum(share.num_parts for share in shares),
        )

    @property
    def trained(self) -> set[str]:
        """The parameters that training has changed."""
        known = (name for name in self.parameters if name in self.final)
        return {name for name in known if _differs(self.initial, self.final, name)}


def _add(hashes: Iterable[Sequence[int]]) -> list[int]:
    return [sum(step) % MODULUS for step in zip(*hashes, strict=True)]


def global_losses(ranks: Sequence[Rank]) -> list[float]:
    """The loss of each global batch, the mean over its equal shares; NaN where a share has none."""
    columns = []
    for share in shares_of(ranks):
        known = [rank.losses for rank in share if not all(map(isnan, rank.losses))]
        columns.append(known[-1] if known else share[0].losses)
    return [sum(step) / len(step) for step in zip(*columns, strict=True)]


def check_parity(
    run: CheckedRun,
    reference: CheckedRun,
    expected: Sequence[int],
    tolerance: float,
    notes: Sequence[str] = (),
) -> Parity:
    """Compare a variant's check run with that of the reference, which may be the same run."""
    notes, found = list(notes), run.hashes
    wrong = [step for step, rows in enumerate(expected) if found[step : step + 1] != [rows]]
    problems = [f"other rows than the global batch's from step {each} on" for each in wrong[:1]]
    if any(_differs(run.initial, reference.initial, name) for name in run.parameters):
        problems.append("the weights differ before the first step")
    loss = _loss_difference(run.losses, reference.losses)
    weight = _weight_difference(run, reference)
    problems += _weight_problems(run, reference, weight, tolerance)
    if missing := sum(map(isnan, run.losses)):
        notes.append(f"no loss, or NaN, in {missing} of {len(run.losses)} steps")
    if loss is None:
        problems.append("a loss is missing or not finite")
    elif loss > tolerance:
        problems.append(f"losses differ by {loss:.1e}; {tolerance:.0e} is allowed")
    if problems and run.num_parts > 1 and not notes:
        notes.append(
            f"a step's rows go through the model in {run.num_parts} parts: a loss that is no mean"
            " over rows, or that relates them, and random numbers, as of F.dropout, are others then"
        )
    return Parity(
        holds=not problems,
        rows=[len(expected) - len(wrong), len(expected)],
        loss_difference=loss,
        weight_difference=weight,
        problems=problems,
        notes=notes,
    )


def _differs(first: Mapping[str, Tensor], second: Mapping[str, Tensor], name: str) -> bool:
    return not (name in first and name in second and torch.equal(first[name], second[name]))


def _weight_problems(
    run: CheckedRun, reference: CheckedRun, difference: float | None, tolerance: float
) -> Iterator[str]:
    if difference is None:
        yield "the weights have other names than the reference's"
        return
    if not difference <= tolerance:
        yield f"weights differ by {difference:.1e}; {tolerance:.0e} is allowed"
    if unlike := run.trained ^ reference.trained:
        # A difference however small their share of all weights is.
        yield f"trained only here or only in the reference: {', '.join(sorted(unlike))}"


def _loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    # Steps may have no loss, but then the same ones. From a loss of NaN, weights would be NaN.
    pairs = [pair for pair in zip(losses, reference, strict=False) if not all(map(isnan, pair))]
    if len(losses) != len(reference) or not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return None
    largest = max((abs(b) for _, b in pairs), default=0.0) or 1.0
    return max((abs(a - b) for a, b in pairs), default=0.0) / largest


def _weight_difference(run: CheckedRun, reference: CheckedRun) -> float | None:
    if set(run.final) != set(reference.final):
        return None
    distance = moved = 0.0
    for name in reference.parameters:
        if name in reference.final:
            after = reference.final[name].double()
            distance += float((run.final[name].double() - after).square().sum())
            moved += float((after - reference.initial[name].double()).square().sum())
    if distance == 0:
        return 0.0
    return (distance / moved) ** 0.5 if moved else float("inf")
