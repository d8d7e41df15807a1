"""What the processes of the fork server have from it: the modules of stores, and one use of them.

Stores do without Lightning. A process that has not imported it, and has done what is done once,
such as late imports, is forked and ended sooner.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType


def without_lightning() -> None:
    """Put an empty package in the place of this one, which imports the data module and the
    strategies. Its modules are those of this one."""
    package = sys.modules["lightning_memmap"] = ModuleType("lightning_memmap")
    package.__path__ = [str(Path(__file__).parents[3] / "lightning_memmap")]


def use_a_store() -> None:
    """Build a store, read it and check it."""
    import tests.programs.reliability.kinds  # noqa: F401
    from lightning_memmap.store import build_store, verify_store
    from tests.support.datasets import Numbered, holds

    with TemporaryDirectory() as directory:
        store = build_store(Numbered(30), Path(directory) / "s", progress=False)
        assert holds(store, Numbered(30))
        assert verify_store(store.path) == []


without_lightning()
use_a_store()
