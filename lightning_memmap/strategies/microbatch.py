"""The rows of a step in parts: divided, and what is computed, logged and counted of them merged."""

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_memmap._compat.metrics import copy_metric, merge_metric
from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.loading.variable_leaves import interleaved, is_variable
from lightning_memmap.strategies._base import OneProcess

_WITH_ROWS = (Tensor, TensorDictBase)


@dataclasses.dataclass(init=False, eq=False, repr=False)
class MicroBatches:
    """The rows of one step in parts: one per replica, on its device, or per micro-batch.

    Callbacks and hooks receive this object as their batch, and can read it as if it were one
    batch, ``batch["x"]`` or ``x, y = batch``: it is then assembled on the root device. Rows do not
    move until somebody reads them.

    Args:
        parts: The batch of each part.
        rows: Rows of each part, padding not included.
        starts: The row of the step that is the first of each part.
        stride: The rows of the step from one row of a part to its next.
        device: The root device.
        padded_rows: Rows of each part with its padding; 0 without.

    Attributes:
        num_rows: Rows of the step.
        extent: An empty tensor of shape (num_rows, 0). Lightning searches the fields of a batch
            that is a dataclass for the number of rows, and finds it here.
    """

    extent: Tensor

    def __init__(
        self,
        parts: list[Any],
        rows: list[int],
        starts: list[int],
        stride: int,
        device: torch.device,
        padded_rows: int = 0,
    ) -> None:
        self.parts = parts
        self.rows = rows
        self.num_rows = sum(rows)
        self.device = device
        self.extent = torch.empty(self.num_rows, 0)
        self._starts = starts
        self._stride = stride
        self._lengths = [padded_rows] * len(parts) if padded_rows else rows
        self._assembled: Any = None

    @classmethod
    def of_devices(
        cls, batches: list[Any], num_rows: int, first: int, device: torch.device
    ) -> "MicroBatches":
        """The batches of data devices as they are: row ``j`` is in batch ``(first + j) % D``."""
        count = len(batches)
        starts = [(index - first) % count for index in range(count)]
        rows = [len(range(start, num_rows, count)) for start in starts]
        return cls(batches, rows, starts, count, device)

    @classmethod
    def split(
        cls, batch: Any, num: int, *, devices: Sequence[torch.device] | None = None
    ) -> "MicroBatches":
        """Divide the rows of a batch: row ``j`` goes to part ``j % num``, as in a super-batch.

        The rows of a part are copied once so that they are contiguous, and a step may call
        ``view``. A batch is left whole, as the only part, unless it consists of nothing but tensors
        with one entry per row.

        Args:
            batch: A batch on the root device.
            num: Parts. Where there are fewer rows, the last ones are left out.
            devices: Where each part goes, the root device first; by default all stay.
        """
        # A TensorDict is indexed as a whole, though it is a mapping.
        is_leaf = isinstance(batch, _WITH_ROWS)
        leaves = [batch] if is_leaf else [leaf for _, leaf in named_leaves(batch)]
        lengths = {-1 if is_variable(leaf) else _row_count(leaf) for leaf in leaves}
        num_rows = lengths.pop() if len(lengths) == 1 else -1
        count = min(num, num_rows)
        tensors = (leaf.device for leaf in leaves if isinstance(leaf, _WITH_ROWS))
        root = devices[0] if devices else next(tensors, None) or torch.device("cpu")
        if count < 2:
            return cls([batch], [max(num_rows, 1)], [0], 1, root)
        parts = []
        for index in range(count):
            own = [leaf[index::count].contiguous() for leaf in leaves]
            if devices is not None:
                own = [leaf.to(devices[index]) for leaf in own]
            parts.append(own[0] if is_leaf else rebuilt(batch, iter(own)))
        return cls.of_devices(parts, num_rows, 0, root)

    @classmethod
    def split_padded(cls, batch: Any, num: int, num_rows: int, padded_rows: int) -> "MicroBatches":
        """Divide a batch into consecutive rows, each part padded to one number of rows.

        Sizes differ by at most one. A part is padded with copies of its last row, and one without
        rows with copies of row 0, so that a batch of any number of rows has the same shapes.

        Args:
            batch: Any nesting; tensors without dimensions and other values go to each part.
            num: Parts.
            num_rows: Rows of the batch.
            padded_rows: Rows of each part, at least ``ceil(num_rows / num)``.

        Raises:
            ValueError: A tensor has another number of rows.
        """
        base, more = divmod(num_rows, num)
        rows = [base + (index < more) for index in range(num)]
        starts = [index * base + min(index, more) for index in range(num)]

        def part(leaf: Any, start: int, count: int) -> Any:
            if not leaf.ndim:
                return leaf
            if leaf.shape[0] != num_rows:
                raise ValueError(
                    f"a batch of {num_rows} rows has a tensor of shape {tuple(leaf.shape)}: batches"
                    " are divided by rows, so the first dimension of every tensor must be the"
                    " rows; leave others out of the batch"
                )
            if count == padded_rows:
                return leaf[start : start + count]
            index = [*range(start, start + count)] or [0]
            index += index[-1:] * (padded_rows - len(index))
            return leaf[torch.tensor(index, device=leaf.device)]

        parts = [
            apply_to_collection(batch, _WITH_ROWS, part, start, count)
            for start, count in zip(starts, rows, strict=True)
        ]
        device = next(leaf.device for _, leaf in named_leaves(batch) if isinstance(leaf, Tensor))
        return cls(parts, rows, starts, 1, device, padded_rows)

    @property
    def assembled(self) -> Any:
        """One batch on the root device, rows in the order of the step."""
        if self._assembled is None:
            self._assembled = self.merge(self.parts)
        return self._assembled

    def __getitem__(self, key: Any) -> Any:
        return self.assembled[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.assembled, name)

    def __len__(self) -> int:
        return len(self.assembled)

    def __repr__(self) -> str:
        return f"MicroBatches({self.rows} rows, read on {self.device})"

    def mean(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """The mean over the rows of the parts that have a loss, with its graph; None without any.

        Args:
            losses: The mean loss of each part.
        """
        pairs = zip(losses, self.rows, strict=True)
        present = [(loss, rows) for loss, rows in pairs if loss is not None]
        if not present:
            return None
        return weighted_mean([loss for loss, _ in present], [n for _, n in present], self.device)

    def merge(self, values: Sequence[Any]) -> Any:
        """Merge what was computed from each part.

        Tensors and TensorDicts with one entry per row of their part are put together in the order
        of the step, and so are lists with one entry per row. Floating-point scalars become their
        mean, weighted by rows. Dicts, lists, tuples and dataclasses are merged item by item. Other
        values stay as they are where all are equal, and otherwise become a list of them.

        Args:
            values: One per part.

        Returns:
            Tensors on the root device, without gradients.
        """
        first = values[0]
        if all(_is_float(value) for value in values):
            return weighted_mean([value.detach() for value in values], self.rows, self.device)
        if all(isinstance(value, float) for value in values):
            if len(set(values)) == 1:
                return first
            pairs = zip(values, self.rows, strict=True)
            return sum(value * rows for value, rows in pairs) / self.num_rows
        if self._have_rows(values):
            return self._in_order(values)
        if all(type(value) is type(first) for value in values):
            merged = self._merge_items(values)
            if merged is not None:
                return merged
            if isinstance(first, (int, str, bytes, type(None))) and len(set(values)) == 1:
                return first
        return [self._move(value) for value in values]

    def _have_rows(self, values: Sequence[Any]) -> bool:
        pairs = list(zip(values, self._lengths, strict=True))
        if all(_row_count(value) == rows for value, rows in pairs):
            return True
        # A list whose tensors each have all rows is a list of outputs, not of rows.
        return all(
            isinstance(value, list)
            and len(value) == rows
            and not all(_row_count(item) == rows for item in value)
            for value, rows in pairs
        )

    def _in_order(self, values: Sequence[Any]) -> Any:
        places = [
            range(start, start + rows * self._stride, self._stride)
            for start, rows in zip(self._starts, self.rows, strict=True)
        ]
        if isinstance(values[0], list):
            rows: list[Any] = [None] * self.num_rows
            for own, value in zip(places, values, strict=True):
                for place, item in zip(own, value, strict=False):
                    rows[place] = self._move(item)
            return rows
        if len(values) == 1:
            return self._move(values[0])
        if isinstance(values[0], Tensor) and values[0].is_nested:
            first = self._starts.index(0)
            return interleaved([v.detach() for v in values], first, self.num_rows, self.device)
        own_rows = [value[: len(own)] for value, own in zip(values, places, strict=True)]
        joined = torch.cat([self._move(value) for value in own_rows])
        if self._stride == 1:
            return joined
        order = torch.cat([torch.arange(own.start, own.stop, own.step) for own in places])
        return joined[order.argsort().to(self.device)]

    def _merge_items(self, values: Sequence[Any]) -> Any:
        """Merge containers of the same structure item by item; None where they are anything else.

        Frozen dataclasses are included, which Lightning's ``apply_to_collection`` refuses and
        torch's pytree takes for leaves.
        """
        first = values[0]
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            items = {key: self.merge([value[key] for value in values]) for key in first}
            return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
        if isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
            columns = [self.merge(column) for column in zip(*values, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        if dataclasses.is_dataclass(first):
            filled = copy.copy(first)
            for field in dataclasses.fields(first):
                column = [getattr(value, field.name) for value in values]
                object.__setattr__(filled, field.name, self.merge(column))
            return filled
        return None

    def _move(self, value: Any) -> Any:
        if isinstance(value, _WITH_ROWS):
            return value.detach().to(self.device)
        return apply_to_collection(value, Tensor, lambda leaf: leaf.detach().to(self.device))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _row_count(value: Any) -> int:
    """Rows of a tensor or TensorDict; -1 for anything else."""
    return value.shape[0] if isinstance(value, _WITH_ROWS) and len(value.shape) > 0 else -1


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], device: torch.device) -> Tensor:
    """``sum(weight * value) / sum(weights)`` on a device, with gradients."""
    if len(values) == 1:
        return values[0].to(device)
    total = sum(weights)
    first, *others = (
        value.to(device) * (weight / total) for value, weight in zip(values, weights, strict=True)
    )
    for term in others:
        first = first + term
    return first


@dataclasses.dataclass
class LogCall:
    """One call of ``self.log``."""

    function: str
    name: str
    value: Any
    #: Weight of the call in a mean over rows.
    num_rows: int
    options: dict[str, Any]


@dataclasses.dataclass
class PartLog:
    """Takes the place of the Trainer's results while one part of a step runs.

    Args:
        num_rows: Rows of the part.
        calls: The calls of ``self.log`` so far.
        restarted: Names of the functions whose results a new stage resets.
    """

    num_rows: int
    calls: list[LogCall] = dataclasses.field(default_factory=list)
    restarted: list[str] = dataclasses.field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """What ``self.log`` calls of Lightning's results."""
        given = options.pop("batch_size", None)
        self.calls.append(LogCall(fx, name, value, given or self.num_rows, options))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """What ``self.log`` calls in the first batch of a stage: ``metrics`` is always False."""
        assert metrics is False
        if fx is not None and fx not in self.restarted:
            self.restarted.append(fx)


def merge_logs(
    logs: Sequence[PartLog], results: Any, module: LightningModule, strategy: Strategy
) -> None:
    """Log once what the parts of a step logged, as one call over all of their rows.

    Means are weighted by the ``batch_size`` that each call named, or else by the rows of its
    part; sums are added; of minima and maxima the extreme one is taken. Metrics are logged once.

    Args:
        logs: One per part.
        results: Lightning's results.
        module: The module, whose own metrics are merged already.
        strategy: The strategy that runs the step.
    """
    for function in dict.fromkeys(function for log in logs for function in log.restarted):
        results.reset(metrics=False, fx=function)
    merged: dict[tuple[str, str, int], list[LogCall]] = {}
    for log in logs:
        counts: dict[tuple[str, str], int] = {}
        for call in log.calls:
            key = (call.function, call.name)
            counts[key] = counts.get(key, -1) + 1
            merged.setdefault((*key, counts[key]), []).append(call)
    for (function, name, _), calls in merged.items():
        # Lightning compares the options of all calls with one name: they must not hold a proxy.
        options = {**calls[0].options, "sync_dist_fn": strategy.reduce}
        if isinstance(calls[0].value, Metric):
            value: Any = module.get_submodule(options["metric_attribute"])
        else:
            value = _merged_value(calls, options.get("reduce_fx", torch.mean), strategy.root_device)
        num_rows = sum(call.num_rows for call in calls)
        results.log(function, name, value, batch_size=num_rows, **options)


def _merged_value(calls: list[LogCall], reduction: Any, device: torch.device) -> Tensor:
    values = [call.value.to(device) for call in calls]
    # Lightning keeps what is logged in these dtypes.
    values = [v if v.dtype in (torch.float32, torch.float64) else v.float() for v in values]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        reduce = getattr(torch.stack(values), {"sum": "sum", "max": "amax", "min": "amin"}[name])
        merged: Tensor = reduce()
        return merged
    # Any other reduction but the mean is refused by Lightning.
    return weighted_mean(values, [call.num_rows for call in calls], device)


class MetricCopies:
    """Empty copies of metrics on one device, made when they are first asked for.

    Metrics are identified by ``id``: they overload comparison, and their hash changes with their
    state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[nn.Module, Any]] = {}

    def of(self, metric: nn.Module) -> Any:
        """The copy of a metric or collection, the same one each time."""
        if id(metric) not in self._copies:
            self._copies[id(metric)] = (metric, copy_metric(metric, self._device))
        return self._copies[id(metric)][1]

    def keep(self, metrics: Sequence[nn.Module]) -> None:
        """Forget the copies of all other metrics."""
        self._copies = {
            id(each): self._copies[id(each)] for each in metrics if id(each) in self._copies
        }


@contextmanager
def counted_in_copies(module: LightningModule, copies: Sequence[MetricCopies]) -> Iterator[None]:
    """Give a module copies of its metrics within the context, and merge them at its end.

    So a metric is complete after every step, by its ``dist_reduce_fx``, and the value that
    ``forward`` gives for a step is over all of its rows. Where the step fails, nothing is merged.

    Args:
        module: The module.
        copies: Its own copies, and those that replicas update.
    """
    found = list(_find_metrics(module))
    if not found:
        yield
        return
    metrics = list({id(metric): metric for _, _, metric in found}.values())
    copies[0].keep(metrics)
    for parent, name, metric in found:
        setattr(parent, name, copies[0].of(metric))
    # Names by which Lightning finds the metrics: it searches again for those of the copies.
    names, module._metric_attributes = module._metric_attributes, None
    try:
        yield
    except BaseException:
        # What a failed step has given to its copies must not reach the next one.
        for metric in metrics:
            for each in copies:
                each.of(metric).reset()
        raise
    finally:
        module._metric_attributes = names
        for parent, name, metric in found:
            setattr(parent, name, metric)
    # Ordinary tensors in inference mode too: a metric may be updated in training as well.
    with torch.inference_mode(False), torch.no_grad():
        for metric in metrics:
            _merge_metrics(metric, [each.of(metric) for each in copies])


def _merge_metrics(metric: nn.Module, copies: list[Any]) -> None:
    for own, *others in zip(metric.modules(), *(c.modules() for c in copies), strict=True):
        if isinstance(own, Metric):
            step, *rest = others
            has_value = any(other._forward_cache is not None for other in others)
            merge_metric(step, rest)
            merge_metric(own, [step])
            if has_value:
                # What `self.log` logs for the step.
                own._forward_cache = step.compute()
    for each in copies:
        each.reset()


def is_metric(module: object) -> bool:
    """Whether a module is a metric, or a collection that is copied and merged as a whole."""
    return isinstance(module, (Metric, MetricCollection))


def _find_metrics(
    module: nn.Module, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each metric or collection of a module, with its parent and its name there."""
    seen = set() if seen is None else seen
    seen.add(module)
    # Not `named_children`, which gives a module with two names once.
    for name, child in module._modules.items():
        if child is not None and is_metric(child):
            yield module, name, child
        elif child is not None and child not in seen:
            yield from _find_metrics(child, seen)


class StepsInParts(OneProcess):
    """Calls each step of the module once per replica or micro-batch, and merges the results.

    To Lightning it is one call with all rows: one loss, one output, one call of ``self.log``.
    """

    #: Of ``Trainer(sync_batchnorm=True)``, which sets it.
    _layer_sync: Any = None

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """Parts of a full step. With one, Lightning's own steps run."""

    @abstractmethod
    def split(self, batch: Any) -> MicroBatches:
        """Divide a batch as Lightning has it after the transfer, unless it is divided already."""

    @abstractmethod
    def run_parts(
        self, name: str, batch: MicroBatches, logs: list[PartLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a step of the module with each part; ``self.log`` must write to that part's log."""

    def refuse_sync_batchnorm(self, parts: str) -> None:
        """Refuse ``Trainer(sync_batchnorm=True)``, since batch norm sees the rows of a part.

        Args:
            parts: What the parts are, for the message.

        Raises:
            ValueError: The Trainer has this option, and a step has several parts.
        """
        if self._layer_sync is not None and self.num_parts > 1:
            raise ValueError(
                f"sync_batchnorm=True with {self.num_parts} {parts}: {self.strategy_name} computes"
                " batch norm on the rows of each; leave it out, use group or layer norm, or"
                " memmap_superbatch, whose batch norm is over all rows of a step"
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_parts == 1:
            return super().training_step(*args, **kwargs)
        return _training_output(*self._step("training_step", "train_step", *args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_parts == 1:
            return super().validation_step(*args, **kwargs)
        return _merged(*self._step("validation_step", "val_step", *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_parts == 1:
            return super().test_step(*args, **kwargs)
        return _merged(*self._step("test_step", "test_step", *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_parts == 1:
            return super().predict_step(*args, **kwargs)
        return _merged(*self._step("predict_step", "predict_step", *args, **kwargs))

    def _step(
        self, name: str, context: str, batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], MicroBatches]:
        """Run a step of this name, in the precision plugin's context of that name."""
        with getattr(self.precision_plugin, f"{context}_context")():
            parts = self.split(batch)
            logs = [PartLog(rows) for rows in parts.rows]
            trainer: Any = self.module.trainer
            try:
                outputs = self.run_parts(name, parts, logs, *args, **kwargs)
            finally:
                self.module.trainer = trainer
            # None in a stage that logs nothing.
            if trainer._results is not None:
                merge_logs(logs, trainer._results, self.module, self)
        return outputs, parts


def _merged(outputs: list[Any], parts: MicroBatches) -> Any:
    return parts.merge(outputs)


def _training_output(outputs: list[Any], parts: MicroBatches) -> Any:
    """The mean of the losses that were returned, with its graph, and the other outputs merged.

    What Lightning refuses to accept from one call is passed on, and Lightning refuses it.
    """
    given = [output for output in outputs if output is not None]
    if all(isinstance(output, Tensor) for output in given):
        return parts.mean(outputs)
    for output in given:
        if not isinstance(output, (Tensor, Mapping)):
            return output
    dicts = [
        {"loss": output} if isinstance(output, Tensor) else dict(output or {}) for output in outputs
    ]
    keys = dict.fromkeys(key for output in dicts for key in output if key != "loss")
    merged = {key: parts.merge([output.get(key) for output in dicts]) for key in keys}
    losses = [output.get("loss") for output in dicts]
    if any(
        output is not None and loss is None for output, loss in zip(outputs, losses, strict=True)
    ):
        return merged
    return {"loss": parts.mean(losses), **merged}
