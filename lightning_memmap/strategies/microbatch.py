"""The rows of a step in parts: how they are divided, and what is computed of them is merged."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_memmap.loading.nested import interleaved, named_leaves, opened, rebuilt, remade
from lightning_memmap.schema.fields import RowList

#: What may have rows: its first dimension.
WITH_ROWS = (Tensor, TensorDictBase)
#: Of these, equal values are merged to one.
_PLAIN = (int, float, str, bytes, type(None))


@dataclasses.dataclass(init=False, eq=False, repr=False)
class MicroBatches:
    """The rows of one step in parts: one per replica, on its device, or one after the other."""

    # Callbacks and hooks are given this object as their batch, and can read it as if it were one,
    # ``batch["x"]`` or ``x, y = batch``: only then is it assembled on the root device.

    #: Of shape (num_rows, 0): Lightning searches the fields of a dataclass for the number of rows.
    extent: Tensor

    def __init__(self, parts: list[Any], places: list[range], device: torch.device) -> None:
        self.parts = parts
        #: The rows of the step that each part has.
        self.places = places
        self.rows = [len(own) for own in places]
        self.num_rows = sum(self.rows)
        self.device = device
        #: What is known of outputs from other steps; see `OutputLengths`.
        self.lengths = OutputLengths()
        self.extent = torch.empty(self.num_rows, 0)
        self._assembled: Any = None

    @classmethod
    def of_devices(
        cls, batches: list[Any], num_rows: int, first: int, device: torch.device
    ) -> "MicroBatches":
        """The batches of data devices as they are: row ``j`` is in batch ``(first + j) % D``."""
        count = len(batches)
        places = [range((index - first) % count, num_rows, count) for index in range(count)]
        return cls(batches, places, device)

    @classmethod
    def split(
        cls, batch: Any, devices: Sequence[torch.device], places: list[range] | None = None
    ) -> "MicroBatches":
        """Divide the rows of a batch among devices: row ``j`` goes to part ``j % len(devices)``."""
        # With places, by these; and what has no rows is in every part.
        named = [*named_leaves(batch)]
        nested = [name for name, leaf in named if getattr(leaf, "is_nested", False)]
        if places is None:
            counts = {name: -1 if name in nested else _row_count(leaf) for name, leaf in named}
            num_rows = max(counts.values(), default=-1)
            odd = [name for name, rows in counts.items() if rows != num_rows or rows < 0]
            if odd and len(devices) > 1:
                rank_zero_warn(
                    f"batch{odd[0]} has no rows, or not as many as others, or is a nested tensor:"
                    f" the batch is computed whole, instead of in {len(devices)} parts; let each"
                    " leaf be a tensor or RowList of all rows, and give rows that differ in length"
                    " in the form 'pad' or 'list'"
                )
            num_rows = -1 if odd else num_rows
            count = min(len(devices), num_rows)
            if count < 2:
                return cls([batch], [range(max(num_rows, 1))], devices[0])
            places = [range(index, num_rows, count) for index in range(count)]
        num_rows = sum(map(len, places))
        if wrong := [name for name, leaf in named if _row_count(leaf) not in (-1, num_rows)]:
            raise ValueError(
                f"batch{wrong[0]} is not {num_rows} rows, as the input of the module is: the first"
                " dimension of every tensor must be the rows; omit others from the batch"
            )
        if nested:
            raise ValueError(
                f"batch{nested[0]} is a nested tensor, whose rows torch does not divide: store its"
                " field in the form 'pad' or 'list'"
            )
        parts = []
        for rows, device in zip(places, devices, strict=False):
            # A part without rows has a copy of one, which counts for nothing.
            own = (_some(leaf, rows or range(1), device) for _, leaf in named)
            parts.append(rebuilt(batch, own))
        return cls(parts, places, devices[0])

    @property
    def assembled(self) -> Any:
        """One batch on the root device, rows in the order of the step."""
        if self._assembled is None:
            self._assembled = self.merge(self.parts, " of the batch")
        return self._assembled

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.assembled[key]
        except KeyError:
            if type(key) is not int:
                raise
            # So begins a loop. With an __iter__, Lightning would look for rows in keys of a dict.
            raise TypeError(f"batch[{key}]: to loop over a dict, use batch.keys()") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.assembled, name)

    def __len__(self) -> int:
        return len(self.assembled)

    def __contains__(self, key: object) -> bool:
        return key in self.assembled

    def mean(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """Mean over the rows of the parts that have a loss, with its graph; None without any."""
        pairs = zip(losses, self.rows, strict=True)
        present = [(loss, rows) for loss, rows in pairs if loss is not None]
        if not present:
            return None
        return weighted_mean([loss for loss, _ in present], [n for _, n in present], self.device)

    def merge(self, values: Sequence[Any], path: str = "") -> Any:
        """Merge what was computed from each part. The path is that of the values in an output."""
        are_alike = len({*map(type, values)}) == 1
        if are_alike and isinstance(values[0], _PLAIN) and len({*values}) == 1:
            return values[0]
        if all(_is_float(value) for value in values):
            return weighted_mean([value.detach() for value in values], self.rows, self.device)
        if all(isinstance(value, float) for value in values):
            pairs = zip(values, self.rows, strict=True)
            return sum(value * rows for value, rows in pairs) / self.num_rows
        if self._have_rows(values, path):
            return self._in_order(values)
        merged = self._merge_items(values, path) if are_alike else None
        return [self._move(value) for value in values] if merged is None else merged

    def _have_rows(self, values: Sequence[Any], path: str) -> bool:
        pairs = list(zip(values, self.rows, strict=True))
        lengths = [_row_count(value) for value in values]
        if min(lengths) >= 0:
            return self.lengths.are_rows(path, lengths, self.rows)
        # A list whose tensors each have all rows is a list of outputs, not of rows.
        return all(
            isinstance(value, list)
            and len(value) == rows
            and not all(_row_count(item) == rows for item in value)
            for value, rows in pairs
        )

    def _in_order(self, values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):
            rows: list[Any] = [None] * self.num_rows
            for own, value in zip(self.places, values, strict=True):
                for place, item in zip(own, value, strict=True):
                    rows[place] = self._move(item)
            return rows
        if len(values) == 1:
            return self._move(values[0])
        if isinstance(values[0], Tensor) and values[0].is_nested:
            first = [own.start for own in self.places].index(0)
            return interleaved([v.detach() for v in values], first, self.num_rows, self.device)
        joined = torch.cat([self._move(value) for value in values])
        return joined[torch.tensor([*chain(*self.places)]).argsort().to(self.device)]

    def _merge_items(self, values: Sequence[Any], path: str) -> Any:
        """Merge containers of the same structure item by item; None for anything else."""
        items: list[Any] = [opened(value) for value in values]
        if None in items or any(each.keys() != items[0].keys() for each in items):
            return None
        merged = [self.merge([e[key] for e in items], f"{path}{key}") for key in items[0]]
        return remade(values[0], merged)

    def _move(self, value: Any) -> Any:
        return apply_to_collection(value, WITH_ROWS, lambda leaf: leaf.detach().to(self.device))


class OutputLengths:
    """Tells outputs with an entry per row from those with another length that equals it.

    A tensor with an entry for each of 8 classes looks like one of 8 rows until a step has parts of
    another size.
    """

    def __init__(self) -> None:
        #: By path, the lengths of what has been merged as rows.
        self._as_rows: dict[str, set[int]] = {}
        #: The paths of what has always the same length.
        self._fixed: set[str] = set()

    def are_rows(self, path: str, lengths: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether the values of each part at a path have an entry for each of its rows."""
        if [*lengths] == [*rows]:
            if path not in self._fixed:
                self._as_rows.setdefault(path, set()).update(lengths)
            return path not in self._fixed
        if self._as_rows.get(path) == {*lengths}:
            self._fixed.add(path)
            sizes = ", ".join(map(str, rows))
            rank_zero_warn(
                f"output{path} has {lengths[0]} entries from parts of {sizes} rows, so that these"
                f" are not rows, as which they were merged in steps with parts of {lengths[0]}"
                " rows: from now on it is a list of the values of the parts in every step. Return"
                " value[None], and it is one from the beginning"
            )
        return False


def _some(leaf: Any, rows: range, device: torch.device) -> Any:
    """Some rows of a leaf of a batch, on a device. What has no rows stays as it is."""
    own = slice(rows.start, rows.stop, rows.step)
    if isinstance(leaf, RowList):
        return RowList(leaf[own])
    return leaf if _row_count(leaf) < 0 else leaf[own].contiguous().to(device)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _row_count(value: Any) -> int:
    """Rows of a tensor, a TensorDict or a `RowList`; -1 for anything else."""
    if isinstance(value, RowList):
        return len(value)
    return value.shape[0] if isinstance(value, WITH_ROWS) and len(value.shape) > 0 else -1


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], device: torch.device) -> Tensor:
    """``sum(weight * value) / sum(weights)`` on a device, with gradients."""
    total = sum(weights)
    pairs = zip(values, weights, strict=True)
    return reduce(add, (value.to(device) * (weight / total) for value, weight in pairs))


def training_output(outputs: list[Any], parts: MicroBatches) -> Any:
    """The mean of the losses that were returned, with its graph, and the other outputs merged."""
    given = [output for output in outputs if output is not None]
    if all(isinstance(output, Tensor) for output in given):
        return parts.mean(outputs)
    for output in given:
        if not isinstance(output, (Tensor, Mapping)):
            return output
    dicts = [
        {"loss": output} if isinstance(output, Tensor) else dict(output or {}) for output in outputs
    ]
    losses = [each.pop("loss", None) for each in dicts]
    merged = {
        key: parts.merge([each.get(key) for each in dicts], f"[{key!r}]") for key in chain(*dicts)
    }
    # Lightning refuses an output without a loss.
    pairs = zip(outputs, losses, strict=True)
    lacks_loss = any(output is not None and loss is None for output, loss in pairs)
    return merged if lacks_loss else {"loss": parts.mean(losses), **merged}


@contextmanager
def gradients_apart(parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Gather the gradients that are computed within the context in a dict, and nowhere else."""
    # Apart from those of other losses, since the backward pass may scale each loss.
    before = [parameter.grad for parameter in parameters]
    found: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield found
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                found[parameter] = parameter.grad
            parameter.grad = grad


def loss_of(
    value: Tensor,
    grads: dict[nn.Parameter, Tensor],
    on_backward: Callable[[], None] = lambda: None,
) -> Tensor:
    """A loss whose gradients are known: ``backward`` scales them, and adds them to the others.

    Args:
        value: The loss.
        grads: Its gradients, by parameter. They may be overwritten.
        on_backward: Called once the gradients have been added.
    """
    known: dict[nn.Parameter, Tensor] | None = grads

    def add(scale: Tensor) -> None:
        nonlocal known
        if known is None:
            raise RuntimeError("backward was called twice for one loss: compute the loss again")
        # As in any backward pass, a parameter gets none if it has been frozen since.
        for parameter, grad in ((p, grad) for p, grad in known.items() if p.requires_grad):
            if scale.device.type != "cpu" or scale != 1:
                grad.mul_(scale.to(grad))
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        known = None
        on_backward()

    leaf = value.detach().requires_grad_()
    leaf.register_hook(add)  # type: ignore[no-untyped-call]
    # A copy, which the user may change in place, unlike a leaf.
    return leaf.clone()


class PartLog:
    """Takes the place of ``self.log`` while a part of a step runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Note a call of `self.log`."""
        if isinstance(value, (int, float)):
            # In the dtype of the step's precision.
            value = torch.tensor(value, dtype=torch.get_default_dtype())
        self.calls.append((name, value, args, options))


@contextmanager
def logged_in(module: nn.Module, log: PartLog) -> Iterator[None]:
    """Let a module log there within the context."""
    before = {key: value for key, value in vars(module).items() if key == "log"}
    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
        vars(module).update(before)


def merge_logs(logs: Sequence[PartLog], parts: MicroBatches, module: LightningModule) -> None:
    """Log once what the parts of a step logged, as one call over all of their rows."""
    merged: dict[tuple[str, int], list[tuple[int, Any, Any, dict[str, Any]]]] = {}
    for log, num_rows in zip(logs, parts.rows, strict=False):
        counts: Counter[str] = Counter()
        for name, value, args, options in log.calls:
            call = (options.get("batch_size") or num_rows, value, args, options)
            merged.setdefault((name, counts[name]), []).append(call)
            counts[name] += 1
        log.calls = []
    for (name, _), calls in merged.items():
        _, value, args, options = calls[0]
        rows, values = [each[0] for each in calls], [each[1] for each in calls]
        if all(isinstance(each, Tensor) for each in values):
            value = _merged_value(values, rows, options.get("reduce_fx"), parts.device)
        if len(calls) < len(parts.rows) or "batch_size" in options:
            options = {**options, "batch_size": sum(rows)}
        module.log(name, value, *args, **options)


def _merged_value(values: list[Any], rows: list[int], reduction: Any, device: torch.device) -> Any:
    tensors = [value.detach().to(device) for value in values]
    # Lightning keeps what is logged in these dtypes.
    wide = (torch.float32, torch.float64)
    tensors = [each if each.dtype in wide else each.float() for each in tensors]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        return getattr(torch.stack(tensors), {"sum": "sum", "max": "amax", "min": "amin"}[name])(0)
    # Any other reduction but the mean is refused by Lightning.
    return weighted_mean(tensors, rows, device)
