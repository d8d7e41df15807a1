"""Importing this puts an empty package in the place of this one, which imports the data module and
the strategies, and with them Lightning. Its modules are those of this one. For programs of tests
that need stores alone: they start in a fraction of the time."""

import sys
from pathlib import Path
from types import ModuleType

package = sys.modules["lightning_memmap"] = ModuleType("lightning_memmap")
package.__path__ = [str(Path(__file__).parents[2] / "lightning_memmap")]
