"""What is installed does not change while tests run."""

import functools

from lightning.fabric.utilities import registry


def remember_entry_points() -> None:
    """Let Trainers of this process look for callbacks of other packages once.

    Each of them would read the metadata of everything that is installed, which is a tenth of a
    short fit.
    """
    if not hasattr(registry.entry_points, "cache_info"):
        registry.entry_points = functools.cache(registry.entry_points)
