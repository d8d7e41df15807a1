"""Compare variants: the same rows, the same losses and weights, and what each one costs.

`run` measures and makes a report, `report` is the report, and `render` shows it. `run` and `render`
import `report`, and only the command here imports all three.
"""

from lightning_memmap.compare.command import compare

__all__ = ["compare"]
