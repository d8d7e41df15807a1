"""The copies of metrics that replicas update."""

import lightning as L
import pytest
from torchmetrics import SumMetric

from lightning_memmap.strategies._part_results import MetricCopies, counted_in_copies
from tests.rows import CPU


class Total(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()


def test_failed_step_leaves_nothing_for_the_next_one() -> None:
    module = Total()
    copies, own = [MetricCopies(CPU)], module.total

    def fail() -> None:
        with counted_in_copies(module, copies):
            module.total.update(100.0)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert module.total is own
    with counted_in_copies(module, copies):
        assert module.total is not own
        module.total.update(1.0)
    assert module.total.compute() == 1
