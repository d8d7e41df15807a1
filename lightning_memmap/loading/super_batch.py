"""A super-batch: the batches of all data devices in one step, still on their devices."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.streams import send
from lightning_memmap.loading.transform import DeviceTransform, OnSuperBatch


class SuperBatch:
    """The batches of one step. ``to(device)`` assembles them there, rows in stream order.

    Row ``j`` of the super-batch is row ``j // D`` of the batch of data device ``(first + j) % D``,
    so that the order does not depend on how many devices hold the data.

    Attributes:
        num_rows: Rows of all batches.
        step_rows: Rows of the step over all processes.
        data_devices: Where the batches are.
        first: The data device whose batch has the first row.
        seed: Of the random numbers of a transform on the assembled batch; see `OnSuperBatch`.
    """

    __slots__ = (
        "_assembler",
        "_parts",
        "_whole",
        "data_devices",
        "first",
        "num_rows",
        "seed",
        "step_rows",
    )

    def __init__(
        self,
        data_devices: Sequence[torch.device],
        num_rows: int,
        first: int,
        *,
        whole: list[Tensor] | None = None,
        parts: list[Any] | None = None,
        assembler: "Collator",
    ) -> None:
        self.data_devices = data_devices
        self.num_rows = num_rows
        self.step_rows = num_rows
        self.first = first
        self.seed = 0
        self._whole = whole
        self._parts = parts
        self._assembler = assembler

    @property
    def batches(self) -> list[Any]:
        """The batch of each data device, in the structure of the dataset's samples or whatever
        the transform made of it, on that device, as it is before a transform on the assembled
        batch. Rows lie one after the other in memory."""
        if self._parts is None:
            assert self._whole is not None
            count = len(self.data_devices)
            self._parts = [
                self._assembler.build(
                    [
                        leaf[(index - self.first) % count :: count].contiguous()
                        for leaf in self._whole
                    ]
                )
                for index in range(count)
            ]
        return self._parts

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """Assemble the super-batch on one device.

        Args:
            device: Usually the root device.
            non_blocking: Do not wait for copies to other devices than the CPU.

        Returns:
            A batch of ``num_rows`` rows in the structure of the dataset's samples. Its memory is
            used again after the caller has let go of it.

        Raises:
            ValueError: The transform returned a tensor whose first dimension is not its batch's,
                or other tensors on one data device than on another.
            TypeError: The transform returned something else than tensors in containers.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        if self._whole is not None:
            leaves = self._whole
            if leaves[0].device != target:
                leaves = [
                    send(leaf, target) if non_blocking else leaf.to(target) for leaf in leaves
                ]
            batch = self._assembler.build(leaves)
            return self._assembler.finish(batch, self.num_rows, target, self.seed)
        assert self._parts is not None
        batch = self._assembler.interleave(self._parts, self.first, self.num_rows, target)
        return self._assembler.finish(batch, self.num_rows, target, self.seed)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.data_devices)
        return f"SuperBatch({self.num_rows} rows on {devices})"


class Collator:
    """Puts the parts of super-batches together, into buffers that it uses again.

    Args:
        build: Nests one tensor per field like the dataset's samples.
        transform: Runs on each assembled batch.
    """

    def __init__(
        self,
        build: Callable[[Sequence[Tensor]], Any],
        transform: OnSuperBatch | None = None,
    ) -> None:
        self.build = build
        self._transform = transform
        self._transforms: dict[torch.device, DeviceTransform] = {}
        self._pool: BufferPool | None = None
        self._pool_key: Any = None

    def finish(self, batch: Any, num_rows: int, device: torch.device, seed: int) -> Any:
        """What the transform on the assembled batch, if there is one, makes of it."""
        if self._transform is None:
            return batch
        if device not in self._transforms:
            self._transforms[device] = DeviceTransform(self._transform, device)
        batch = self._transforms[device](batch, seed)
        for name, leaf in named_leaves(batch):
            _check_leaf(name, leaf, num_rows, "all data devices")
        return batch

    def interleave(self, parts: list[Any], first: int, num_rows: int, device: torch.device) -> Any:
        """One batch from one part per data device; see `SuperBatch` for the order of rows."""
        leaves = _checked_leaves(parts, first, num_rows)
        if len(parts) == 1:
            if all(leaf.device == device for leaf in leaves[0]):
                return parts[0]
            outs = [send(leaf, device) for leaf in leaves[0]]
        else:
            outs = self._buffers(leaves[0], num_rows, device)
            for index, part in enumerate(leaves):
                start = (index - first) % len(parts)
                for out, leaf in zip(outs, part, strict=True):
                    # In one piece between devices, and strided on the device.
                    out[start :: len(parts)].copy_(send(leaf, device))
        return rebuilt(parts[0], iter(outs))

    def _buffers(self, leaves: list[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
        key = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        if device.type != "cpu":
            # torch's caching allocator hands memory out again, in stream order.
            return [torch.empty((num_rows, *shape), dtype=d, device=device) for shape, d in key]
        if self._pool is None or self._pool_key != (key, num_rows):
            self._pool = BufferPool([((num_rows, *shape), dtype) for shape, dtype in key])
            self._pool_key = (key, num_rows)
        return self._pool.get(num_rows).tensors


def _checked_leaves(parts: list[Any], first: int, num_rows: int) -> list[list[Tensor]]:
    """The tensors of each part, which has one row of each for every row of its batch."""
    named = [dict(named_leaves(part)) for part in parts]
    for index, part in enumerate(named):
        rows = len(range((index - first) % len(parts), num_rows, len(parts)))
        if list(part) != list(named[0]):
            raise ValueError(
                f"transform: it returned the tensors {list(part)} on data device {index} and"
                f" {list(named[0])} on data device 0; it must return the same structure on all"
            )
        for name, leaf in part.items():
            _check_leaf(name, leaf, rows, f"data device {index}")
            other = named[0][name]
            if leaf.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"transform: it returned rows of shape {tuple(leaf.shape[1:])} at batch{name}"
                    f" on data device {index} and of shape {tuple(other.shape[1:])} on data device"
                    " 0; they are assembled afterwards, and must be alike. A transform whose"
                    " shapes differ from call to call runs on the assembled rows instead with"
                    " transform=OnSuperBatch(...), from lightning_memmap.transforms"
                )
            if leaf.dtype != other.dtype:
                raise ValueError(
                    f"transform: it returned {leaf.dtype} at batch{name} on data device {index}"
                    f" and {other.dtype} on data device 0; it must return one dtype on all"
                )
    return [list(part.values()) for part in named]


def _check_leaf(name: str, leaf: Any, num_rows: int, place: str) -> None:
    """Check that what a transform returned is a tensor with a row for each row of its batch."""
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"transform: it returned a {type(leaf).__name__} at batch{name}; return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses"
        )
    if leaf.ndim == 0 or len(leaf) != num_rows:
        raise ValueError(
            f"transform: it returned a tensor of shape {tuple(leaf.shape)} for a batch of"
            f" {num_rows} rows on {place}; the first dimension of every tensor must be the rows of"
            " the batch"
        )


def named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, in the order of `rebuilt`."""
    if isinstance(batch, Mapping):
        for key, child in batch.items():
            yield from named_leaves(child, f"{name}[{key!r}]")
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for index, child in enumerate(batch):
            yield from named_leaves(child, f"{name}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Tensor)):
        for field in dataclasses.fields(batch):
            yield from named_leaves(getattr(batch, field.name), f"{name}.{field.name}")
    else:
        yield name, batch


def rebuilt(batch: Any, leaves: Iterator[Tensor]) -> Any:
    """A batch like this one around other leaves. Frozen dataclasses too, which Lightning's
    ``apply_to_collection`` refuses."""
    if isinstance(batch, defaultdict):
        pairs = [(key, rebuilt(child, leaves)) for key, child in batch.items()]
        return defaultdict(batch.default_factory, pairs)
    if isinstance(batch, Mapping):
        made: Any = type(batch)
        return made({key: rebuilt(child, leaves) for key, child in batch.items()})
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        children = [rebuilt(child, leaves) for child in batch]
        made = type(batch)
        return made(*children) if hasattr(batch, "_fields") else made(children)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Tensor)):
        filled = copy.copy(batch)
        for field in dataclasses.fields(batch):
            child = rebuilt(getattr(batch, field.name), leaves)
            object.__setattr__(filled, field.name, child)
        return filled
    return next(leaves)
