"""The data module: its hooks with a Trainer and without one."""

import copy
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch.utils.data import Subset

from lightning_memmap import MemmapDataModule, build_store, host_memory, open_store
from lightning_memmap.errors import DatasetError, PlacementError, StoreNotFoundError
from lightning_memmap.loading import Padded
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.sampling import KFold
from lightning_memmap.sampling.schedule import default_block
from lightning_memmap.store.samples import NUM_PROBES
from tests.support.models import Points, Regression, make_trainer, set_up
from tests.support.rows import CPU, joined, take_steps

TRAIN, VAL, TEST, PREDICT = Points(60), Points(20, 100), Points(25, 200), Points(30, 300)


class Caching(Points):
    """Keeps the rows that were read, and counts."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.kept: dict[int, Any] = {}
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.kept.setdefault(index, super().__getitem__(index))


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {
        "train_dataset": TRAIN,
        "val_dataset": VAL,
        "test_dataset": TEST,
        "predict_dataset": PREDICT,
        "store_dir": path / "stores",
        "batch_size": 4,
    }
    return MemmapDataModule(**{**defaults, **options})


def rows(loader: Any) -> list[int]:
    batches = [batch.to(CPU) if isinstance(batch, SuperBatch) else batch for batch in loader]
    return [row for batch in batches for row in batch["row"].tolist()]


class TestWithoutTrainer:
    def test_setup_of_one_stage_opens_its_splits(self, tmp_path: Path) -> None:
        data = set_up(make_data(tmp_path), "test")
        assert rows(data.test_dataloader()) == list(range(200, 225))
        with pytest.raises(StoreNotFoundError, match=r"the train split is not set up"):
            data.train_dataloader()

    def test_drop_last_is_for_training_alone(self, tmp_path: Path) -> None:
        data = set_up(make_data(tmp_path, batch_size=16, drop_last=True))
        assert len(rows(data.train_dataloader())) == 48
        assert len(rows(data.test_dataloader())) == 25

    def test_transforms_are_for_training_and_for_the_rest(self, tmp_path: Path) -> None:
        def mark(value: int) -> Callable[[Any], Any]:
            return lambda batch: {"row": torch.full_like(batch["row"], value)}

        data = set_up(make_data(tmp_path, transform=mark(1), eval_transform=mark(2)))
        loaders = [
            data.train_dataloader(),
            data.val_dataloader(),
            data.test_dataloader(),
            data.predict_dataloader(),
        ]
        assert [set(rows(loader)) for loader in loaders] == [{1}, {2}, {2}, {2}]


class TestArguments:
    def test_window_without_shuffling_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="shuffle_block=2 with shuffle=False: "):
            make_data(tmp_path, shuffle_block=2, shuffle=False)

    @pytest.mark.parametrize("residency", ["host", "device", "stream"])
    def test_rows_that_do_not_fit_are_refused_in_setup(
        self, tmp_path: Path, residency: str
    ) -> None:
        data = make_data(tmp_path, residency=residency, memory_fraction=1e-9)
        with pytest.raises(PlacementError, match=f"residency='{residency}'.*memory_fraction"):
            set_up(data)


class TestLargerThanMemory:
    def test_stream_gives_the_rows_of_the_mapping_with_its_window(self, tmp_path: Path) -> None:
        cases: list[tuple[dict[str, Any], dict[str, int | None]]] = [
            ({}, {"stream": 2, "mmap": 2}),
            # Without shuffling, only a stream has windows.
            ({"shuffle": False}, {"stream": 1, "mmap": None}),
            # Without a number, the window of a small store is all of it.
            ({}, {"stream": None, "mmap": default_block(24, 56)}),
        ]
        for options, windows in cases:
            found = []
            for residency, window in windows.items():
                data = set_up(
                    make_data(tmp_path, residency=residency, shuffle_block=window, **options)
                )
                loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
                found.append([rows(loader) for loader in loaders])
                data.teardown()
            assert found[0] == found[1]
            assert sorted(found[0][0]) == list(range(60))
            assert found[0][1:] == [list(range(100, 120)), list(range(200, 225))]

    @pytest.mark.parametrize("residency", ["auto", "mmap"])
    def test_mapping_larger_than_memory_is_warned_of_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residency: str
    ) -> None:
        # A control group of this machine that leaves 2,000 bytes: less than 80 rows have.
        monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
        monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
        (tmp_path / "groups").mkdir()
        (tmp_path / "membership").write_text("0::/")
        for name, text in (("max", "3000"), ("current", "1000"), ("stat", "anon 1")):
            (tmp_path / "groups" / f"memory.{name}").write_text(text)
        data = make_data(tmp_path, residency=residency)
        with pytest.warns(UserWarning, match="residency=.*residency='stream'"):
            set_up(data, "fit")
        set_up(data, "test")
        set_up(make_data(tmp_path, residency="device", memory_fraction=1.0), "validate")

    def test_overfit_batches_reads_in_dataset_order(self, tmp_path: Path) -> None:
        module = Regression()
        data = make_data(tmp_path, residency="stream", shuffle_block=1)
        make_trainer(tmp_path, max_epochs=2, overfit_batches=2).fit(module, data)
        assert module.seen["train"] == [list(range(4)), list(range(4, 8))] * 2


class TestStores:
    def test_stores_without_datasets_are_used_as_they_are(self, tmp_path: Path) -> None:
        set_up(make_data(tmp_path))
        nothing = dict.fromkeys(("train_dataset", "val_dataset", "test_dataset", "predict_dataset"))
        data = set_up(make_data(tmp_path, **nothing))
        assert sorted(rows(data.train_dataloader())) == list(range(60))
        assert rows(data.predict_dataloader()) == list(range(300, 330))

    @pytest.mark.parametrize(
        ("run", "split"),
        [("fit", "train"), ("validate", "val"), ("test", "test"), ("predict", "predict")],
    )
    def test_no_dataset_and_no_store_raises_and_names_the_split(
        self, tmp_path: Path, run: str, split: str
    ) -> None:
        data = MemmapDataModule(store_dir=tmp_path / "stores")
        message = rf"{split}_dataset=None and no store at .*stores/{split}: .*dataset"
        with pytest.raises(StoreNotFoundError, match=message):
            getattr(make_trainer(tmp_path), run)(Regression(), datamodule=data)

    @pytest.mark.parametrize("other", [Points(61), Points(60, 5)], ids=["length", "content"])
    def test_other_dataset_is_refused(self, tmp_path: Path, other: Points) -> None:
        make_data(tmp_path).prepare_data()
        with pytest.raises(DatasetError, match=r"built from another dataset.*overwrite=True"):
            make_data(tmp_path, train_dataset=other).prepare_data()
        with pytest.raises(DatasetError, match=r"built from another dataset"):
            make_data(tmp_path, train_dataset=other).setup()

    def test_other_dataset_with_overwrite_replaces_the_store(self, tmp_path: Path) -> None:
        make_data(tmp_path).prepare_data()
        data = set_up(make_data(tmp_path, train_dataset=Points(40, 5), overwrite=True))
        assert sorted(rows(data.train_dataloader())) == list(range(5, 45))
        assert open_store(tmp_path / "stores" / "train").num_rows == 40

    @pytest.mark.parametrize(
        "again", [lambda data: data, copy.deepcopy, lambda d: d.with_options()]
    )
    def test_dataset_that_was_changed_since_is_compared_with_its_store(
        self, tmp_path: Path, again: Callable[[MemmapDataModule], MemmapDataModule]
    ) -> None:
        points = Points(60)
        data = set_up(make_data(tmp_path, train_dataset=points))
        points.row = points.row.clone()
        again(data).prepare_data()
        points.row += 5
        with pytest.raises(DatasetError, match=r"train: row 0 .*built from another dataset"):
            again(data).prepare_data()
        replaced = set_up(again(data.with_options(overwrite=True)))
        assert sorted(rows(replaced.train_dataloader())) == sorted(points.row.tolist())

    def test_store_that_was_replaced_since_is_compared_again(self, tmp_path: Path) -> None:
        data = set_up(make_data(tmp_path), "fit")
        build_store(Points(60, 5), tmp_path / "stores" / "train", overwrite=True, progress=False)
        with pytest.raises(DatasetError, match="row 0"):
            data.setup("fit")

    def test_dataset_that_keeps_what_it_reads_is_no_other_one(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def make() -> tuple[Caching, MemmapDataModule]:
            points = Caching(60)
            train, val = Subset(points, range(40)), Subset(points, range(40, 60))
            return points, make_data(tmp_path, train_dataset=train, val_dataset=val)

        points, data = make()
        set_up(data)
        points.reads = 0
        assert points[50]["row"] == 50
        # Not all rows are read, as of a dataset that may be another one; nor by other processes.
        for (read, again), stage in (
            ((points, data), "fit"),
            (make(), "fit"),
            (make(), "validate"),
        ):
            set_up(again, stage)
            assert read.reads <= 1 + 2 * NUM_PROBES
        assert caplog.text == ""

    def test_overwrite_builds_once_for_several_stages(self, tmp_path: Path) -> None:
        data = make_data(tmp_path, overwrite=True)
        manifest = tmp_path / "stores" / "val" / "manifest.json"
        trainer = make_trainer(tmp_path)
        trainer.fit(Regression(), datamodule=data)
        before = manifest.stat().st_ino
        trainer.validate(Regression(), datamodule=data, verbose=False)
        assert manifest.stat().st_ino == before

    def test_other_number_of_shards_is_that_of_the_order_and_the_store_stays(
        self, tmp_path: Path
    ) -> None:
        make_data(tmp_path / "one").prepare_data()
        apart = set_up(make_data(tmp_path / "one", num_shards=10), "fit")
        alone = set_up(make_data(tmp_path / "other", num_shards=10), "fit")
        assert rows(apart.train_dataloader()) == rows(alone.train_dataloader())
        assert open_store(tmp_path / "one" / "stores" / "train").num_shards == 24


class TestWithTrainer:
    @pytest.mark.parametrize(
        ("run", "built"),
        [
            ("fit", {"train", "val"}),
            ("validate", {"val"}),
            ("test", {"test"}),
            ("predict", {"predict"}),
        ],
    )
    def test_stage_builds_and_opens_its_own_splits(
        self, tmp_path: Path, run: str, built: set[str]
    ) -> None:
        data, module = make_data(tmp_path), Regression()
        getattr(make_trainer(tmp_path), run)(module, datamodule=data)
        found = {path.name for path in (tmp_path / "stores").iterdir() if path.is_dir()}
        assert found == built
        assert set(data.stores) == built

    @pytest.mark.parametrize("strategy", ["auto", "memmap_superbatch"])
    def test_stages_after_each_other_see_their_rows(self, tmp_path: Path, strategy: str) -> None:
        data, module = make_data(tmp_path), Regression()
        trainer = make_trainer(tmp_path, strategy=strategy, num_sanity_val_steps=0)
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, datamodule=data)
        seen = {stage: joined(batches) for stage, batches in module.seen.items()}
        assert sorted(seen["train"]) == sorted([*range(60)] * 2)
        assert seen["val"] == [*range(100, 120)] * 2
        assert seen["test"] == list(range(200, 225))

    def test_fit_with_stored_validation_data_validates(self, tmp_path: Path) -> None:
        build_store(VAL, tmp_path / "stores" / "val", progress=False)
        data, module = make_data(tmp_path, val_dataset=None), Regression()
        make_trainer(tmp_path, num_sanity_val_steps=0).fit(module, datamodule=data)
        assert module.seen["val"] == [list(range(n, n + 4)) for n in range(100, 120, 4)]

    def test_placement_is_printed_where_it_is_new(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def printed() -> int:
            return capsys.readouterr().out.count("Placement of shards")

        # Of sizes that no other test in this process has.
        data, module = make_data(tmp_path, train_dataset=Points(59)), Regression()
        trainer = make_trainer(
            tmp_path, strategy="memmap_superbatch", devices=2, enable_progress_bar=True
        )
        trainer.fit(module, datamodule=data)
        assert printed() == 1
        # The validation split lies where it lay.
        trainer.validate(module, datamodule=data, verbose=False)
        assert printed() == 0
        trainer.test(module, datamodule=data, verbose=False)
        assert printed() == 1
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, datamodule=data)
        assert printed() == 0
        other = make_trainer(
            tmp_path, strategy="memmap_superbatch", devices=3, enable_progress_bar=True
        )
        other.test(module, datamodule=data, verbose=False)
        assert printed() == 1
        for fold in range(5):
            folds = KFold(5, seed=fold)
            set_up(
                make_data(tmp_path / "folds", val_dataset=None, subset=folds, member=fold), "fit"
            )
            assert printed() == (fold == 0)


class Wide(torch.utils.data.Dataset[Any]):
    """A few rows of one MiB each."""

    #: What else a process takes and gives back meanwhile, such as for imports, is far less.
    num_bytes = 128 * 2**20

    def __init__(self) -> None:
        self.pad = torch.zeros(2**20, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.num_bytes // len(self.pad)

    def __getitem__(self, index: int) -> Any:
        return {"row": index, "x": torch.full((8,), 0.5), "y": torch.ones(1), "pad": self.pad}


def bytes_of_orders() -> int:
    """Bytes that code of the orders has allocated since tracing began."""
    only = tracemalloc.Filter(True, "*/lightning_memmap/sampling/*")
    found = tracemalloc.take_snapshot().filter_traces([only]).statistics("filename")
    return sum(each.size for each in found)


def used_bytes() -> int:
    """Memory of this process without the pages of mapped files."""
    gc.collect()
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


class Watch(L.Callback):
    """Notes how much memory the process uses while it trains."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bytes = used_bytes()


class TestTeardown:
    def test_teardown_by_the_trainer_frees_resident_shards(self, tmp_path: Path) -> None:
        data = make_data(tmp_path, train_dataset=Wide(), val_dataset=None, residency="device")
        watch = Watch()
        trainer = make_trainer(tmp_path, callbacks=[watch], limit_train_batches=1)
        trainer.fit(Regression(), datamodule=data)
        # Also while the Trainer is still there, with the loaders that it has used.
        assert watch.bytes - used_bytes() > 0.9 * Wide.num_bytes
        assert trainer.global_step == 1

    def test_teardown_and_setup_without_trainer_free_resident_shards(self, tmp_path: Path) -> None:
        data = set_up(make_data(tmp_path, train_dataset=Wide(), residency="device"), "fit")
        loader, before = data.train_dataloader(), used_bytes()
        for _ in range(3):
            data.setup("fit")
            loaders = [loader, data.train_dataloader()]
        assert used_bytes() - before < 0.1 * Wide.num_bytes
        (batch,) = take_steps(loaders[-1], 1)
        assert len(batch["row"]) == 4
        del batch
        data.teardown()
        assert before - used_bytes() > 0.9 * Wide.num_bytes
        for each in loaders:
            with pytest.raises(RuntimeError, match=r"teardown\(\).*setup\(\)"):
                next(iter(each))
        with pytest.raises(StoreNotFoundError, match=r"not set up"):
            data.train_dataloader()


def test_setup_of_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stage='training': choose one of fit, validate"):
        make_data(tmp_path).setup("training")


class TestAttributes:
    """Options and datasets that are set after the data module was made."""

    def test_options_that_a_store_depends_on_take_effect_or_are_refused(
        self, tmp_path: Path
    ) -> None:
        data = set_up(make_data(tmp_path), "fit")
        data.num_shards = 12
        # The store stays, and its rows are striped again.
        set_up(data, "fit")
        assert data.train_dataloader().state_dict()["sampler"]["shards"]["num_shards"] == 12
        assert open_store(tmp_path / "stores" / "train").num_shards == 24
        data.fingerprint = "v2"
        data.prepare_data()
        assert open_store(tmp_path / "stores" / "train").manifest.identity.by_user == "v2"

    def test_teardown_frees_what_all_orders_have_computed(self, tmp_path: Path) -> None:
        data = make_data(tmp_path, train_dataset=Points(4000))
        data = set_up(data, "fit")
        data.seed = 9
        tracemalloc.start()
        try:
            loader = data.train_dataloader()
            assert sorted(rows(loader)) == list(range(4000))
            computed = bytes_of_orders()
            data.teardown()
            assert bytes_of_orders() < computed / 4
        finally:
            tracemalloc.stop()

    def test_order_that_is_set_after_setup_is_that_of_the_next_loader(self, tmp_path: Path) -> None:
        changes: list[tuple[dict[str, Any], str, Any]] = [
            ({}, "shuffle_block", 1),
            ({"shuffle_block": 2}, "shuffle_block", 1),
            ({"shuffle_block": 2}, "shuffle_block", None),
            ({}, "seed", 9),
            ({}, "shuffle", False),
        ]
        for before, name, value in changes:
            data = set_up(make_data(tmp_path, **before), "fit")
            was = rows(data.train_dataloader())
            setattr(data, name, value)
            fresh = set_up(make_data(tmp_path, **{**before, name: value}), "fit")
            found = rows(data.train_dataloader())
            assert found == rows(fresh.train_dataloader()) != was
            # Where rows live takes effect at the next set-up alone, in their order too.
            data.residency = "stream"
            assert rows(data.train_dataloader()) == found

    def test_window_of_a_stream_that_is_set_after_setup_is_refused(self, tmp_path: Path) -> None:
        data = set_up(make_data(tmp_path, residency="stream", shuffle_block=2), "fit")
        for value in (1, None):
            data.shuffle_block = value
            with pytest.raises(ValueError, match=rf"block={value}: .* call setup\(\) after you"):
                data.train_dataloader()
        set_up(data, "fit")
        assert sorted(rows(data.train_dataloader())) == list(range(60))
        data.teardown()

    def test_layout_that_is_set_after_setup_waits_for_the_next_one(self, tmp_path: Path) -> None:
        texts = [{"tokens": list(range(1 + row % 3))} for row in range(24)]
        data = set_up(MemmapDataModule(texts, store_dir=tmp_path / "stores", batch_size=4), "fit")
        data.layout = {"tokens": "list"}
        assert isinstance(next(iter(data.train_dataloader()))["tokens"], Padded)
        set_up(data, "fit")
        assert isinstance(next(iter(data.train_dataloader()))["tokens"], list)

    def test_dataset_that_is_set_is_the_one_that_is_stored(self, tmp_path: Path) -> None:
        data = make_data(tmp_path)
        data.train_dataset = Points(13)
        assert data.train_dataset is data.datasets["train"]
        set_up(data, "fit")
        assert data.stores["train"].num_rows == 13

    def test_store_dir_that_is_set_as_text_is_a_path(self, tmp_path: Path) -> None:
        data = make_data(tmp_path)
        data.store_dir = str(tmp_path / "elsewhere")  # type: ignore[assignment]
        assert set_up(data, "fit").stores["train"].path == tmp_path / "elsewhere" / "train"

    def test_unknown_option_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"batchsize: .*batch_size"):
            make_data(tmp_path).with_options(batchsize=3)

    def test_class_attribute_that_hides_an_option_is_refused(self) -> None:
        with pytest.raises(TypeError, match="class Sub has an attribute 'batch_size'"):

            class Sub(MemmapDataModule):
                batch_size = 7

    def test_property_in_place_of_an_option_is_what_counts(self, tmp_path: Path) -> None:
        class Sub(MemmapDataModule):
            @property
            def store_dir(self) -> Path:  # type: ignore[override]
                return tmp_path / "elsewhere"

        data = set_up(Sub(Points(48), store_dir=tmp_path / "unused"), "fit")
        assert data.stores["train"].path == tmp_path / "elsewhere" / "train"
        assert not (tmp_path / "unused").exists()

    def test_option_before_the_constructor_is_refused(self, tmp_path: Path) -> None:
        class Early(MemmapDataModule):
            def __init__(self) -> None:
                self.seed = 3
                super().__init__(store_dir=tmp_path)

        with pytest.raises(AttributeError, match=r"seed: call super\(\).__init__\(\) before"):
            Early()
