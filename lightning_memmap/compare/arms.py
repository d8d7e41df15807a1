"""Arms: what can be compared, and why an arm cannot run here."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memmap.strategies import STRATEGIES

FeedKind = Literal["memmap", "dataloader", "ideal"]

#: Lightning's own strategies that can be an arm, by the name that an arm has here.
STOCK = {
    "auto": "Lightning's single device",
    "ddp": "Lightning's data parallel: a process for each device, gradients reduced",
    "fsdp": "Lightning's FSDP: a process for each device, parameters sharded",
    "model_parallel": "Lightning's ModelParallelStrategy, all devices data parallel",
}
#: Arms whose devices train models of their own, so that there is no common result to compare.
_OWN_MODELS = {"memmap_independent"}
_FEED = re.compile(r"workers([0-9]+)|ideal|memmap")


@dataclass(frozen=True)
class Feed:
    """Where an arm's batches come from.

    Args:
        kind: ``memmap``: the `MemmapDataModule` of the config. ``dataloader``: its plain dataset
            through `torch.utils.data.DataLoader`. ``ideal``: one batch, taken once and replayed:
            the most that any loader could win.
        num_workers: Worker processes of the ``DataLoader``.
    """

    kind: FeedKind = "memmap"
    num_workers: int = 0

    def __str__(self) -> str:
        return f"workers{self.num_workers}" if self.kind == "dataloader" else self.kind


@dataclass(frozen=True)
class Machine:
    """What this machine has that decides which arms can run.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        num_devices: Devices of that kind; on a CPU any number of logical ones.
    """

    accelerator: str
    num_devices: int


@dataclass(frozen=True)
class ModelFacts:
    """What decides whether an arm can train a model.

    Args:
        configures_itself: Whether it overrides ``configure_model``.
    """

    configures_itself: bool


@dataclass(frozen=True)
class Arm:
    """One setup to measure: a strategy and a feed.

    Args:
        strategy: A name of this pack, or one of `STOCK`.
        feed: Where batches come from.
    """

    strategy: str
    feed: Feed = Feed()

    @property
    def name(self) -> str:
        """The arm as ``--arms`` takes it: the strategy, and after a ``+`` any other feed."""
        return self.strategy if self.feed.kind == "memmap" else f"{self.strategy}+{self.feed}"

    @property
    def description(self) -> str:
        """What the arm is, in one line."""
        known = STOCK | {name: text for name, _, text in STRATEGIES}
        feeds = {
            "memmap": "",
            "dataloader": f"; rows by a DataLoader with {self.feed.num_workers} workers",
            "ideal": "; one batch replayed",
        }
        return known[self.strategy] + feeds[self.feed.kind]

    @property
    def is_compared(self) -> bool:
        """Whether the arm must give the rows, losses and weights of the others."""
        return self.feed.kind != "ideal" and self.strategy not in _OWN_MODELS

    def num_devices(self, devices: int) -> int:
        """How many of the devices of a comparison this arm uses."""
        return 1 if self.strategy == "auto" else devices

    def trainer_options(self, devices: int) -> dict[str, Any]:
        """The options of the Trainer that make this arm."""
        strategy: Any = self.strategy
        if strategy == "model_parallel":
            strategy = {
                "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
                "init_args": {"data_parallel_size": devices, "tensor_parallel_size": 1},
            }
        return {"strategy": strategy, "devices": self.num_devices(devices), "num_nodes": 1}

    def obstacle(self, machine: Machine, devices: int, model: ModelFacts) -> str | None:
        """Why this arm cannot run here, as far as that is known before it is tried."""
        needed = self.num_devices(devices)
        if machine.accelerator != "cpu" and machine.num_devices < needed:
            return f"needs {needed} {machine.accelerator} devices; there are {machine.num_devices}"
        if self.strategy == "fsdp" and machine.accelerator == "cpu":
            return "Lightning's fsdp runs on GPUs alone, and there is none"
        if self.strategy == "model_parallel" and not model.configures_itself:
            return "the model has no configure_model(), in which it would shard itself"
        return None


def parse_arms(text: str) -> tuple[Arm, ...]:
    """The arms of a list such as ``memmap_superbatch,ddp,auto+workers2,auto+ideal``.

    Args:
        text: Names, separated by commas; ``all`` stands for `every_arm`.

    Raises:
        ValueError: An unknown name, or none.
    """
    arms: list[Arm] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        found = every_arm() if name == "all" else (_parse_arm(name),)
        arms.extend(arm for arm in found if arm not in arms)
    if not arms:
        raise ValueError(f"arms={text!r}: name at least one, such as {_names(every_arm())}")
    return tuple(arms)


def every_arm(num_workers: int = 2) -> tuple[Arm, ...]:
    """Every strategy with the memory-mapped feed, and the single device with each feed."""

    def arms() -> Iterator[Arm]:
        yield Arm("auto")
        yield Arm("auto", Feed("dataloader", 0))
        yield Arm("auto", Feed("dataloader", num_workers))
        yield Arm("auto", Feed("ideal"))
        yield from (Arm(name) for name, *_ in STRATEGIES)
        yield from (Arm(name) for name in STOCK if name != "auto")

    return tuple(arms())


def _parse_arm(name: str) -> Arm:
    strategy, plus, feed = name.partition("+")
    strategies = [*STOCK, *(name for name, *_ in STRATEGIES)]
    match = _FEED.fullmatch(feed)
    if strategy not in strategies or (plus and match is None):
        raise ValueError(
            f"arms: {name!r} is none. An arm is a strategy ({', '.join(strategies)}), and may be"
            " followed by +workersN (its rows by a DataLoader with N workers) or +ideal (one"
            " batch replayed)"
        )
    if match is None or feed == "memmap":
        return Arm(strategy)
    if feed == "ideal":
        return Arm(strategy, Feed("ideal"))
    return Arm(strategy, Feed("dataloader", int(match[1])))


def _names(arms: Sequence[Arm]) -> str:
    return ", ".join(arm.name for arm in arms)
