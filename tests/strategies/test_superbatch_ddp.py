"""Super-batches inside each process and DDP between them train as one process, tails included."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import SuperBatchDDPStrategy
from tests.support.models import (
    CombinedData,
    Points,
    Regression,
    TwoOptimizers,
    make_trainer,
    weights,
)
from tests.support.processes import each_case, in_processes, launch, mean_losses, sorted_steps
from tests.support.training import fit_and_test, make_strategy

pytestmark = [pytest.mark.slow]

#: The last two steps of an epoch have 12 and 11 rows, which neither 2 nor 4 processes divide.
ROWS = 151


class ReadAhead:
    """A loader without a length, which Lightning reads one batch ahead."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ReadAheadData(MemmapDataModule):
    def train_dataloader(self) -> Any:
        return ReadAhead(super().train_dataloader())


class PairedData(CombinedData):
    """Sets of other lengths, so that one ends with an uneven step where the other one goes on."""

    sets: ClassVar = {"long": Points(ROWS), "short": Points(44, offset=1000)}


class Paired(Regression):
    """Learns from a batch of each loader, or takes the batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [self.step(part, name) for name, part in batch.items() if part is not None]
        return sum(losses) / len(losses)


class ByIterator(Regression):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.step(batch, "train")


def fit_wrapped(
    out: Path, kind: str, strategy: str, strategy_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train for an epoch from loaders that reach the Trainer in another form than they are made."""
    options: dict[str, Any] = {"batch_size": 8, "num_shards": 4, "store_dir": out / "stores"}
    module: Regression = Regression()
    data: Any
    if kind == "read ahead":
        data = ReadAheadData(Points(ROWS), **options)
    elif kind == "iterator":
        data, module = MemmapDataModule(Points(ROWS), **options), ByIterator()
    else:
        drop_last = kind == "paired, whole steps"
        data, module = PairedData(out, "max_size_cycle", 8, drop_last=drop_last), Paired()
    precision: Any = "64-true" if kind == "read ahead" else "32-true"
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=2,
        max_epochs=1,
        precision=precision,
        limit_val_batches=0,
    )
    try:
        trainer.fit(module, data)
    except ValueError as error:
        return {"error": str(error)}
    return {"weights": weights(module)}


class Counting(Regression):
    """Adds up what each process sees, in buffers of a dtype that NCCL knows, and of another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("unknown", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("assigned", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("expanded", torch.ones(1, dtype=torch.int16).expand(4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seen = int(batch["row"].sum()) % 100
        for buffer in (self.known, self.unknown):
            buffer += seen
        self.assigned = self.assigned + seen
        return self.step(batch, "train")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    options = {"strategy": "memmap_superbatch", "devices": 4, "batch_size": 4, "rows": ROWS}
    return launch(fit_and_test, out, processes=1, **options)[0]


def assert_as_one_process(ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    found = sorted_steps([rank["seen"]["train"] for rank in ranks])
    assert found == sorted_steps([one_process["seen"]["train"]])
    tested = sorted(chain(*chain(*(rank["seen"]["test"] for rank in ranks))))
    assert tested == list(range(5000, 5000 + ROWS - 3))
    expected = mean_losses([one_process])
    torch.testing.assert_close(mean_losses(ranks), expected, rtol=1e-6, atol=1e-6)
    for rank in ranks:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        # float32 sums in another order, over 20 steps of Adam.
        torch.testing.assert_close(rank["weights"], one_process["weights"], rtol=0, atol=2e-6)
        assert rank["test_mean"] == pytest.approx(one_process["test_mean"], abs=1e-6)


@pytest.mark.parametrize(("processes", "group", "prefetch"), [(2, 2, 3), (4, 1, None)])
def test_groups_of_devices_are_processes_and_train_as_one(
    tmp_path: Path, one_process: dict[str, Any], processes: int, group: int, prefetch: int | None
) -> None:
    options = {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": group},
        "prefetch": prefetch,
        "devices": 4,
        "batch_size": 4,
        "rows": ROWS,
    }
    assert_as_one_process(
        launch(fit_and_test, tmp_path, processes=processes, **options), one_process
    )


def test_two_nodes_by_torchrun_train_as_one(tmp_path: Path, one_process: dict[str, Any]) -> None:
    options = {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 2},
        "num_nodes": 2,
        "devices": 2,
        "batch_size": 4,
        "rows": ROWS,
    }
    ranks = launch(fit_and_test, tmp_path, processes=2, nodes=2, **options)
    assert_as_one_process(ranks, one_process)


BY_TWO = {"strategy": "memmap_superbatch_ddp"}


@pytest.mark.parametrize("kind", ["read ahead", "iterator", "paired, whole steps"])
def test_weight_of_uneven_steps_travels_with_their_batches(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    options = {"kind": kind, "strategy": "memmap_superbatch"}
    (expected,) = launch(fit_wrapped, tmp_path / "one", processes=1, **options)
    for rank in launch(fit_wrapped, tmp_path / "two", processes=2, kind=kind, **BY_TWO):
        torch.testing.assert_close(rank["weights"], expected["weights"], rtol=0, atol=2e-6)


def test_batches_of_other_weights_in_one_step_are_refused(tmp_path: Path) -> None:
    for rank in launch(fit_wrapped, tmp_path, processes=2, kind="paired", **BY_TWO):
        assert "drop_last=True" in rank["error"]


@in_processes(2)
def test_buffers_of_all_dtypes_are_those_of_the_first_process_in_each_step(tmp_path: Path) -> None:
    module = Counting()
    data = MemmapDataModule(Points(60), store_dir=tmp_path / "stores", batch_size=4)
    make_trainer(tmp_path, devices=2, **BY_TWO).fit(module, data)
    (count,) = {buffer.item() for buffer in (module.known, module.unknown, module.assigned)}
    assert count > 0


@in_processes(2)
def test_parameters_that_a_step_does_not_use_raise_an_error_with_the_option(tmp_path: Path) -> None:
    data = MemmapDataModule(Points(60), store_dir=tmp_path / "stores", batch_size=4)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        make_trainer(tmp_path, devices=2, **BY_TWO).fit(TwoOptimizers(), data)


@in_processes(2)
def test_compiled_module_trains_logs_and_toggles_optimizers_as_it_is(tmp_path: Path) -> None:
    for _, kind in each_case([Regression, TwoOptimizers]):
        found = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            module = kind()
            strategy = SuperBatchDDPStrategy(find_unused_parameters=kind is TwoOptimizers)
            data = MemmapDataModule(Points(ROWS), store_dir=tmp_path / "stores", batch_size=4)
            options = {"strategy": strategy, "max_epochs": 2, "precision": "64-true"}
            trainer = make_trainer(tmp_path, devices=2, **options)
            target: Any = torch.compile(module, backend="eager") if is_compiled else module
            trainer.fit(target, data)
            assert "log" not in vars(module)
            logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
            found.append((weights(module), logged))
        (plain, plain_logged), (compiled, compiled_logged) = found
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-12)
        assert compiled_logged == pytest.approx(plain_logged, abs=1e-6)
        assert compiled_logged.keys() >= {"train_loss"}


def test_every_device_trains_by_default(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch_ddp", devices=8, num_nodes=2)
    strategy: Any = trainer.strategy
    assert (strategy.num_processes, trainer.world_size) == (8, 16)
    assert len(strategy.data_devices) == 1


def test_devices_are_divided_into_groups(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy=SuperBatchDDPStrategy(2), devices=6, num_nodes=3)
    strategy: Any = trainer.strategy
    assert (strategy.num_processes, trainer.world_size) == (3, 9)
    assert strategy.data_devices == (torch.device("cpu"),) * 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 9, "rank": 0}


def test_groups_of_gpus_belong_to_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SuperBatchDDPStrategy(3, root_holds_data=False)
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(6)]
    groups = []
    for local_rank in range(2):
        monkeypatch.setattr(SuperBatchDDPStrategy, "local_rank", local_rank)
        groups.append([str(strategy.root_device), *map(str, strategy.data_devices)])
    assert groups == [["cuda:0", "cuda:1", "cuda:2"], ["cuda:3", "cuda:4", "cuda:5"]]


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ({"data_devices_per_process": 0}, 2, "data_devices_per_process=0"),
        ({"data_devices_per_process": 3}, 4, "Trainer(devices=4)"),
        ({"data_devices_per_process": 1, "root_holds_data": False}, 2, "root_holds_data=False"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], devices: int, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(tmp_path, strategy=SuperBatchDDPStrategy(**options), devices=devices)
