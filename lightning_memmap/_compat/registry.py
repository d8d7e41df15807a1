"""The Trainer's error about an unknown strategy, which otherwise lists Lightning's names only."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memmap.errors import nearest


class _StrategyNames(list[str]):
    """The registered names. The Trainer looks the name of its strategy up in them."""

    def __init__(self, names: Iterable[str], ours: Iterable[str]) -> None:
        super().__init__(names)
        self._ours = [*ours]

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not isinstance(name, str):
            return super().__contains__(name)
        theirs = ", ".join(name for name in self if name not in self._ours)
        raise ValueError(
            f"strategy={name!r} is unknown{nearest(name, ['auto', *self]) or '.'} The strategies of"
            f" lightning_memmap are {', '.join(self._ours)}; Lightning's are auto, {theirs}"
        )


def name_our_strategies(ours: Iterable[str]) -> None:
    """Let the Trainer's error about an unknown strategy list all strategies.

    Args:
        ours: The names of this package. A second call replaces them.
    """
    names = [*ours]

    def available_strategies() -> list[Any]:
        return _StrategyNames(StrategyRegistry.keys(), names)

    # An attribute of the registry itself, which hides the method of its class.
    StrategyRegistry.available_strategies = available_strategies  # type: ignore[method-assign]
