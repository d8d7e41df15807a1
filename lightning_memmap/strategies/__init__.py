"""The strategies of this pack, one file each, registered with Lightning's Trainer by name."""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_memmap._compat.registry import name_our_strategies
from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.independent import (
    IndependentStrategy,
    MemberResult,
    MemberResults,
    read_results,
)
from lightning_memmap.strategies.model_parallel import LocalModelParallelStrategy
from lightning_memmap.strategies.pipeline import PipelineStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

__all__ = [
    "STRATEGIES",
    "DataParallelStrategy",
    "FSDP2Strategy",
    "IndependentStrategy",
    "LocalModelParallelStrategy",
    "MemberResult",
    "MemberResults",
    "PipelineStrategy",
    "SuperBatchDDPStrategy",
    "SuperBatchStrategy",
    "read_results",
    "register",
]


def __dir__() -> list[str]:
    return __all__


_CLASSES: tuple[Any, ...] = (
    SuperBatchStrategy,
    DataParallelStrategy,
    LocalModelParallelStrategy,
    SuperBatchDDPStrategy,
    FSDP2Strategy,
    IndependentStrategy,
    PipelineStrategy,
)

#: Name in ``Trainer(strategy=...)``, class, and what it does.
STRATEGIES: tuple[tuple[str, type[Strategy], str], ...] = tuple(
    (each.strategy_name, each, (each.__doc__ or "").partition("\n")[0].rstrip("."))
    for each in _CLASSES
)


def register() -> None:
    """Register the strategies with the Trainer, by name. Doing it again changes nothing."""
    for name, strategy, description in STRATEGIES:
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=description)
    name_our_strategies(name for name, *_ in STRATEGIES)
