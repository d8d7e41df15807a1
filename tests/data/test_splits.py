"""Several datasets to validate, test and predict on; and rows of one store for several splits."""

import datetime
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule, build_store, open_store
from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import (
    Holdout,
    KFold,
    RandomSplit,
    Selection,
    Subset,
    Weighted,
)
from lightning_memmap.store.joined import JoinedStore
from tests.support.datasets import Made
from tests.support.models import Points, Regression, make_trainer, set_up
from tests.support.preloaded import run
from tests.support.rows import joined, rows_in

CLEAN, NOISY = Points(20, 100), Points(13, 200)


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {"train_dataset": Points(24), "batch_size": 4}
    return MemmapDataModule(store_dir=path / "stores", **{**defaults, **options})


class Several(Regression):
    """Notes the rows of each loader and logs its loss under the name of its dataset."""

    def note(self, stage: str, batch: dict[str, Tensor], index: int) -> None:
        loaders: Any = getattr(self.trainer, f"{stage}_dataloaders")
        name = list(loaders)[index] if isinstance(loaders, dict) else str(index)
        self.seen.setdefault(f"{stage}/{name}", []).append(batch["row"].tolist())
        loss = self.loss(self(batch["x"]), batch)
        self.log(
            f"{stage}_loss/{name}",
            loss,
            batch_size=len(batch["row"]),
            sync_dist=True,
            add_dataloader_idx=False,
        )

    def validation_step(  # type: ignore[override]
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note("val", batch, dataloader_idx)

    def test_step(  # type: ignore[override]
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note("test", batch, dataloader_idx)


class WithDataLoaders(L.LightningDataModule):
    """The same datasets through torch's loaders."""

    def val_dataloader(self) -> Any:
        return {"noisy": DataLoader(NOISY, 4), "clean": DataLoader(CLEAN, 4)}

    def test_dataloader(self) -> Any:
        return [DataLoader(NOISY, 4), DataLoader(CLEAN, 4)]


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("memmap_superbatch", 2)])
@pytest.mark.parametrize("residency", ["auto", "stream"])
def test_loaders_are_those_of_torch(
    tmp_path: Path, strategy: str, devices: int, residency: str
) -> None:
    expected = Several()
    trainer = make_trainer(tmp_path)
    metrics = [*trainer.validate(expected, WithDataLoaders(), verbose=False)]
    metrics += trainer.test(expected, WithDataLoaders(), verbose=False)
    data = make_data(
        tmp_path,
        val_dataset={"noisy": NOISY, "clean": CLEAN},
        test_dataset=[NOISY, CLEAN],
        batch_size=4 // devices,
        residency=residency,
    )
    module = Several()
    trainer = make_trainer(tmp_path, strategy=strategy, devices=devices)
    found = [*trainer.validate(module, data, verbose=False)]
    found += trainer.test(module, data, verbose=False)
    assert {name: joined(steps) for name, steps in module.seen.items()} == {
        name: joined(steps) for name, steps in expected.seen.items()
    }
    for one, other in zip(found, metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    stores = tmp_path / "stores"
    assert open_store(stores / "val" / "noisy").num_rows == 13
    assert open_store(stores / "test" / "1").num_rows == 20


def test_stores_are_used_without_datasets_when_they_are_named(tmp_path: Path) -> None:
    make_data(tmp_path, val_dataset={"clean": CLEAN, "noisy": NOISY}).prepare_data()
    data = set_up(make_data(tmp_path, val_dataset={"noisy": None, "clean": None}))
    found = data.val_dataloader()
    assert isinstance(found, dict)
    assert [(name, rows_in(loader)) for name, loader in found.items()] == [
        ("noisy", NOISY.row.tolist()),
        ("clean", CLEAN.row.tolist()),
    ]
    with pytest.raises(ValueError, match=r"val_dataset=\{'clean': None, 'noisy': None\}"):
        set_up(make_data(tmp_path))
    with pytest.raises(StoreNotFoundError, match=r"val_dataset\['loud'\]=None and no store at"):
        set_up(make_data(tmp_path, val_dataset={"loud": None}))
    with pytest.raises(StoreNotFoundError, match=r"test_dataset\[0\]=None and no store at"):
        set_up(make_data(tmp_path, test_dataset=[None]), "test")


def test_lists_of_samples_by_name_are_several_datasets(tmp_path: Path) -> None:
    named = {name: [{"row": index} for index in range(size)] for name, size in (("a", 5), ("b", 3))}
    loaders: Any = set_up(make_data(tmp_path, val_dataset=named)).val_dataloader()
    assert {name: rows_in(loader) for name, loader in loaders.items()} == {
        "a": list(range(5)),
        "b": list(range(3)),
    }
    # A list of them is one dataset.
    data = set_up(make_data(tmp_path / "one", val_dataset=named["a"]))
    assert rows_in(data.val_dataloader()) == list(range(5))
    columns: Any = {"x": [1, 2, 3], "y": [4, 5, 6]}
    with pytest.raises((TypeError, ValueError), match="ColumnDataset"):
        set_up(make_data(tmp_path / "columns", val_dataset=columns))


def test_fingerprints_are_by_name(tmp_path: Path) -> None:
    data = make_data(
        tmp_path, val_dataset={"clean": CLEAN, "noisy": NOISY}, fingerprint={"val/clean": "v1"}
    )
    data.prepare_data()
    stores = tmp_path / "stores" / "val"
    identities = [open_store(stores / name).manifest.identity for name in ("clean", "noisy")]
    assert [each and each.by_user for each in identities] == ["v1", None]
    with pytest.raises(ValueError, match=r"fingerprint\['val/claen'\]: .*val/clean"):
        make_data(
            tmp_path, val_dataset={"clean": CLEAN}, fingerprint={"val/claen": "v1"}
        ).prepare_data()


@pytest.mark.parametrize("argument", ["fingerprint", "subset"])
def test_option_of_a_split_without_rows_is_refused(tmp_path: Path, argument: str) -> None:
    options: Any = {argument: {"val": "v1" if argument == "fingerprint" else Subset([1])}}
    with pytest.raises(ValueError, match=rf"{argument}\['val'\]: .*val_dataset"):
        set_up(make_data(tmp_path, val_dataset=None, **options))
    if argument == "fingerprint":
        with pytest.raises(ValueError, match=r"fingerprint\['val'\]: .*fingerprint\['train'\]"):
            set_up(make_data(tmp_path, subset=KFold(3), member=0, **options))
    set_up(make_data(tmp_path, val_dataset=CLEAN, **options))
    # The store is enough.
    set_up(make_data(tmp_path, val_dataset=None, **options))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a/b": CLEAN}, r"val_dataset\['a/b'\]: .*name"),
        ({"..": CLEAN}, r"val_dataset\['\.\.'\]"),
        ({1: CLEAN}, r"val_dataset\[1\]|"),
        ([CLEAN, 5], r"val_dataset\[1\]=5: .*map-style"),
        (5, "val_dataset=5: .*map-style"),
        ({"é": CLEAN}, "use ASCII letters"),
        ({"a": CLEAN, "A": NOISY}, r"val_dataset\['A'\] and \['a'\]: "),
        ({1: CLEAN, "1": NOISY}, r"val_dataset\['1'\] and \[1\]"),
        ([[CLEAN, NOISY]], r"val_dataset=\[\[.*in one list"),
        ({"a": [CLEAN]}, r"val_dataset=\{'a': .*in one list"),
        ([], r"val_dataset=\[\]: .*empty"),
        ({}, r"val_dataset=\{\}: .*empty"),
    ],
)
def test_datasets_that_cannot_be_are_refused(tmp_path: Path, given: Any, words: str) -> None:
    if given == {1: CLEAN}:
        # A number is a name as good as any.
        assert list(set_up(make_data(tmp_path, val_dataset=given), "fit").stores)[1] == "val/1"
        return
    with pytest.raises((TypeError, ValueError), match=words):
        make_data(tmp_path, val_dataset=given)


def test_stores_do_not_go_into_the_store_of_one(tmp_path: Path) -> None:
    build_store(CLEAN, tmp_path / "stores" / "val", progress=False)
    with pytest.raises(StoreError, match=r"store_dir: .*val is the store of .*val_dataset"):
        make_data(tmp_path, val_dataset=[CLEAN, NOISY]).prepare_data()
    build_store(CLEAN, tmp_path / "stores" / "test" / "0", progress=False)
    with pytest.raises(StoreError, match=r"has stores in it \(0\): choose") as caught:
        make_data(tmp_path, test_dataset=CLEAN).prepare_data()
    assert "remove" not in str(caught.value)


@pytest.mark.slow
def test_config_names_several_and_samplers(tmp_path: Path) -> None:
    points = {
        "class_path": "tests.support.models.Points",
        "init_args": {"num_rows": 7, "offset": 100},
    }
    config = {
        "seed_everything": 0,
        "model": {"class_path": "tests.data.test_splits.Several"},
        "data": {
            "class_path": "lightning_memmap.MemmapDataModule",
            "init_args": {
                "train_dataset": points,
                "val_dataset": [points, points],
                "test_dataset": {"clean": points, "noisy": points},
                "store_dir": "stores",
                "batch_size": 5,
                "subset": {
                    "class_path": "lightning_memmap.sampling.Subset",
                    "init_args": {"rows": [0, 2]},
                },
                "sampler": {
                    "class_path": "lightning_memmap.sampling.Weighted",
                    "init_args": {"weights": "row", "num_samples": 30},
                },
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "max_epochs": 1,
        },
    }
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    for command, lines in (
        ("fit", ["6/6", "val_loss/1"]),
        ("test", ["test_loss/clean", "test_loss/noisy"]),
    ):
        program = ["-m", "lightning_memmap", command, "--config", "given.yaml"]
        program += ["--trainer.default_root_dir", f"runs/{command}"]
        if command == "fit":
            program += ["--trainer.callbacks", "tests.data.test_splits.Lengths"]
        done = run(*program, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(line in done.stdout for line in lines), done.stdout
    for name in ("train", "val/0", "val/1", "test/clean", "test/noisy"):
        assert open_store(tmp_path / "stores" / name).num_rows == 7


class Lengths(L.Callback):
    """Prints the steps of an epoch, and the metrics."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        print(f"{trainer.global_step}/{trainer.num_training_batches}", *trainer.callback_metrics)


# Index views of one store


class Labelled(Made):
    """Rows with a label, of which one value is rare."""

    def sample(self, row: int) -> dict[str, Any]:
        return {"row": row, "label": int(row % 10 == 0), "pad": torch.zeros(100)}


def labelled(path: Path, **options: Any) -> MemmapDataModule:
    return set_up(make_data(path, train_dataset=Labelled(90), **options))


@pytest.mark.parametrize("residency", ["auto", "device", "stream"])
def test_random_split_trains_and_validates_on_one_store(tmp_path: Path, residency: str) -> None:
    data = labelled(
        tmp_path, subset=RandomSplit(0.2, stratify="label"), residency=residency, num_shards=6
    )
    trained, validated = rows_in(data.train_dataloader()), rows_in(data.val_dataloader())
    assert sorted(trained + validated) == list(range(90))
    assert trained != sorted(trained)
    assert validated == sorted(validated)
    assert sum(row % 10 == 0 for row in validated) in (1, 2)
    assert [each.name for each in (tmp_path / "stores").iterdir() if each.is_dir()] == ["train"]
    assert data.placement is not None
    held = {held.split: (held.num_rows, held.num_bytes) for held in data.placement.held_shards()}
    row_bytes = data.stores["train"].manifest.row_bytes
    assert held == {"train": (72, 72 * row_bytes), "val": (18, 18 * row_bytes)}
    data.teardown()


def test_subsets_are_by_split(tmp_path: Path) -> None:
    data = labelled(
        tmp_path,
        val_dataset={"a": Labelled(30), "b": Labelled(40)},
        subset={
            "train": Subset(np.arange(90) < 50),
            "val/b": Subset([5, 3, 39]),
        },
    )
    assert sorted(rows_in(data.train_dataloader())) == list(range(50))
    loaders = data.val_dataloader()
    assert isinstance(loaders, dict)
    assert rows_in(loaders["a"]) == list(range(30))
    # In the order in which they are given, as torch's Subset has them.
    assert rows_in(loaders["b"]) == [5, 3, 39]


def test_checkpoint_of_another_subset_is_refused(tmp_path: Path) -> None:
    options = {"train_dataset": Points(90), "subset": RandomSplit(0.5, seed=1)}
    trainer = make_trainer(tmp_path)
    trainer.fit(Regression(), make_data(tmp_path, **options))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    for subset in (RandomSplit(0.5, seed=2), None):
        data = make_data(tmp_path, **{**options, "subset": subset}, val_dataset=None)
        with pytest.raises(ValueError, match="was trained on 45 rows of digest"):
            make_trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(
                Regression(), data, ckpt_path=tmp_path / "one.ckpt"
            )
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(Regression(), make_data(tmp_path, **options), ckpt_path=tmp_path / "one.ckpt")
    assert trainer.current_epoch == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": [1, 2]}, r"subset=\[1, 2\]: .*Subset"),
        ({"subset": {"train": [1]}}, r"subset\['train'\]=\[1\]: .*Subset"),
        ({"subset": {"trian": Subset([1])}}, r"subset\['trian'\]: .*train"),
        ({"subset": KFold(2), "val_dataset": CLEAN}, r"subset=KFold\(.*\) with a val_dataset"),
    ],
)
def test_subset_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make_data(tmp_path, **options)


#: Every third row has no age, and rows 5 and 15 have the age 0 that is stored for None.
AGED: Any = [
    {"age": None if row % 3 == 0 else row % 5, "row": row, "who": {"age": row} if row % 4 else None}
    for row in range(24)
]
#: Rows of three patients, each with a date, and a text that is missing in every fourth row.
DATED: Any = [
    {
        "row": row,
        "patient": f"p{row % 3}" + "\u00e9" * (row % 3),
        "day": datetime.date(2024, 1, 1) + datetime.timedelta(days=row),
        "note": None if row % 4 == 0 else "ab"[row % 2],
        "words": ["a"] * (row % 3),
    }
    for row in range(24)
]


@pytest.mark.parametrize(
    ("rows", "option", "words"),
    [
        (DATED, {"sampler": Weighted("words")}, r"field 'words': .*list of text"),
        (DATED, {"subset": RandomSplit(0.5, stratify="note")}, "stratify='note': 6 of 24"),
        (
            AGED,
            {"subset": RandomSplit(0.5, stratify="age")},
            "stratify='age': 8 of 24",
        ),
        (AGED, {"subset": RandomSplit(0.5, group="age")}, "group='age': 8 of 24"),
        (
            AGED,
            {"sampler": Weighted("age")},
            r"field 'age': it is None in 8 of 24 rows.*'age\.mask'",
        ),
    ],
)
def test_lists_or_none_as_a_class_are_refused(
    tmp_path: Path, rows: Any, option: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        set_up(make_data(tmp_path, train_dataset=rows, **option), "fit")


@pytest.mark.parametrize("is_joined", [False, True])
def test_texts_and_times_divide_rows_as_numbers_do(tmp_path: Path, is_joined: bool) -> None:
    names = [row["patient"] for row in DATED]
    store = build_store(DATED, tmp_path / "dated", num_shards=5, progress=False)
    if is_joined:
        store = JoinedStore(tmp_path, {"one": store, "two": store})
        names *= 2

    def chosen(selection: Selection) -> list[int]:
        split = "val" if "val" in selection.splits else "train"
        return selection.subset(split, 0, store).tolist()

    assert store.values("patient").tolist() == names
    assert store.values("patient", np.array([2, 0])).tolist() == [names[2], names[0]]
    for seed in range(3):
        held = chosen(RandomSplit(0.3, group="patient", seed=seed))
        assert len({names[row] for row in held}) == 1
        assert len(held) == len(names) // 3
        held = chosen(RandomSplit(0.5, stratify="patient", seed=seed))
        assert {name: sum(names[row] == name for row in held) for name in {*names}} == (
            dict.fromkeys(names, len(names) // 6)
        )
    every, number = range(len(names)), np.arange(len(names)) % 24
    assert chosen(Subset(field="note", values=["a", None])) == [r for r in every if r % 2 == 0]
    assert chosen(Subset(field="note", where=lambda note: note == "b")) == [*every][1::2]
    late = Holdout(field="day", where=lambda day: day >= np.datetime64("2024-01-20"))
    assert chosen(late) == np.flatnonzero(number >= 19).tolist()
    for day in ("2024-01-03", datetime.date(2024, 1, 3), np.datetime64("2024-01-03")):
        found = chosen(Subset(field="day", values=[day]))
        assert found == np.flatnonzero(number == 2).tolist()


def test_values_that_no_row_has_are_said(tmp_path: Path) -> None:
    store = build_store(DATED, tmp_path / "dated", progress=False)
    noon = datetime.datetime(2024, 1, 3, 12)
    for field, values in (("patient", ["p9"]), ("day", [noon]), ("day", ["2024-03-01"])):
        with pytest.raises(ValueError, match=f"field '{field}' .*values="):
            Subset(field=field, values=values).subset("train", 0, store)
    with pytest.raises(ValueError, match=r"field 'day', values=\['yesterday'\]: "):
        Subset(field="day", values=["yesterday"]).subset("train", 0, store)
    with pytest.raises(ValueError, match=r"field 'patien'.*did you mean 'patient'"):
        store.values("patien")


def test_values_of_a_field_are_in_dataset_order(tmp_path: Path) -> None:
    store = build_store(Labelled(90), tmp_path / "labelled", num_shards=7, progress=False)
    assert store.values("row").tolist() == list(range(90))
    assert store.values("label").sum() == 9
    with pytest.raises(ValueError, match=r"field 'lable': the store at .* has"):
        store.values("lable")
    with pytest.raises(ValueError, match=r"field 'pad': its rows are float32 \(100,\)"):
        store.values("pad")


WITHOUT_AGE = list(range(0, 24, 3))


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (Subset(field="age", values=[0]), [5, 10, 20]),
        (Subset(field="age", values=np.array([0, 1])), [1, 5, 10, 11, 16, 20]),
        (Subset(field="age", values=[None]), WITHOUT_AGE),
        (Subset(field="age", values=[None, 0]), sorted([*WITHOUT_AGE, 5, 10, 20])),
        (Subset(field="age", where=lambda age: age < 1), [5, 10, 20]),
        (Subset(field="age", where=lambda age: age < age.mean() / 2), [5, 10, 20]),
        (Subset(field="age.mask", values=[False]), WITHOUT_AGE),
        (Subset(field="who.age", values=[0, 1]), [1]),
        (Subset(field="who.age", values=[None]), list(range(0, 24, 4))),
    ],
)
def test_none_is_not_chosen_as_zero(tmp_path: Path, subset: Subset, expected: list[int]) -> None:
    store = build_store(AGED, tmp_path / "aged", num_shards=5, progress=False)
    rows = subset.subset("train", 0, store)
    assert rows.tolist() == expected


def test_rows_without_none_are_weighted(tmp_path: Path) -> None:
    rest = Subset(field="age.mask", values=[True])
    data = set_up(
        make_data(tmp_path, train_dataset=AGED, subset=rest, sampler=Weighted("age")), "fit"
    )
    rows = [row for batch in data.train_dataloader() for row in batch["row"].tolist()]
    assert rows
    assert not {*rows} & {*WITHOUT_AGE}


def test_order_of_a_data_module_needs_no_set_up(tmp_path: Path) -> None:
    data = labelled(tmp_path, subset=RandomSplit(30))
    order = make_data(tmp_path, subset=RandomSplit(30)).make_train_order(
        data.stores["train"], DataTopology((torch.device("cpu"),) * 2)
    )
    assert order == data.order
