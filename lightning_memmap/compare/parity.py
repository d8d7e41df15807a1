"""The parity check: do all variants train on the same rows, with equal losses, to equal weights?

Hashes of rows add up from data devices to processes to the global batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_memmap.compare.figures import Ranks, group_by_data_rank
from lightning_memmap.compare.run_files import RankRecord
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.transform import has_parameter
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.process_group import view_as_bytes
from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies.replicas.batches import ReplicaBatches

MODULUS = 2**64


def _device_batches(batch: Any) -> list[Any]:
    """List the batches of devices or micro-batches that make up a batch."""
    if isinstance(batch, SuperBatch):
        return batch.batches
    return batch.batches if isinstance(batch, ReplicaBatches) else [batch]


def hash_batch(batch: Any) -> int:
    """Sum, modulo 2**64, the XXH3 of each row over the bytes of all leaves of a (super-)batch."""
    total = 0
    for part in _device_batches(batch):
        leaves = (_bytes_of_rows(leaf) for _, leaf in named_leaves(part, leaf_types=(Padded,)))
        for row in zip(*(rows for rows in leaves if rows is not None), strict=True):
            digest = xxhash.xxh3_64()
            for value in row:
                digest.update(value)
            total += digest.intdigest()
    return total % MODULUS


def _bytes_of_rows(leaf: Any) -> Sequence[Any] | None:
    """Return the bytes of each row of a leaf, without padding; None if it has no rows or bytes."""
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
    plain = leaf.cpu().as_subclass(Tensor).contiguous()
    return view_as_bytes(plain).numpy().reshape(len(plain), -1)


class HashedTransform(nn.Module):
    """A batch transform that appends the hash of its rows to a list before it changes them."""

    def __init__(self, transform: Callable[..., Any], hashes: list[int]) -> None:
        super().__init__()
        # As an attribute, a module is copied to the data device with this one.
        self.transform = transform
        # All copies of this bound method, one for each data device, append to one list.
        self._note = hashes.append
        self._keywords = [
            name for name in ("generator", "random") if has_parameter(transform, name)
        ]

    def forward(self, batch: Any, generator: torch.Generator, random: RowRandom) -> Any:
        """Record the hash of the rows, and transform them."""
        self._note(hash_batch(batch))
        keywords = {"generator": generator, "random": random}
        return self.transform(batch, **{name: keywords[name] for name in self._keywords})


#: Largest relative difference of losses and weights, by precision of the Trainer. Sums in another
#: order differ by rounding, and optimizers that divide by the size of a gradient, such as Adam,
#: amplify that; on GPUs, float32 products may be rounded to TensorFloat-32.
_TOLERANCES = {"64": 1e-6, "32": 1e-3, "16": 5e-2}


def default_tolerance(precision: str) -> float:
    """Return the largest relative difference that counts as equal under a Trainer's precision."""
    return next((value for key, value in _TOLERANCES.items() if key in precision), 1e-3)


@dataclass(frozen=True)
class Parity:
    """How a variant's check run differs from the reference."""

    holds: bool
    #: The number of steps, and of all steps.
    steps_with_equal_rows: list[int]
    loss_difference: float | None = None
    weight_difference: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def count_separate_batches(ranks: Ranks) -> int:
    """Count the parts of a step's rows that go through the module separately."""
    return sum(group[0].num_separate_batches for group in group_by_data_rank(ranks))


def global_losses(ranks: Ranks) -> list[float]:
    """Average the losses over the equal parts of each global batch; NaN if a part has no loss."""
    columns = []
    for group in group_by_data_rank(ranks):
        reported = [record.losses for record in group if not all(map(isnan, record.losses))]
        columns.append(reported[-1] if reported else group[0].losses)
    return [sum(step) / len(step) for step in zip(*columns, strict=True)]


def check_parity(
    ranks: Ranks,
    reference: Ranks,
    expected: Sequence[int],
    tolerance: float,
    notes: Sequence[str] = (),
) -> Parity:
    """Compare a variant's check run with the reference.

    Args:
        ranks: The records of the variant's processes.
        reference: The records of the reference run; ``ranks`` itself in that run.
        expected: The hash of each global batch.
        tolerance: Largest relative difference of losses and weights.
        notes: Known reasons for a difference.
    """
    notes = list(notes)
    groups = group_by_data_rank(ranks)
    hashes = [
        sum(step) % MODULUS for step in zip(*(group[0].hashes for group in groups), strict=True)
    ]
    wrong = [step for step, rows in enumerate(expected) if hashes[step : step + 1] != [rows]]
    problems = [
        f"the rows differ from the global batch's from step {step} on" for step in wrong[:1]
    ]
    losses = global_losses(ranks)
    loss_difference = _loss_difference(losses, global_losses(reference))
    weight_difference = _weight_difference(ranks, reference)
    problems += _weight_problems(ranks[0], reference[0], weight_difference, tolerance)
    if num_missing := sum(map(isnan, losses)):
        notes.append(f"no loss, or NaN, in {num_missing} of {len(losses)} steps")
    if loss_difference is None:
        problems.append("a loss is missing or not finite")
    elif loss_difference > tolerance:
        problems.append(f"losses differ by {loss_difference:.1e}; {tolerance:.0e} is allowed")
    num = count_separate_batches(ranks)
    if problems and num > 1 and not notes:
        notes.append(
            f"a step's rows go through the model in {num} parts: losses that aren't a plain mean"
            " over rows, such as contrastive ones, and random operations, such as F.dropout, will"
            " differ"
        )
    return Parity(
        holds=not problems,
        steps_with_equal_rows=[len(expected) - len(wrong), len(expected)],
        loss_difference=loss_difference,
        weight_difference=weight_difference,
        problems=problems,
        notes=notes,
    )


def _loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    # Steps may have no loss if the same steps of the reference don't. A loss of NaN would make the
    # weights NaN.
    pairs = [pair for pair in zip(losses, reference, strict=False) if not all(map(isnan, pair))]
    if len(losses) != len(reference) or not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return None
    largest = max((abs(b) for _, b in pairs), default=0.0) or 1.0
    return max((abs(a - b) for a, b in pairs), default=0.0) / largest


def _weight_difference(ranks: Ranks, reference: Ranks) -> float | None:
    """Compute the distance of the final weights, relative to how far training moved them."""
    if ranks is reference:
        return 0.0 if isfinite(ranks[0].squared_distance or 0.0) else nan
    distance = ranks[0].squared_distance
    moved = reference[0].squared_distance
    if distance is None or moved is None:
        return None
    if distance == 0:
        return 0.0
    return (distance / moved) ** 0.5 if moved else inf


def _weight_problems(
    record: RankRecord, reference: RankRecord, difference: float | None, tolerance: float
) -> Iterator[str]:
    """Yield differences of the weights, from the records of global rank zero."""
    expected = reference.initial
    if any(record.initial.get(name) != expected.get(name) for name in record.parameters):
        yield "the weights differ before the first step"
    if difference is None:
        yield "the weights have other names or shapes than the reference's"
        return
    if not difference <= tolerance:
        yield f"weights differ by {difference:.1e}; {tolerance:.0e} is allowed"
    if names := _trained(record) ^ _trained(reference):
        # A difference however small a fraction of all weights it is.
        yield f"trained only here or only in the reference: {', '.join(sorted(names))}"


def _trained(record: RankRecord) -> set[str]:
    """Return the parameters that training has changed."""
    return {
        name
        for name in record.parameters
        if name in record.final and record.final[name] != record.initial.get(name)
    }
