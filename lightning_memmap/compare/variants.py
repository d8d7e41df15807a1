"""Variants: what can be compared, and why a variant cannot run here."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memmap.errors import nearest
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
    def name(self) -> str:
        """The variant as ``--variants`` takes it."""
        loaders = {"memmap": "", "dataloader": f"+workers{self.num_workers}", "ideal": "+ideal"}
        return self.strategy + loaders[self.loader]

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

    def trainer_options(self, devices: int) -> dict[str, Any]:
        """The options ``strategy``, ``devices`` and ``num_nodes`` of the Trainer, as in a config.

        Args:
            devices: Devices of the comparison, of which ``auto`` uses one.
        """
        strategy: Any = self.strategy
        if strategy == "model_parallel":
            strategy = {
                "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
                "init_args": {"data_parallel_size": devices, "tensor_parallel_size": 1},
            }
        used = 1 if self.strategy == "auto" else devices
        return {"strategy": strategy, "devices": used, "num_nodes": 1}

    def unsupported_reason(
        self, accelerator: str, num_available: int, devices: int, configures_itself: bool
    ) -> str:
        """Why this variant cannot run here, as far as that is known beforehand; else empty.

        Args:
            accelerator: ``cpu`` or ``cuda``.
            num_available: Devices of that kind. On a CPU there are as many as one likes.
            devices: Devices of the comparison.
            configures_itself: Whether the model overrides ``configure_model``.
        """
        needed = self.trainer_options(devices)["devices"]
        if accelerator != "cpu" and num_available < needed:
            return f"needs {needed} {accelerator} devices; there are {num_available}"
        if self.strategy == "fsdp" and accelerator == "cpu":
            return "Lightning's fsdp runs only on GPUs, and there is none"
        if self.strategy == "model_parallel" and not configures_itself:
            return "the model has no configure_model(), in which it would shard itself"
        return ""


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of variants such as ``ddp,auto+workers2``; ``all`` stands for `all_variants`.

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


def all_variants() -> tuple[Variant, ...]:
    """The single device with each loader, and every other strategy with the store."""
    return (
        Variant("auto"),
        Variant("auto", "dataloader", 0),
        Variant("auto", "dataloader", 2),
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
