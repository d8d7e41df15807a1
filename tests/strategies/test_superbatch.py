"""What is particular to ``memmap_superbatch``: its devices, its batches, its configs."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.strategies import SuperBatchStrategy
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.rows import CPU, NumberedRows, joined, make_loader, rows_of

pytestmark = pytest.mark.slow

TRAIN, VAL = Points(63), Points(20, 100)


def make_data(path: Path, batch_size: int, **options: Any) -> MemmapDataModule:
    return MemmapDataModule(TRAIN, VAL, store_dir=path / "stores", batch_size=batch_size, **options)


def fit(
    path: Path, strategy: Any, batch_size: int, devices: int = 1, **options: Any
) -> tuple[Regression, MemmapDataModule, L.Trainer]:
    module, data = Regression(), make_data(path, batch_size)
    trainer = make_trainer(path, strategy=strategy, devices=devices, **options)
    trainer.fit(module, datamodule=data)
    return module, data, trainer


class TestName:
    def test_other_kinds_of_strategies_are_checked_by_lightning(self, tmp_path: Path) -> None:
        assert make_trainer(tmp_path, strategy=SuperBatchStrategy()).strategy is not None
        for strategy in ("auto", "memmap_superbatch", "MEMMAP_SUPERBATCH"):
            make_trainer(tmp_path, strategy=strategy)
        with pytest.raises((TypeError, ValueError)):
            make_trainer(tmp_path, strategy=3)


class TestDevices:
    def test_devices_of_the_trainer_hold_data(self, tmp_path: Path) -> None:
        strategy = make_trainer(tmp_path, strategy="memmap_superbatch", devices=4).strategy
        assert isinstance(strategy, SuperBatchStrategy)
        assert strategy.data_devices == (CPU,) * 4
        assert strategy.root_device == CPU

    def test_data_devices_given_with_repeats_hold_data(self, tmp_path: Path) -> None:
        strategy = SuperBatchStrategy(data_devices=["cpu", CPU, "cpu"])
        module, data, trainer = fit(tmp_path, strategy, 3)
        assert data.placement is not None
        assert data.placement.topology.data_devices == strategy.data_devices == (CPU,) * 3
        assert [len(rows) for rows in module.seen["train"]] == [9] * 7
        assert trainer.global_step == 7

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"data_devices": []}, r"data_devices=\[\]"),
            ({"data_devices": "cpu"}, r"data_devices='cpu'"),
            ({"data_devices": ["cpu", "gpu0"]}, r"data_devices.*'gpu0'"),
            ({"data_devices": ["cpu", "cuda:99"]}, r"cuda:99 .*cpu"),
            ({"data_devices": ["cpu", "meta"]}, r"meta .*cpu"),
        ],
    )
    def test_options_that_cannot_be_raise_when_the_trainer_is_made(
        self, tmp_path: Path, options: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            make_trainer(tmp_path, strategy=SuperBatchStrategy(**options))

    @pytest.mark.parametrize(("prefetch", "ahead"), [(None, 0), (0, 0), (1, 1), (4, 4)])
    @pytest.mark.parametrize("strategy", ["memmap_superbatch", "auto"])
    def test_prefetch_of_the_data_module_makes_as_many_steps_ahead(
        self, tmp_path: Path, strategy: str, prefetch: int | None, ahead: int
    ) -> None:
        made: list[int] = []

        class Counting(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                assert len(made) == min(9, batch_idx + 1 + ahead)
                return super().training_step(batch, batch_idx)

        def transform(batch: Any) -> Any:
            made.append(1)
            return batch

        data = MemmapDataModule(
            Points(36), store_dir=tmp_path, batch_size=4, transform=transform, prefetch=prefetch
        )
        trainer = make_trainer(tmp_path, strategy=strategy)
        trainer.fit(Counting(), data)
        assert trainer.global_step == 9

    def test_loader_without_a_data_module_prefetches(
        self, tmp_path: Path, numbered_store: Any
    ) -> None:
        loader = make_loader(numbered_store(36, 4), 1, 4, prefetch=2)
        trainer = make_trainer(tmp_path, strategy="memmap_superbatch")
        trainer.fit(Rows(), loader)
        assert trainer.train_dataloader.prefetch == 2

    def test_more_devices_than_rows_raise_before_the_first_step(self, tmp_path: Path) -> None:
        data = MemmapDataModule(Points(3), store_dir=tmp_path / "stores")
        trainer = make_trainer(tmp_path, strategy="memmap_superbatch", devices=4)
        with pytest.raises(Exception, match=r"3 rows.*4 data devices"):
            trainer.fit(Regression(), datamodule=data)
        assert trainer.global_step == 0

    def test_devices_that_do_not_divide_the_shards_warn_and_train(self, tmp_path: Path) -> None:
        with pytest.warns(
            UserWarning,
            match=r"24 shards, which 5 data devices .* 25, .* 12 or 24 data devices",
        ):
            module, _, _ = fit(tmp_path, "memmap_superbatch", 2, devices=5)
        assert sorted(joined(module.seen["train"])) == list(range(63))


class TestTraining:
    def test_plain_dataloaders_train_as_under_auto(self, tmp_path: Path) -> None:
        modules = []
        for strategy in ("memmap_superbatch", "auto"):
            module = Regression()
            trainer = make_trainer(tmp_path, strategy=strategy)
            trainer.fit(module, DataLoader(TRAIN, 16), DataLoader(VAL, 16))
            modules.append(module)
        assert modules[0].seen == modules[1].seen
        assert torch.equal(weights(modules[0]), weights(modules[1]))

    def test_plain_dataloader_of_several_devices_warns(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, strategy="memmap_superbatch", devices=2)
        with pytest.warns(UserWarning, match=r"2 data devices"):
            trainer.fit(Regression(), DataLoader(TRAIN, 16), DataLoader(VAL, 16))

    @pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
    def test_loader_that_was_made_without_the_trainer_warns(
        self, tmp_path: Path, strategy: str
    ) -> None:
        data = make_data(tmp_path, 4)
        data.prepare_data()
        data.setup("fit")
        trainer = make_trainer(tmp_path, strategy=strategy, devices=2)
        with pytest.warns(UserWarning, match="4 rows .* 8.*datamodule="):
            trainer.fit(Regression(), data.train_dataloader(), data.val_dataloader())

    def test_super_batches_of_any_loader_are_assembled(
        self, tmp_path: Path, numbered_store: Any
    ) -> None:
        class Replay:
            """Kept super-batches: nothing tells the strategy that this is what it will get."""

            super_batches = tuple(make_loader(numbered_store(37, 24), 3, 4))

            def __iter__(self) -> Any:
                return iter(self.super_batches)

        assert {type(batch) for batch in Replay()} == {SuperBatch}
        module = Rows()
        make_trainer(tmp_path, strategy="memmap_superbatch", devices=3).fit(module, Replay())
        assert joined(module.rows) == list(range(37))


class Rows(L.LightningModule):
    """Notes the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows: list[list[int]] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        assert type(batch) is dict
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(rows_of(batch))
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Marked(MemmapDataModule):
    """Has a say in what becomes of a batch that is where it belongs."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "marked": torch.ones(len(batch["row"]))}


class SeesMarks(Rows):
    transfer_batch_to_device = L.LightningModule.transfer_batch_to_device

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append([int(batch.get("marked", torch.zeros(1)).sum())])
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to see here: its batches are the same."""


@pytest.mark.parametrize(("data", "marks"), [(Marked, [[4]] * 3), (MemmapDataModule, [[0]] * 3)])
def test_transfer_hook_of_the_data_module_runs_if_it_has_one(
    tmp_path: Path, data: type[MemmapDataModule], marks: list[list[int]]
) -> None:
    module = SeesMarks()
    rows = NumberedRows(12)
    datamodule = data(rows, rows, store_dir=tmp_path, batch_size=2, num_shards=2)
    make_trainer(tmp_path, strategy="memmap_superbatch", devices=2).fit(
        module, datamodule=datamodule
    )
    assert module.rows == marks
