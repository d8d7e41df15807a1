"""The data module as Lightning's users treat theirs: printed, copied, subclassed, passed around."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import StoreNotFoundError
from tests.support.models import Points, Regression, SaveAt, make_trainer
from tests.support.versions import weights_only

every_strategy = pytest.mark.parametrize("strategy", ["auto", "memmap_superbatch"])


class FailsAtStart(L.Callback):
    def on_fit_start(self, *_: Any) -> None:
        raise RuntimeError("the first one")


def make_data(path: Path, kind: type[MemmapDataModule] = MemmapDataModule) -> MemmapDataModule:
    return kind(Points(12), Points(8, 100), Points(6, 200), store_dir=path / "stores", batch_size=4)


def run(path: Path, data: L.LightningDataModule, *functions: str, **options: Any) -> Regression:
    """Run the Trainer's functions one after the other with one data module."""
    module, trainer = Regression(), make_trainer(path, num_sanity_val_steps=0, **options)
    for function in functions:
        getattr(trainer, function)(module, datamodule=data)
    return module


class TestPrint:
    def test_print_says_the_rows_of_the_splits_that_are_set_up(self, tmp_path: Path) -> None:
        printed = []

        class Printing(L.Callback):
            def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                printed.append(str(trainer.datamodule))  # type: ignore[attr-defined]

        data = make_data(tmp_path)
        run(tmp_path, data, "fit", callbacks=[Printing()])
        assert printed == ["MemmapDataModule(rows={'train': 12, 'val': 8})"]
        assert str(data) == "MemmapDataModule(rows={})"


class TestCopy:
    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))]
    )
    def test_copy_after_a_fit_has_the_arguments_and_trains_alike(
        self, tmp_path: Path, copied: Callable[[Any], Any]
    ) -> None:
        data = make_data(tmp_path)
        first = run(tmp_path, data, "fit")
        other = copied(data)
        assert other.trainer is None
        assert (other.store_dir, other.batch_size, other.stores) == (data.store_dir, 4, {})
        with pytest.raises(StoreNotFoundError, match=r"call setup\(\) first"):
            other.train_dataloader()
        assert run(tmp_path, other, "fit").seen == first.seen
        assert set(data.stores) == {"train", "val"}

    def test_copy_in_a_fit_leaves_the_shards_to_the_original(self, tmp_path: Path) -> None:
        class Copying(L.Callback):
            def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
                copied = copy.copy(trainer.datamodule)
                # As in a process that a strategy starts: it belongs to the same Trainer.
                assert copied.trainer is trainer
                copied.teardown()

        assert len(run(tmp_path, make_data(tmp_path), "fit", callbacks=[Copying()]).seen) == 2

    @pytest.mark.parametrize("has_own", [True, False])
    def test_second_trainer_in_a_fit_needs_a_data_module_of_its_own(
        self, tmp_path: Path, has_own: bool
    ) -> None:
        other = Regression()

        class Validating(L.Callback):
            def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
                data = trainer.datamodule
                second = make_trainer(tmp_path / "second")
                second.validate(other, datamodule=data.with_options() if has_own else data)

        if has_own:
            found = run(tmp_path, make_data(tmp_path), "fit", callbacks=[Validating()]).seen
            assert found == run(tmp_path, make_data(tmp_path), "fit").seen
        else:
            with pytest.raises(RuntimeError, match=r"data\.with_options\(\)"):
                run(tmp_path, make_data(tmp_path), "fit", callbacks=[Validating()])
        assert sorted(row for rows in other.seen["val"] for row in rows) == [*range(100, 108)]


class TestSubclass:
    def test_teardown_of_a_subclass_is_called_by_the_trainer_alone(self, tmp_path: Path) -> None:
        calls = []

        class Closing(MemmapDataModule):
            def setup(self, stage: str | None = None) -> None:
                super().setup(stage)
                calls.append(("setup", stage))

            def teardown(self, stage: str | None = None) -> None:
                calls.append(("teardown", stage))

        run(tmp_path, make_data(tmp_path, Closing), "fit", "test")
        assert calls == [
            ("setup", "fit"), ("teardown", "fit"), ("setup", "test"), ("teardown", "test")
        ]  # fmt: skip

    @every_strategy
    def test_hooks_of_a_subclass_without_super_do_as_they_say(
        self, tmp_path: Path, strategy: str
    ) -> None:
        class Own(MemmapDataModule):
            def prepare_data(self) -> None:
                pass

            def train_dataloader(self) -> Any:
                return DataLoader(Points(12), batch_size=6)

            def state_dict(self) -> dict[str, Any]:
                return {}

        make_data(tmp_path).prepare_data()
        data = Own(val_dataset=Points(8, 100), store_dir=tmp_path / "stores", batch_size=4)
        seen = run(tmp_path, data, "fit", strategy=strategy).seen
        assert seen["train"] == [list(range(6)), list(range(6, 12))]
        assert seen["val"] == [[100, 101, 102, 103], [104, 105, 106, 107]]

    def test_prepare_data_without_super_is_named_where_nothing_is_built(
        self, tmp_path: Path
    ) -> None:
        class Own(MemmapDataModule):
            def prepare_data(self) -> None:
                pass

        with pytest.raises(StoreNotFoundError, match=r"no store at .*super\(\)\.prepare_data\(\)"):
            run(tmp_path, make_data(tmp_path, Own), "fit")

    def test_resumed_fit_that_fails_leaves_nothing_to_the_next_one(self, tmp_path: Path) -> None:
        data, checkpoint = make_data(tmp_path), tmp_path / "mid.ckpt"
        saved = SaveAt(2, checkpoint)
        seen = run(tmp_path, data, "fit", callbacks=[saved], limit_train_batches=2).seen
        trainer = make_trainer(tmp_path, callbacks=[FailsAtStart()], max_epochs=2)
        with pytest.raises(RuntimeError, match="the first one"):
            trainer.fit(Regression(), datamodule=data, ckpt_path=checkpoint)
        assert run(tmp_path, data, "fit", limit_train_batches=2).seen == seen

    def test_resumed_fit_that_fails_before_its_first_loader_saves_where_it_was_to_go_on(
        self, tmp_path: Path
    ) -> None:
        checkpoint = tmp_path / "mid.ckpt"
        seen = run(tmp_path, make_data(tmp_path), "fit", callbacks=[SaveAt(1, checkpoint)]).seen
        failing = [FailsAtStart(), OnExceptionCheckpoint(tmp_path, filename="mid")]
        with pytest.raises(RuntimeError, match="the first one"):
            make_trainer(tmp_path, callbacks=failing, enable_checkpointing=True).fit(
                Regression(), datamodule=make_data(tmp_path), ckpt_path=checkpoint
            )
        module = Regression()
        make_trainer(tmp_path).fit(module, datamodule=make_data(tmp_path), ckpt_path=checkpoint)
        assert module.seen["train"] == seen["train"][1:]

    def test_hyperparameters_of_a_subclass_come_back_from_a_checkpoint(
        self, tmp_path: Path
    ) -> None:
        class Saved(MemmapDataModule):
            def __init__(self, root: str, batch_size: int = 4) -> None:
                super().__init__(Points(12), store_dir=root, batch_size=batch_size)
                self.save_hyperparameters()

        trainer = make_trainer(tmp_path, limit_val_batches=0)
        trainer.fit(Regression(), Saved(str(tmp_path / "stores"), batch_size=6))
        trainer.save_checkpoint(tmp_path / "checkpoint")
        for is_safe in (False, True):
            loaded = Saved.load_from_checkpoint(tmp_path / "checkpoint", **weights_only(is_safe))
            assert (loaded.batch_size, loaded.store_dir) == (6, tmp_path / "stores")


class TestTrainer:
    @every_strategy
    def test_loaders_after_a_data_module_are_used_as_they_are(
        self, tmp_path: Path, strategy: str
    ) -> None:
        data = MemmapDataModule(Points(12), Points(8), store_dir=tmp_path / "stores", batch_size=4)
        trainer, module = make_trainer(tmp_path, strategy=strategy), Regression()
        trainer.fit(module, data)
        # The Trainer keeps the data module, and calls its hooks.
        trainer.test(module, DataLoader(Points(3, 50)), verbose=False)
        found = trainer.predict(module, DataLoader(Points(3, 60)))
        assert module.seen["test"] == [[50], [51], [52]]
        assert found is not None
        assert [each["row"].item() for each in found] == [60, 61, 62]  # type: ignore[call-overload,index]

    def test_hooks_by_hand_after_a_fit_are_for_all_splits(self, tmp_path: Path) -> None:
        data = make_data(tmp_path)
        run(tmp_path, data, "validate", "fit")
        data.prepare_data()
        for _ in range(2):
            data.setup()
            assert set(data.stores) == {"train", "val", "test"}
        data.teardown()


class TestFromDatasets:
    def test_from_datasets_trains_on_them(self, tmp_path: Path) -> None:
        data = MemmapDataModule.from_datasets(
            Points(4), test_dataset=Points(3, 50), store_dir=tmp_path / "stores", shuffle=False
        )
        seen = run(tmp_path, data, "fit", "test", limit_val_batches=0).seen
        assert seen == {"train": [[0], [1], [2], [3]], "test": [[50], [51], [52]]}

    def test_from_datasets_without_a_place_says_so(self) -> None:
        with pytest.raises(TypeError, match=r"store_dir=\.\.\."):
            MemmapDataModule.from_datasets(Points(4))


def test_forgotten_call_of_setup_is_named(tmp_path: Path) -> None:
    class Data(MemmapDataModule):
        def setup(self, stage: str | None = None) -> None:
            self.num_classes = 10

    trainer = make_trainer(tmp_path)
    with pytest.raises(StoreNotFoundError, match=r"super\(\)\.setup"):
        trainer.fit(Regression(), Data(Points(20), store_dir=tmp_path / "stores"))
