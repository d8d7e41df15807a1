"""Existing data modules and loaders become a `MemmapDataModule` of the same rows, or an error."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Subset, Weighted
from tests.support.models import (
    LONG,
    QUIET,
    SHORT,
    Points,
    Regression,
    SaveAt,
    make_trainer,
    weights,
)
from tests.support.processes import in_processes
from tests.support.versions import weights_only

TRAIN, VAL, OTHER, TEST = Points(63), Points(20, 100), Points(7, 200), Points(25, 300)
WEIGHTS = torch.arange(63).double() % 5
CPUS = pytest.mark.parametrize(("strategy", "devices"), [("memmap_superbatch", 2), ("auto", 1)])


class Data(L.LightningDataModule):
    """A data module as people have them, which notes the hooks that are called."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.calls: list[str] = []
        self.num_inputs = 8

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        if stage == "fit":
            self.rows = Points(63)
        if stage in ("fit", "validate"):
            self.val_rows = Points(20, 100)
        if stage in ("test", "predict"):
            self.test_rows = Points(25, 300)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, self.batch_size, shuffle=True, drop_last=True, num_workers=0)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_rows, 2 * self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_rows, self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.test_rows, batch_size=5)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


class Validated(Regression):
    """Notes the rows of each of several validation loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(batch, f"val{dataloader_idx}")


class Both(Regression):
    """Learns from a batch of each loader in each step."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        parts = batch if isinstance(batch, list) else [*batch.values()]
        rows = [part and part["row"].tolist() for part in parts]
        self.seen.setdefault("both", []).append(rows)
        parts = [part for part in parts if part is not None]
        return torch.stack([self.loss(self(part["x"]), part) for part in parts]).mean()


def run(
    path: Path, module: Regression, data: Any, *, tests: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Fit, and test if asked to; return all rows that the module saw, and its weights."""
    options = {"max_epochs": 2, **options}
    trainer = make_trainer(path, **options)
    trainer.fit(module, data)
    if tests:
        trainer.test(module, data, verbose=False)
    return module.seen, weights(module)


def assert_same(path: Path, made: Any, written: Any, module: Any, **options: Any) -> None:
    """Check that two data modules give the same rows, and train the same weights."""
    found = run(path, module(), made, **options)
    expected = run(path, module(), written, **options)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@CPUS
def test_data_module_gives_the_rows_and_weights_of_one_written_by_hand(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    written = MemmapDataModule(
        TRAIN, VAL, TEST, TEST, store_dir=tmp_path / "by_hand", batch_size=8, drop_last=True,
        eval_batch_size={"val": 16, "test": 8, "predict": 5},
    )  # fmt: skip
    made = MemmapDataModule.from_datamodule(Data(), store_dir=tmp_path / "made")
    module = Regression()
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "tests": True}
    seen, found = run(tmp_path, module, made, **options)
    expected = run(tmp_path, Regression(), written, **options)
    assert seen == expected[0]
    assert {len(rows) for rows in seen["train"]} == {8 * devices}
    assert torch.equal(found, expected[1])
    trainer = make_trainer(tmp_path, strategy=strategy, devices=devices)
    predicted: Any = trainer.predict(module, made)
    assert torch.cat([each["row"] for each in predicted]).tolist() == TEST.row.tolist()


@pytest.mark.parametrize("form", [list, dict])
def test_several_validation_loaders_keep_their_form_and_sizes(tmp_path: Path, form: Any) -> None:
    loaders: Any = [DataLoader(VAL, 4), DataLoader(OTHER, 3)]
    datasets: Any = [VAL, OTHER]
    sizes = {"val/0": 4, "val/1": 3}
    if form is dict:
        loaders, datasets = (dict(zip("ab", each, strict=True)) for each in (loaders, datasets))
        sizes = {"val/a": 4, "val/b": 3}
    train = DataLoader(TRAIN, 8, shuffle=True)
    made = MemmapDataModule.from_loaders(train, loaders, store_dir=tmp_path / "made")
    written = MemmapDataModule(
        TRAIN, datasets, store_dir=tmp_path / "by_hand", batch_size=8, eval_batch_size=sizes
    )
    assert_same(tmp_path, made, written, Validated)
    made.setup("validate")
    assert type(made.val_dataloader()) is form


def test_validation_loaders_are_combined_as_they_were(tmp_path: Path) -> None:
    val = CombinedLoader({"b": DataLoader(VAL, 5), "a": DataLoader(OTHER, 7)}, "max_size")

    class Pairs(Regression):
        def validation_step(self, batch: Any, *_: Any) -> None:
            rows = {key: part and part["row"].tolist() for key, part in batch.items()}
            self.seen.setdefault("pairs", []).append(rows)  # type: ignore[arg-type]

    found = []
    train = DataLoader(TRAIN, 8)
    for data in (
        {"datamodule": MemmapDataModule.from_loaders(train, val, store_dir=tmp_path)},
        {"train_dataloaders": train, "val_dataloaders": val},
    ):
        module = Pairs()
        make_trainer(tmp_path).fit(module, **data)  # type: ignore[arg-type]
        found.append(module.seen["pairs"])
    assert found[0] == found[1]


@CPUS
@pytest.mark.parametrize("mode", [None, "min_size", "max_size", "max_size_cycle"])
def test_several_training_loaders_give_the_batches_that_they_give_lightning(
    tmp_path: Path, strategy: str, devices: int, mode: Any
) -> None:
    def loaders(devices: int) -> Any:
        long, short = DataLoader(LONG, 8 // devices), DataLoader(SHORT, 8 // devices)
        return [long, short] if mode is None else CombinedLoader({"a": long, "b": short}, mode)

    val = DataLoader(VAL, 4)
    made = MemmapDataModule.from_loaders(loaders(devices), val, store_dir=tmp_path, num_shards=4)
    seen, found = run(tmp_path, Both(), made, strategy=strategy, devices=devices)
    expected = Both()
    make_trainer(tmp_path, max_epochs=2).fit(expected, loaders(1), val)
    assert seen["both"] == expected.seen["both"]
    torch.testing.assert_close(found, weights(expected))


ROWS = [5, 3, 60, 8, 9, 11, 2, 41, 30]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: DataLoader(TRAIN, 8), {"shuffle": False}),
        (lambda: DataLoader(TRAIN, 8, sampler=RandomSampler(TRAIN)), {}),
        (lambda: DataLoader(TRAIN, 8, sampler=SequentialSampler(TRAIN)), {"shuffle": False}),
        (
            lambda: DataLoader(TRAIN, 4, sampler=SubsetRandomSampler(ROWS)),
            {"subset": Subset(ROWS), "batch_size": 4},
        ),
        (lambda: DataLoader(TRAIN, 8, sampler=DistributedSampler(TRAIN, 2, 0)), {}),
        (
            lambda: DataLoader(TRAIN, 8, sampler=DistributedSampler(TRAIN, 2, 1, shuffle=False)),
            {"shuffle": False},
        ),
        (
            lambda: DataLoader(
                TRAIN, 8, sampler=DistributedSampler(TRAIN, 2, 1, drop_last=True), drop_last=True
            ),
            {"drop_last": True},
        ),
        (
            lambda: DataLoader(TRAIN, batch_sampler=BatchSampler(RandomSampler(TRAIN), 8, True)),
            {"drop_last": True},
        ),
        (lambda: DataLoader(Stream(), 8), {"shuffle": False}),
        *(
            (
                lambda count=count: DataLoader(
                    TRAIN, 8, sampler=WeightedRandomSampler(WEIGHTS.tolist(), count)
                ),
                {"sampler": Weighted(WEIGHTS, count)},
            )
            for count in (63, 40)
        ),
    ],
)
def test_sampler_decides_rows_and_order(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, Any]
) -> None:
    made = MemmapDataModule.from_loaders(make(), store_dir=tmp_path / "made")
    defaults: dict[str, Any] = {"batch_size": 8}
    written = MemmapDataModule(TRAIN, store_dir=tmp_path / "by_hand", **(defaults | options))
    assert_same(tmp_path, made, written, Regression)


def test_subset_sampler_evaluates_its_rows_in_its_order(tmp_path: Path) -> None:
    loader = DataLoader(VAL, 4, sampler=SubsetRandomSampler([7, 2, 11]))
    made = MemmapDataModule.from_loaders(DataLoader(TRAIN, 8), [loader], store_dir=tmp_path)
    seen, _ = run(tmp_path, Regression(), made, num_sanity_val_steps=0, max_epochs=1)
    assert seen["val"] == [[107, 102, 111]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (TRAIN[row] for row in range(len(TRAIN)))


@pytest.mark.parametrize("with_rows", [False, True])
def test_stream_is_read_by_one_process_whatever_its_loader_has(
    tmp_path: Path, with_rows: bool
) -> None:
    val = DataLoader(VAL, 10, num_workers=1) if with_rows else None
    data = MemmapDataModule.from_loaders(
        DataLoader(Stream(), 8, num_workers=1), val, store_dir=tmp_path
    )
    assert data.num_workers == 0
    data.prepare_data()
    data.setup("fit")
    rows = [row for batch in data.train_dataloader() for row in batch["row"].tolist()]
    assert rows == TRAIN.row.tolist()


class Odd(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(1, 63, 2))


class Batches(BatchSampler):
    def __iter__(self) -> Any:
        return iter([[3, 4], [1]])


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def collate(rows: Any) -> Any:
    return default_collate(rows)


def loader_of(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(*args, **options)


NOT_CARRIED_OVER = [
    ("train", loader_of(TRAIN, 8, collate_fn=collate), "collate_fn=collate.*guides/existing"),
    ("train", loader_of(TRAIN, None), "batch_size=None.*guides/existing"),
    (
        "train",
        loader_of(TRAIN, batch_sampler=Batches(RandomSampler(TRAIN), 8, True)),
        "batch_sampler=Batches.*data_order",
    ),
    ("train", loader_of(TRAIN, 8, sampler=Odd()), "sampler=Odd.*data_order"),
    (
        "train",
        loader_of(TRAIN, 8, sampler=RandomSampler(TRAIN, replacement=True)),
        "RandomSampler.*replacement=True",
    ),
    (
        "train",
        loader_of(TRAIN, 8, sampler=RandomSampler(TRAIN, num_samples=9)),
        "RandomSampler.*num_samples=9",
    ),
    ("train", loader_of(TRAIN, 8, sampler=RandomSampler(VAL)), "sampler=RandomSampler"),
    (
        "train",
        loader_of(TRAIN, 8, sampler=WeightedRandomSampler(WEIGHTS.tolist(), 9, replacement=False)),
        "WeightedRandomSampler.*replacement=False",
    ),
    (
        "train",
        loader_of(TRAIN, 8, sampler=WeightedRandomSampler([1.0, 2.0], 9)),
        "WeightedRandomSampler.*2 weights for 63 rows",
    ),
    ("train", loader_of(TRAIN, 8, sampler=SubsetRandomSampler([1, 1])), "SubsetRandomSampler"),
    ("train", loader_of(TRAIN, 8, sampler=SubsetRandomSampler([63])), "SubsetRandomSampler"),
    (
        "train",
        loader_of(TRAIN, 8, sampler=DistributedSampler(TRAIN, 2, 0, drop_last=True)),
        "DistributedSampler.*drop_last=True",
    ),
    (
        "train",
        loader_of(Stream(), 8, num_workers=1, worker_init_fn=print),
        "worker_init_fn=print.*IterableDataset.*datasets",
    ),
    ("train", lambda: OwnLoader(TRAIN, 8), "OwnLoader .*__iter__"),
    ("train", lambda: [{"x": 1}], r"train_dataloader\[0\].*DataLoader"),
    ("train", lambda: {"a/b": DataLoader(TRAIN, 8)}, r"train_dataloader\['a/b'\]"),
    (
        "val",
        loader_of(VAL, 8, shuffle=True),
        "val_dataloader.*sampler=RandomSampler.*shuffle=False",
    ),
    (
        "val",
        lambda: [DataLoader(VAL, 8, sampler=DistributedSampler(VAL, 2, 0))],
        r"val_dataloader\[0\].*sampler=DistributedSampler",
    ),
    (
        "val",
        loader_of(VAL, 8, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        "val_dataloader.*sampler=WeightedRandomSampler",
    ),
    ("val", loader_of(VAL, 8, drop_last=True), "val_dataloader.*drop_last=True"),
    ("val", lambda: [DataLoader([1, 2], 2)], "val_dataloader.*Dataset"),
]


@pytest.mark.parametrize(("split", "make", "words"), NOT_CARRIED_OVER)
def test_loader_without_a_counterpart_raises_what_it_is_and_the_guide(
    tmp_path: Path, split: str, make: Callable[[], Any], words: str
) -> None:
    loaders = {"train": DataLoader(TRAIN, 8), split: make()}
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}"):
        MemmapDataModule.from_loaders(**loaders, store_dir=tmp_path)
    assert not [*tmp_path.iterdir()]
    # At the set-up of a data module, before anything is stored.
    data = Data()
    setattr(data, f"{split}_dataloader", make)
    made = MemmapDataModule.from_datamodule(data, store_dir=tmp_path)
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}"):
        make_trainer(tmp_path).fit(Regression(), made)
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize("given", [None, 3, DataLoader(TRAIN)])
def test_what_is_no_data_module_is_rejected(tmp_path: Path, given: Any) -> None:
    if given is None:
        given = MemmapDataModule(TRAIN, store_dir=tmp_path)
    with pytest.raises(TypeError, match="datamodule="):
        MemmapDataModule.from_datamodule(given, store_dir=tmp_path)


def test_no_loader_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train=None"):
        MemmapDataModule.from_loaders(store_dir=tmp_path)


def test_hooks_are_called_once_per_stage_and_in_lightnings_order(tmp_path: Path) -> None:
    theirs, plain = Data(), Data()
    data = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path)
    for each in (data, plain):
        trainer = make_trainer(tmp_path)
        trainer.fit(Regression(), each)
        trainer.validate(Regression(), each, verbose=False)
        trainer.test(Regression(), each, verbose=False)
        trainer.predict(Regression(), each)
    assert theirs.calls == plain.calls


def test_stage_without_a_loader_raises(tmp_path: Path) -> None:
    class Untested(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TRAIN, 8)

    data = MemmapDataModule.from_datamodule(Untested(), store_dir=tmp_path)
    with pytest.raises(ValueError, match=r"stage='test'.*test_dataloader"):
        make_trainer(tmp_path).test(Regression(), data)


def test_store_of_a_split_that_has_no_loader_is_not_used(tmp_path: Path) -> None:
    class Unvalidated(Data):
        def val_dataloader(self) -> Any:
            return []

    make_trainer(tmp_path).fit(
        Regression(), MemmapDataModule.from_datamodule(Data(), store_dir=tmp_path)
    )
    assert (tmp_path / "val").exists()
    seen, _ = run(
        tmp_path, Regression(), MemmapDataModule.from_datamodule(Unvalidated(), store_dir=tmp_path)
    )
    assert "val" not in seen


class Hooked(Data):
    """Changes batches, and has a state."""

    num_batches = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_batches += 1
        return {**batch, "x": batch["x"] * 2}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return {**batch, "x": batch["x"] + 1}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": -batch["x"]}

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches = state["num_batches"]


class Inputs(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for row, x in zip(batch["row"], batch["x"], strict=True):
            assert torch.equal(x, -(TRAIN.x[row] * 2 + 1))
        return super().training_step(batch, batch_idx)


@CPUS
def test_transfer_hooks_and_state_are_those_of_the_data_module(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    theirs = Hooked()
    data = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path / "stores")
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "limit_val_batches": 0}
    trainer = make_trainer(tmp_path, max_epochs=1, **options)
    trainer.fit(Inputs(), data)
    count = theirs.num_batches
    assert count == trainer.global_step > 0
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Hooked()
    data = MemmapDataModule.from_datamodule(again, store_dir=tmp_path / "stores")
    trainer = make_trainer(tmp_path, max_epochs=2, **options)
    trainer.fit(Inputs(), data, ckpt_path=tmp_path / "last.ckpt", **weights_only(False))
    assert again.num_batches == 2 * count


def test_hook_of_a_subclass_and_of_the_data_module_raises(tmp_path: Path) -> None:
    class Own(MemmapDataModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    with pytest.raises(TypeError, match="on_after_batch_transfer"):
        Own.from_datamodule(Hooked(), store_dir=tmp_path)


def test_attributes_and_hyperparameters_are_those_of_the_data_module(tmp_path: Path) -> None:
    data = MemmapDataModule.from_datamodule(Data(4), store_dir=tmp_path)
    assert data.num_inputs == 8
    assert dict(data.hparams) == {"batch_size": 4}
    assert not hasattr(data, "num_outputs")


@pytest.mark.parametrize("num_sets", [1, 2])
def test_run_is_resumed_inside_an_epoch(tmp_path: Path, num_sets: int) -> None:
    def fit(*callbacks: Any, ckpt_path: Any = None) -> Any:
        if num_sets == 1:
            data = MemmapDataModule.from_datamodule(Data(), store_dir=tmp_path)
        else:
            train = [DataLoader(LONG, 8, shuffle=True), DataLoader(SHORT, 4, shuffle=True)]
            data = MemmapDataModule.from_loaders(train, store_dir=tmp_path)
        module = Regression() if num_sets == 1 else Both()
        trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[*callbacks])
        trainer.fit(module, data, ckpt_path=ckpt_path, **weights_only(False))
        return module

    checkpoint = tmp_path / "stopped.ckpt"
    whole, resumed = fit(SaveAt(3, checkpoint)), fit(ckpt_path=checkpoint)
    key = "train" if num_sets == 1 else "both"
    assert resumed.seen[key] == whole.seen[key][3:]
    assert torch.equal(weights(resumed), weights(whole))


def test_arguments_that_differ_from_their_defaults_take_the_place_of_the_loaders(
    tmp_path: Path,
) -> None:
    class Sampled(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, 8, sampler=Odd())

        def test_dataloader(self) -> Any:
            pytest.fail("an argument replaces this loader")

    options: dict[str, Any] = {"batch_size": 4, "sampler": Weighted(WEIGHTS), "num_shards": 4}
    made = MemmapDataModule.from_datamodule(
        Sampled(), store_dir=tmp_path / "made", test_dataset=TEST, **options
    )
    written = MemmapDataModule(
        TRAIN, VAL, TEST, store_dir=tmp_path / "by_hand", **options,
        eval_batch_size={"val": 16, "test": 4},
    )  # fmt: skip
    assert_same(tmp_path, made, written, Regression, tests=True)


def test_options_that_are_set_before_the_loaders_are_read_win(tmp_path: Path) -> None:
    data = MemmapDataModule.from_datamodule(Data(), store_dir=tmp_path)
    # A default, set, wins too.
    data.batch_size, data.shuffle, data.drop_last = 2, False, False
    data.subset, data.eval_batch_size = Subset([1, 2, 3, 4]), 7
    for other in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data)), data.with_options()):
        other.prepare_data()
        other.setup("fit")
        assert [batch["row"].tolist() for batch in other.train_dataloader()] == [[1, 2], [3, 4]]
        assert [len(batch["row"]) for batch in other.val_dataloader()] == [7, 7, 6]
        other.teardown()


def test_option_that_is_set_stays_until_the_loaders_say_something_else(tmp_path: Path) -> None:
    theirs = Data()
    data = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path)
    trainer = make_trainer(tmp_path)
    trainer.fit(Regression(), data)
    data.batch_size = 4
    trainer.fit(Regression(), data)
    assert data.batch_size == 4
    theirs.batch_size = 16
    trainer.validate(Regression(), data, verbose=False)
    trainer.fit(Regression(), data)
    assert data.batch_size == 16


@pytest.mark.parametrize("are_others", [False, True])
def test_loaders_that_are_reloaded_may_change_in_all_but_their_rows(
    tmp_path: Path, are_others: bool
) -> None:
    class Growing(Data):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            rows = Points(63) if are_others else self.rows
            return DataLoader(rows, 8 * (1 + self.trainer.current_epoch), shuffle=True)

    data = MemmapDataModule.from_datamodule(Growing(), store_dir=tmp_path)
    trainer = make_trainer(tmp_path, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    module = Regression()
    if are_others:
        with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    assert [max(map(len, module.seen["train"][:4])), len(module.seen["train"][-3])] == [8, 16]


def test_copies_read_the_loaders_again(tmp_path: Path) -> None:
    data = MemmapDataModule.from_datamodule(Hooked(), store_dir=tmp_path)
    make_trainer(tmp_path).fit(Inputs(), data)
    expected = run(tmp_path, Inputs(), data, tests=True)
    for other in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data), data.with_options()):
        assert other.num_inputs == 8
        found = run(tmp_path, Inputs(), other, tests=True)
        assert found[0] == expected[0]
    changed = data.with_options(drop_last=True, test_dataset=None, eval_batch_size=5)
    seen, _ = run(tmp_path, Inputs(), changed)
    assert {len(rows) for rows in seen["val"]} == {5}
    assert changed.test_dataset is None


def test_data_module_is_set_up_without_a_trainer(tmp_path: Path) -> None:
    class Alone(Data):
        def setup(self, stage: str) -> None:
            self.rows, self.val_rows, self.test_rows = TRAIN, VAL, TEST

    data = MemmapDataModule.from_datamodule(Alone(), store_dir=tmp_path)
    data.prepare_data()
    data.setup()
    rows = [row for batch in data.predict_dataloader() for row in batch["row"].tolist()]
    assert rows == TEST.row.tolist()
    assert len([*data.train_dataloader()]) == 63 // 8
    assert [len(batch["row"]) for batch in data.val_dataloader()] == [10, 10]


def test_data_module_made_from_datasets_is_converted(tmp_path: Path) -> None:
    theirs = L.LightningDataModule.from_datasets(TRAIN, [VAL, OTHER], batch_size=8)
    made = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path / "made")
    written = MemmapDataModule.from_datasets(
        TRAIN, [VAL, OTHER], batch_size=8, store_dir=tmp_path / "by_hand"
    )
    assert_same(tmp_path, made, written, Validated)


# LightningCLI uses names that jsonargparse has changed.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_config_names_the_data_module_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {**QUIET, "strategy": "memmap_superbatch", "devices": 2, "accelerator": "cpu"}
    given = {"class_path": f"{__name__}.Data", "init_args": {"batch_size": 4}}
    data = {
        "class_path": "lightning_memmap.MemmapDataModule",
        "init_args": {"datamodule": given, "store_dir": str(tmp_path / "stores")},
    }
    model = {"class_path": "tests.support.models.Regression"}
    monkeypatch.setattr("sys.argv", ["program"])
    cli = LightningCLI(
        args={"model": model, "data": data, "trainer": trainer},
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.datamodule.batch_size == 4
    assert {len(rows) for rows in cli.model.seen["train"]} == {8}


class Divided(L.LightningDataModule):
    """Divides its rows among processes itself, and notes the hooks that are called.

    Args:
        out: Holds a file once `prepare_data` was called.
        fails_on: The rank whose `setup` fails.
    """

    def __init__(self, out: Path, fails_on: int | None = None) -> None:
        super().__init__()
        self.out = out
        self.fails_on = fails_on
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")
        (self.out / "downloaded").touch()

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.calls.append(f"setup {TrainerFn(stage).value}")
        if self.trainer.global_rank == self.fails_on:
            raise OSError("no such dataset")
        assert (self.out / "downloaded").exists()
        self.train, self.val = Points(64), Points(32, 100)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, sampler=DistributedSampler(self.train))

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 8, sampler=DistributedSampler(self.val, shuffle=False))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "memmap_superbatch_ddp"])
@in_processes(2)
def test_converted_data_module_trains_as_one_written_by_hand(tmp_path: Path, strategy: str) -> None:
    theirs = Divided(tmp_path)
    made = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path / "made")
    datasets = Points(64), Points(32, 100)
    written = MemmapDataModule(*datasets, store_dir=tmp_path / "by_hand", batch_size=8)
    assert_same(tmp_path, made, written, Regression, strategy=strategy, devices=2)
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "max_epochs": 1}
    seen, found = run(tmp_path, Regression(), made, **options)
    assert theirs.calls == (["prepare_data"] * (dist.get_rank() == 0) + ["setup fit"]) * 2
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, (seen["train"], found))
    assert sorted(row for steps, _ in ranks for step in steps for row in step) == list(range(64))
    assert torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.slow
@in_processes(2)
def test_set_up_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    theirs = Divided(tmp_path, fails_on=1)
    data = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path / "made")
    trainer = make_trainer(tmp_path, strategy="ddp", devices=2)
    with pytest.raises(Exception, match="no such dataset"):
        trainer.fit(Regression(), data)
