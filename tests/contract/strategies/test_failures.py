"""A process that dies ends all the others; one that would wait for them says so instead."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import launch_any


class Dying(Regression):
    """One rank kills itself in the middle of an epoch, and leaves a mark."""

    def __init__(self, rank: int, mark: Path) -> None:
        super().__init__()
        self.rank = rank
        self.mark = mark

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == self.rank:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def die(out: Path, rank: int, strategy: str) -> dict[str, Any]:
    """Train until a rank dies, which is before the end of the first epoch."""
    data = MemmapDataModule(Points(160), store_dir=out / "stores", batch_size=8)
    trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=1000)
    trainer.fit(Dying(rank, out / "died"), data)
    return {}


class Spoilt:
    """A transform that fails on one rank, in the middle of an epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 4 and int(os.environ.get("LOCAL_RANK", "0")) == self.rank:
            raise KeyError("row 77")
        return batch


def fail(out: Path, rank: int, strategy: str) -> dict[str, Any]:
    """Train until a rank fails, and note the error of each."""
    data = MemmapDataModule(
        Points(160), store_dir=out / "stores", batch_size=8, transform=Spoilt(rank)
    )
    trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=1000)
    try:
        trainer.fit(Regression(), data)
    except Exception as error:
        (out / f"error{trainer.global_rank}").write_text(f"{type(error).__name__}: {error}")
    # Without waiting for the others.
    os._exit(1)


def go_on_alone(out: Path, strategy: str) -> dict[str, Any]:
    """Train in two processes, and then in the first of them, once their group is left."""
    data = MemmapDataModule(Points(40), store_dir=out / "stores", batch_size=4)
    make_trainer(out, strategy="memmap_superbatch_ddp", devices=2).fit(Regression(), data)
    rank = dist.get_rank()
    for name, devices in ((strategy, 2), ("memmap_superbatch_ddp", 1)):
        try:
            make_trainer(out, strategy=name, devices=devices)
        except ValueError as error:
            (out / f"refused {name} {rank}").write_text(str(error))
    dist.destroy_process_group()
    if rank:
        sys.exit(0)
    make_trainer(out, strategy=strategy, devices=2).fit(Regression(), data.with_options())
    return {}


#: Processes take about 10 s to start on a machine that does other things as well. What would
#: hang, hangs for the 30 minutes after which gloo gives up.
SOON_S = 120


# The first rank is the process that was started by hand, and has started the other one.
@pytest.mark.parametrize(
    ("strategy", "rank"), [("ddp", 0), ("memmap_superbatch_ddp", 1), ("memmap_pipeline", 1)]
)
def test_rank_that_dies_in_training_ends_all_processes(
    tmp_path: Path, strategy: str, rank: int
) -> None:
    outcome = launch_any(
        die,
        tmp_path,
        processes=2,
        timeout_s=SOON_S,
        to_the_last=True,
        rank=rank,
        strategy=strategy,
    )
    assert (tmp_path / "died").exists()
    assert 0 not in outcome.codes
    assert rank != 0 or outcome.codes == [-9]
    assert "Connection closed by peer" in outcome.report or "reset by peer" in outcome.report


# Without torchrun, rank 0 has started the other process, and ends it before it can report.
@pytest.mark.parametrize(("rank", "nodes"), [(1, 0), (0, 1), (1, 1)])
def test_rank_tells_the_others_why_it_failed(tmp_path: Path, rank: int, nodes: int) -> None:
    strategy = "memmap_pipeline" if nodes else "memmap_superbatch_ddp"
    outcome = launch_any(
        fail,
        tmp_path,
        processes=2,
        nodes=nodes,
        timeout_s=SOON_S,
        to_the_last=not nodes,
        rank=rank,
        strategy=strategy,
    )
    assert 0 not in outcome.codes
    failed, other = ((tmp_path / f"error{each}").read_text() for each in (rank, 1 - rank))
    assert "row 77" in failed
    assert "rank" not in failed
    assert f"rank {rank}: KeyError: 'row 77'" in other
    assert other.startswith("RuntimeError")


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_one_process_after_two_is_refused_until_their_group_is_left(
    tmp_path: Path, strategy: str
) -> None:
    outcome = launch_any(go_on_alone, tmp_path, processes=2, timeout_s=SOON_S, strategy=strategy)
    assert outcome.codes == [0], outcome.report
    for rank in range(2):
        refusal = (tmp_path / f"refused {strategy} {rank}").read_text()
        assert f"strategy='{strategy}'" in refusal
        assert "destroy_process_group()" in refusal
        refusal = (tmp_path / f"refused memmap_superbatch_ddp {rank}").read_text()
        assert refusal.startswith("1 processes (devices x num_nodes)")
        assert "destroy_process_group()" in refusal
    assert (tmp_path / "rank0.pt").exists()
