"""The memory of training steps over time."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import MemoryTrace
from lightning_memmap.callbacks.memory_trace import KINDS, AllocationTracer, live_parameters
from tests.models import Points, Regression, make_trainer

PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 + 1)
BATCH_BYTES = 16 * (8 + 32 + 4)


def test_memory_is_seen_from_the_operator_that_returns_it_until_it_is_let_go_of() -> None:
    tracer = AllocationTracer()
    with tracer:
        first = torch.empty(1000)
        view = first[:10]
        del first
        second = torch.empty(500)
        del view
        third = torch.empty(250)
    found = tracer.series()["activations"]
    assert [value for value in found if value] == [4000.0, 6000.0, 2000.0, 3000.0]
    assert second.shape[0] + third.shape[0] == 750


def test_trace_of_training_tells_what_memory_is_for(tmp_path: Path) -> None:
    data = MemmapDataModule(Points(64), store_dir=tmp_path / "stores", batch_size=16)
    trace = MemoryTrace(tmp_path / "trace", first_step=1, num_steps=2)
    trainer = make_trainer(tmp_path, max_steps=4, limit_val_batches=0, callbacks=[trace])
    model = Regression()
    # Models of tests before this one may still be alive, and are seen too.
    gc.collect()
    foreign = [p for p in live_parameters() if all(p is not own for own in model.parameters())]
    others = sum(p.nbytes for p in foreign)
    other_gradients = sum(p.grad.nbytes for p in foreign if p.grad is not None)
    trainer.fit(model, datamodule=data)
    series: dict[str, Any] = json.loads((tmp_path / "trace/memory_trace_rank0.json").read_text())
    assert set(series) == {"time_s", *KINDS}
    assert series["time_s"] == sorted(series["time_s"])
    assert set(series["parameters"]) == {PARAMETER_BYTES + others}
    # Gradients are freed by zero_grad, and come back in the backward pass.
    assert max(series["gradients"]) == PARAMETER_BYTES + other_gradients
    assert min(series["gradients"]) == 0
    assert set(series["optimizer"]) == {2 * PARAMETER_BYTES + 4 * 4}
    # The loader takes several small steps at once: the batch is a view of them all.
    assert max(series["data"]) == 4 * BATCH_BYTES
    assert max(series["activations"]) > 16 * 16 * 4


@pytest.mark.parametrize("options", [{"first_step": -1}, {"num_steps": 0}])
def test_impossible_steps_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="record at least one step"):
        MemoryTrace(tmp_path, **options)


def test_trace_of_a_run_that_fails_is_kept(tmp_path: Path) -> None:
    class Failing(Regression):
        def on_after_backward(self) -> None:
            if self.global_step == 1:
                raise RuntimeError("out of memory")

    data = MemmapDataModule(Points(64), store_dir=tmp_path / "stores", batch_size=16)
    trainer = make_trainer(tmp_path, max_steps=4, limit_val_batches=0,
                           callbacks=[MemoryTrace(tmp_path, 1)])  # fmt: skip
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Failing(), datamodule=data)
    assert json.loads((tmp_path / "memory_trace_rank0.json").read_text())["time_s"]
