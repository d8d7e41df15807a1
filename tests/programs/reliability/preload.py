"""What the processes of the fork server have from it: the modules of stores, and one use of them.

Stores do without Lightning. A process that has not imported it, and has done what is done once,
such as late imports, is forked and ended sooner.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import tests.support.without_lightning  # noqa: F401


def use_a_store() -> None:
    """Build a store, read it and check it."""
    import tests.programs.reliability.kinds  # noqa: F401
    from lightning_memmap.store import build_store, verify_store
    from tests.support.datasets import Numbered, holds

    with TemporaryDirectory() as directory:
        store = build_store(Numbered(30), Path(directory) / "s", progress=False)
        assert holds(store, Numbered(30))
        assert verify_store(store.path) == []


use_a_store()
