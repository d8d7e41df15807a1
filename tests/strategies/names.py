"""The names of this pack by how many processes run them."""

from lightning.pytorch.strategies import ParallelStrategy

from lightning_memmap.strategies import STRATEGIES, IndependentStrategy


def names_of_one_process() -> list[str]:
    """The names whose strategies are one process, whatever the devices."""
    several = (ParallelStrategy, IndependentStrategy)
    return [name for name, make, _ in STRATEGIES if not issubclass(make, several)]


def names_of_several_processes() -> list[str]:
    """The names whose strategies are Lightning's kind of several processes."""
    return [name for name, make, _ in STRATEGIES if issubclass(make, ParallelStrategy)]
