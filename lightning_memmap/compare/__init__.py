"""Compare variants: the same rows, the same losses and weights, and what each one costs.

`run` measures and makes a report, `report` is the report, `render` shows it, and `advise` predicts
from it. `run`, `render` and `advise` import `report`, and only the commands here import all four.
"""

from lightning_memmap.compare.advise_command import advise
from lightning_memmap.compare.command import compare

__all__ = ["advise", "compare"]
