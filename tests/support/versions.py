"""What some supported versions of other packages lack."""

from typing import Any

import pytest
from lightning.pytorch import callbacks

HAS_EMA = hasattr(callbacks, "EMAWeightAveraging")
needs_ema = pytest.mark.skipif(not HAS_EMA, reason="Lightning has averages of weights since 2.6")


class _Averaging(callbacks.StochasticWeightAveraging):
    """Where Lightning has no other average: rejected wherever that one would be."""

    def __init__(self, **_: Any) -> None:
        super().__init__(0.1)


_Averaging.__name__ = "EMAWeightAveraging"
EMAWeightAveraging: Any = callbacks.EMAWeightAveraging if HAS_EMA else _Averaging


def weights_only(value: Any) -> dict[str, Any]:
    """Return the argument by which Lightning loads weights only, which it has since 2.6."""
    return {"weights_only": value} if HAS_EMA else {}
