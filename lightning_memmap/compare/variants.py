"""Variants: what can be compared, and why a variant cannot run here."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memmap.arguments import nearest
from lightning_memmap.strategies import STRATEGIES

#: ``memmap``: the `MemmapDataModule` of the config. ``dataloader``: its plain dataset through
#: `torch.utils.data.DataLoader`. ``ideal``: one batch, fetched once and replayed.
LoaderKind = Literal["memmap", "dataloader", "ideal"]

#: Lightning's own strategies that can be compared, by the name that they have here.
LIGHTNING_STRATEGIES = {
    "auto": "Lightning's single device",
    "ddp": "Lightning's data parallel: a process for each device, gradients reduced",
    "fsdp": "Lightning's FSDP: a process for each device, parameters sharded",
    "model_parallel": "Lightning's ModelParallelStrategy, all devices data parallel",
}
_DESCRIPTIONS = LIGHTNING_STRATEGIES | {name: text for name, _, text in STRATEGIES}
#: Each device trains a model of its own, so that there is no common result to compare.
_SEPARATE_MODELS = {
    name for name, strategy, _ in STRATEGIES if not getattr(strategy, "trains_one_model", True)
}
_LOADER = re.compile(r"workers([0-9]+)|ideal|memmap")


@dataclass(frozen=True)
class Machine:
    """What this machine has that decides which variants can run.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        num_devices: Devices of that kind; on a CPU any number of logical ones.
    """

    accelerator: str
    num_devices: int


@dataclass(frozen=True)
class Variant:
    """One set-up to measure: a strategy and what supplies its rows.

    Args:
        strategy: A name of this pack, or one of `LIGHTNING_STRATEGIES`.
        loader: What supplies the rows; see `LoaderKind`.
        num_workers: Worker processes of the ``DataLoader``.
    """

    strategy: str
    loader: LoaderKind = "memmap"
    num_workers: int = 0

    @property
    def loader_name(self) -> str:
        """The loader as it stands after the ``+``."""
        return f"workers{self.num_workers}" if self.loader == "dataloader" else self.loader

    @property
    def name(self) -> str:
        """The variant as ``--variants`` takes it."""
        return self.strategy if self.loader == "memmap" else f"{self.strategy}+{self.loader_name}"

    @property
    def description(self) -> str:
        """What the variant is, in one line."""
        loaders = {
            "memmap": "",
            "dataloader": f"; rows from a DataLoader with {self.num_workers} workers",
            "ideal": "; one batch replayed",
        }
        return _DESCRIPTIONS[self.strategy] + loaders[self.loader]

    @property
    def is_compared(self) -> bool:
        """Whether the variant must give the rows, losses and weights of the others."""
        return self.loader != "ideal" and self.strategy not in _SEPARATE_MODELS

    def num_devices(self, devices: int) -> int:
        """Return how many of the devices of a comparison this variant uses.

        Args:
            devices: Devices of the comparison.

        Returns:
            1 for the single device, and all of them for any other strategy.
        """
        return 1 if self.strategy == "auto" else devices

    def trainer_options(self, devices: int) -> dict[str, Any]:
        """Return the options of the Trainer that make this variant.

        Args:
            devices: Devices of the comparison.

        Returns:
            ``strategy``, ``devices`` and ``num_nodes``, as in a config.
        """
        strategy: Any = self.strategy
        if strategy == "model_parallel":
            strategy = {
                "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
                "init_args": {"data_parallel_size": devices, "tensor_parallel_size": 1},
            }
        return {"strategy": strategy, "devices": self.num_devices(devices), "num_nodes": 1}

    def obstacle(self, machine: Machine, devices: int, configures_itself: bool) -> str:
        """Say why this variant cannot run here, as far as that is known beforehand.

        Args:
            machine: This machine.
            devices: Devices of the comparison.
            configures_itself: Whether the model overrides ``configure_model``.

        Returns:
            The reason; empty where none is known.
        """
        needed = self.num_devices(devices)
        if machine.accelerator != "cpu" and machine.num_devices < needed:
            return f"needs {needed} {machine.accelerator} devices; there are {machine.num_devices}"
        if self.strategy == "fsdp" and machine.accelerator == "cpu":
            return "Lightning's fsdp runs only on GPUs, and there is none"
        if self.strategy == "model_parallel" and not configures_itself:
            return "the model has no configure_model(), in which it would shard itself"
        return ""


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of variants such as ``memmap_superbatch,ddp,auto+workers2,auto+ideal``.

    Args:
        text: Names, separated by commas; ``all`` stands for `all_variants`.

    Returns:
        The variants in their order, each once.

    Raises:
        ValueError: A name is unknown, or there is none.
    """
    found: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        found += all_variants() if name == "all" else [_parse(name)]
    if not found:
        names = ", ".join(variant.name for variant in all_variants())
        raise ValueError(f"variants={text!r}: name at least one, such as {names}")
    return tuple(dict.fromkeys(found))


def all_variants(num_workers: int = 2) -> tuple[Variant, ...]:
    """List the single device with each loader, and every other strategy with the mapped store.

    Args:
        num_workers: Workers of the ``DataLoader`` that has some. Another one has none.

    Returns:
        The variants, the single device with the mapped store first.
    """
    return (
        Variant("auto"),
        Variant("auto", "dataloader", 0),
        Variant("auto", "dataloader", num_workers),
        Variant("auto", "ideal"),
        *(Variant(name) for name, *_ in STRATEGIES),
        *(Variant(name) for name in LIGHTNING_STRATEGIES if name != "auto"),
    )


def _parse(name: str) -> Variant:
    strategy, plus, loader = name.partition("+")
    match = _LOADER.fullmatch(loader)
    if strategy not in _DESCRIPTIONS or (plus and match is None):
        names = [start + end for start in _DESCRIPTIONS for end in ("", "+ideal", "+workers0")]
        raise ValueError(
            f"variants: {name!r} is unknown{nearest(name, names) or '.'}"
            f" A variant is a strategy ({', '.join(_DESCRIPTIONS)}),"
            " which may be followed by +workersN (its rows come from a DataLoader with N workers)"
            " or +ideal (one batch replayed)"
        )
    if match is not None and match[1] is not None:
        return Variant(strategy, "dataloader", int(match[1]))
    return Variant(strategy, "ideal" if loader == "ideal" else "memmap")
