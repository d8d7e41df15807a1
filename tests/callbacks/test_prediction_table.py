"""The table that `PredictionTable` writes, row by row, and what it refuses."""

import ast
import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_memmap import MemmapDataModule, Store, open_store, verify_store
from lightning_memmap.callbacks import PredictionTable
from lightning_memmap.errors import SchemaError, StoreError, StoreNotFoundError
from lightning_memmap.loading import RowList
from lightning_memmap.sampling import Subset as ChosenRows
from tests.support.datasets import in_dataset_order
from tests.support.models import Points, Regression, make_trainer
from tests.support.store.layout import is_empty

NUM_ROWS = 61
POINTS = Points(NUM_ROWS)
#: Lightning looks for the rows of a batch where only its own samplers have them.
no_rows_known = pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")


class Predictor(Regression):
    """Returns what a function makes of a batch and its number."""

    def __init__(self, predict: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.predict = predict

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.predict(batch, batch_idx)


class OfSeveral(Regression):
    """Predicts on several sets of rows."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch, batch_idx)


def predict(
    path: Path,
    module: L.LightningModule | None = None,
    loader: Any = None,
    *,
    overwrite: bool = False,
    variable: Any = None,
    num_shards: int = 24,
    **options: Any,
) -> Store:
    """Predict the points, or what a loader gives, and open the table."""
    callback = PredictionTable(path / "table", overwrite=overwrite, variable=variable)
    trainer = make_trainer(path, callbacks=[callback], **options)
    data: Any = {"dataloaders": loader}
    if loader is None:
        data = {
            "datamodule": MemmapDataModule(
                predict_dataset=POINTS,
                store_dir=path / "stores",
                batch_size=6,
                num_shards=num_shards,
            )
        }
    trainer.predict(module or Regression(), **data, return_predictions=False)
    return open_store(path / "table")


def assert_holds(store: Store, points: Points = POINTS) -> None:
    """Row ``i`` is what `Regression` makes of row ``i``."""
    found = in_dataset_order(store)
    assert found["row"].tolist() == points.row.tolist()
    with torch.no_grad():
        torch.testing.assert_close(found["y"], Regression().net(points.x))
    assert verify_store(store.path) == []


def nothing_at(path: Path) -> bool:
    return is_empty(path / "table")


class TestRows:
    @pytest.mark.parametrize(("devices", "num_shards"), [(1, 24), (3, 24), (2, 7), (4, 1)])
    @pytest.mark.filterwarnings("ignore:the predict rows are in")
    def test_table_under_superbatch_has_the_prediction_of_each_row(
        self, tmp_path: Path, devices: int, num_shards: int
    ) -> None:
        store = predict(
            tmp_path, strategy="memmap_superbatch", devices=devices, num_shards=num_shards
        )
        assert_holds(store)
        if num_shards % devices == 0:
            assert store.num_shards == num_shards

    @pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
    @pytest.mark.parametrize(
        ("shuffle", "strategy", "num_workers"),
        [(False, "auto", 2), (True, "auto", 0), (True, "memmap_superbatch", 2)],
    )
    def test_table_of_a_stock_loader_has_the_prediction_of_each_row(
        self, tmp_path: Path, shuffle: bool, strategy: str, num_workers: int
    ) -> None:
        loader = DataLoader(POINTS, batch_size=7, shuffle=shuffle, num_workers=num_workers)
        assert_holds(predict(tmp_path, loader=loader, strategy=strategy))

    @pytest.mark.parametrize("devices", [1, 2])
    def test_writers_are_told_dataset_rows_and_a_table_counts_the_rows_of_a_part(
        self, tmp_path: Path, devices: int
    ) -> None:
        told: list[tuple[list[int], list[int]]] = []

        class Notes(BasePredictionWriter):
            def write_on_batch_end(self, *arguments: Any) -> None:
                _, _, prediction, batch_indices, *_ = arguments
                told.append((prediction["row"].tolist(), list(batch_indices)))

        data = MemmapDataModule(
            predict_dataset=POINTS,
            store_dir=tmp_path / "stores",
            batch_size=7,
            subset={"predict": ChosenRows(range(10, 30))},
        )
        trainer = make_trainer(
            tmp_path,
            callbacks=[Notes("batch"), PredictionTable(tmp_path / "table")],
            strategy="memmap_superbatch",
            devices=devices,
        )
        trainer.predict(Regression(), datamodule=data, return_predictions=False)
        assert told
        assert all(rows == indices for rows, indices in told)
        assert_holds(open_store(tmp_path / "table"), Points(20, 10))

    def test_table_of_a_zipped_loader_has_the_prediction_of_each_row(self, tmp_path: Path) -> None:
        data = MemmapDataModule(test_dataset=POINTS, store_dir=tmp_path / "stores", num_shards=5)
        data.prepare_data()
        data.setup()
        store = predict(tmp_path, loader=data.test_dataloader(), strategy="memmap_superbatch")
        assert_holds(store)
        assert store.num_shards == 5

    @pytest.mark.parametrize("names", [[0, 1], ["short", "long"]], ids=["list", "dict"])
    def test_each_of_several_loaders_has_a_table(self, tmp_path: Path, names: list[Any]) -> None:
        sets = dict(zip(names, (Points(5), POINTS), strict=True))
        trainer = make_trainer(tmp_path, callbacks=[PredictionTable(tmp_path / "tables")])
        data = MemmapDataModule(
            predict_dataset=list(sets.values()) if names == [0, 1] else sets,
            store_dir=tmp_path / "stores",
            batch_size=6,
        )
        trainer.predict(OfSeveral(), datamodule=data, return_predictions=False)
        for name, points in sets.items():
            assert_holds(open_store(tmp_path / "tables" / str(name)), points)


DTYPES = (torch.float32, torch.float64)


def masks(rows: Tensor) -> RowList:
    return RowList(torch.full((row % 3, 1 + row % 4, 2), row) for row in rows.tolist())


def boxes_and_masks(rows: Tensor) -> Any:
    boxes = RowList(torch.full((row % 3, 4), float(row)) for row in rows.tolist())
    return {"boxes": boxes, "masks": [masks(rows)], "row": rows}


def assert_same(found: Any, expected: Any) -> None:
    """A row is that of a batch of one row."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_same(found[name], value)
    elif type(expected) is list:
        assert_same(found[0], expected[0])
    else:
        assert torch.equal(found, expected[0])


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Scores:
    row: Tensor
    best: Tensor


class TestStructure:
    @pytest.mark.parametrize(
        ("make", "take"),
        [
            (lambda row: row, lambda sample: sample),
            (lambda row: [row, {"half": row.half()}], lambda sample: sample[0]),
            (lambda row: (row.bfloat16(), row), lambda sample: sample[1]),
            (lambda row: {"a": {3: (row, row > 4)}}, lambda sample: sample["a"][3][0]),
            (lambda row: Pair(row, row[:, None].expand(-1, 5)), lambda sample: sample.first),
            (lambda row: Scores(row, row.double()), lambda sample: sample.row),
        ],
        ids=["tensor", "list", "tuple", "dict", "namedtuple", "frozen dataclass"],
    )
    def test_prediction_keeps_its_structure(
        self, tmp_path: Path, make: Callable[[Tensor], Any], take: Callable[[Any], Tensor]
    ) -> None:
        store = predict(tmp_path, Predictor(lambda batch, _: make(batch["row"])))
        for row in (0, 7, NUM_ROWS - 1):
            assert take(store[row]) == row

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize(
        ("strategy", "devices"), [("auto", 1), ("memmap_superbatch", 3), ("memmap_dp", 3)]
    )
    def test_predictions_that_differ_in_length_are_stored_without_padding(
        self, tmp_path: Path, strategy: str, devices: int
    ) -> None:
        def rows_of(batch: Any, _: int) -> dict[str, Any]:
            numbers = batch["row"].tolist()
            boxes = [torch.full((row % 4, 2), float(row)) for row in numbers]
            return {
                "row": batch["row"],
                "boxes": torch.nested.as_nested_tensor(boxes, layout=torch.jagged),
                "text": RowList("ä" * (row % 3) for row in numbers),
                "files": RowList(bytes(row % 5) for row in numbers),
                "labels": RowList(torch.arange(row % 4) for row in numbers),
            }

        store = predict(tmp_path, Predictor(rows_of), strategy=strategy, devices=devices)
        for row in range(NUM_ROWS):
            found = store[row]
            assert found["row"] == row
            assert torch.equal(found["boxes"], torch.full((row % 4, 2), float(row)))
            assert torch.equal(found["labels"], torch.arange(row % 4))
            assert (found["text"], found["files"]) == ("ä" * (row % 3), bytes(row % 5))
        assert store.manifest.num_bytes < 2000 + 20 * NUM_ROWS
        assert not [*store.files.glob("*.tmp")]
        assert verify_store(store.path) == []

    @pytest.mark.parametrize("make", [masks, boxes_and_masks], ids=["masks", "nested"])
    def test_masks_of_several_sizes_are_stored(self, tmp_path: Path, make: Any) -> None:
        store = predict(tmp_path, Predictor(lambda batch, _: make(batch["row"])))
        for row in range(NUM_ROWS):
            assert_same(store[row], make(torch.tensor([row])))
        assert verify_store(store.path) == []

    def test_sizes_that_later_batches_differ_in_are_declared(self, tmp_path: Path) -> None:
        def of_batch(batch: Any, step: int) -> Any:
            rows = batch["row"].tolist()
            return {
                # In the first batch, all have one width; and padded to the longest of each batch.
                "mask": RowList(torch.full((1 + row % 3, 2 + step), row) for row in rows),
                "logits": batch["row"][:, None].expand(-1, 3 + step).float(),
            }

        module = Predictor(of_batch)
        with pytest.raises(SchemaError, match=r"batch 1: .*'mask'.*variable=") as raised:
            predict(tmp_path, module)
        assert nothing_at(tmp_path)
        _, _, argument = str(raised.value).rpartition("variable=")
        variable = ast.literal_eval(argument.removesuffix(")"))
        assert variable == {"mask": 2, "logits": 1}
        store = predict(tmp_path, module, variable=variable)
        for row in range(NUM_ROWS):
            assert (store[row]["mask"] == row).all()
            assert store[row]["mask"].shape[0] == 1 + row % 3
            assert (store[row]["logits"] == row).all()
            assert len(store[row]["logits"]) == store[row]["mask"].shape[1] + 1

    @pytest.mark.parametrize("dims", [0, "pad", None])
    def test_wrong_number_of_dimensions_is_rejected(self, tmp_path: Path, dims: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"variable\['mask'\]"):
            PredictionTable(tmp_path / "table", variable={"mask": dims})

    def test_unknown_field_in_variable_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match=r"variable: .*'maks'.*'mask'"):
            predict(
                tmp_path,
                Predictor(lambda batch, _: {"mask": masks(batch["row"])}),
                variable=["maks"],
            )

    def test_predictions_that_need_gradients_are_stored(self, tmp_path: Path) -> None:
        def differentiate(batch: Any, _: int) -> Tensor:
            with torch.enable_grad():
                x = batch["row"].double().requires_grad_()
                return x * 2

        store = predict(tmp_path, Predictor(differentiate), inference_mode=False)
        assert in_dataset_order(store)["value"].tolist() == [2.0 * row for row in range(NUM_ROWS)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Plain:
    """Some batches, and no sampler."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([{"row": torch.arange(3)}] * 2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda row, step: 0.5, "batch 0: field 'value': found float"),
            (lambda row, step: {"a": row, "name": "x"}, "batch 0: field 'name': found str"),
            (lambda row, step: {}, "batch 0: .* holds no tensor"),
            (lambda row, step: row.sum(), "batch 0: field 'value': .* without dimensions"),
            (lambda row, step: row.to_sparse(), "batch 0: field 'value': .*sparse"),
            (
                lambda row, step: row[:, None].expand(-1, 3 + step),
                r"batch 1: field 'value': found rows of int64 \(4,\), expected .* int64 \(3,\)",
            ),
            (
                lambda row, step: row.float() if step == 2 else row,
                r"batch 2: field 'value': found rows of float32 \(\), expected .* int64 \(\)",
            ),
            (
                lambda row, step: {"a": row} if step else {"b": row},
                "batch 1: .*found dict of .'a'., expected .'b'.",
            ),
            (lambda row, step: (row, row[:2]), r"batch 0: field '1' has 2 rows, .* 6"),
            (
                lambda row, step: RowList(torch.ones(2, i).to(DTYPES[i > 2]) for i in range(1, 7)),
                r"batch 0: field 'value': found float64 \(2, 3\)",
            ),
            (lambda row, step: RowList(), "batch 0: field 'value': found no rows"),
            (lambda row, step: row[1:], "batch 0: it returned 5 rows for a batch of 6"),
            (lambda row, step: {"a": [torch.zeros(3) for _ in row]}, r"batch 0: .*\bRowList\b"),
            (lambda row, step: {"a": (*torch.zeros(6, 3),)}, r"batch 0: .*\bRowList\b"),
        ],
        ids=[
            *("number", "text", "empty", "scalar", "sparse", "shape", "dtype", "keys"),
            *("lengths", "items", "nothing", "other rows", "list", "tuple"),
        ],
    )
    def test_prediction_that_cannot_be_stored_leaves_nothing(
        self, tmp_path: Path, make: Callable[[Tensor, int], Any], message: str
    ) -> None:
        with pytest.raises((SchemaError, ValueError), match=f"predict_step, {message}"):
            predict(tmp_path, Predictor(lambda batch, step: make(batch["row"], step)))
        assert nothing_at(tmp_path)

    @pytest.mark.parametrize(
        ("limit", "what"), [(3, "3 of 10 batches"), (0.5, "5 of 10 batches"), (0, "no batch")]
    )
    def test_limited_prediction_is_refused(self, tmp_path: Path, limit: float, what: str) -> None:
        with pytest.raises(ValueError, match=f"limit_predict_batches={limit}: {what}"):
            predict(tmp_path, limit_predict_batches=limit)
        assert nothing_at(tmp_path)

    def test_fast_dev_run_leaves_no_table(self, tmp_path: Path) -> None:
        with pytest.raises(StoreNotFoundError):
            predict(tmp_path, fast_dev_run=2)
        assert nothing_at(tmp_path)

    def test_loaders_in_place_of_one_table_are_refused(self, tmp_path: Path) -> None:
        predict(tmp_path)
        with pytest.raises(StoreError, match=re.escape(str(tmp_path / "table"))):
            predict(tmp_path, OfSeveral(), [DataLoader(POINTS)] * 2, overwrite=True)
        assert_holds(open_store(tmp_path / "table"))

    @pytest.mark.parametrize("name", ["..", "a/b", ""])
    def test_loader_with_no_name_of_a_store_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"the predict dataloader[{name!r}]")):
            predict(tmp_path, OfSeveral(), {name: DataLoader(POINTS)})

    @no_rows_known
    @pytest.mark.parametrize(
        "loader",
        [DataLoader(Stream()), Plain(), DataLoader(POINTS, batch_size=None)],
        ids=["iterable dataset", "plain iterable", "no batches"],
    )
    def test_loader_whose_rows_are_not_known_is_refused(self, tmp_path: Path, loader: Any) -> None:
        module = Predictor(lambda batch, _: batch["row"].reshape(-1))
        with pytest.raises((ValueError, TypeError), match="PredictionTable: the rows"):
            predict(tmp_path, module, loader)
        assert nothing_at(tmp_path)

    @no_rows_known
    def test_shuffled_super_batches_are_refused(self, tmp_path: Path) -> None:
        data = MemmapDataModule(POINTS, store_dir=tmp_path / "stores")
        data.prepare_data()
        data.setup()
        with pytest.raises(ValueError, match="PredictionTable: the rows"):
            predict(tmp_path, loader=data.train_dataloader(), strategy="memmap_superbatch")
        assert nothing_at(tmp_path)

    @pytest.mark.parametrize(
        ("sampler", "words"),
        [
            ([*range(NUM_ROWS), 4], "62 rows were written, and the table has 61"),
            (range(3, NUM_ROWS), "3 of 61 rows were not written, the first of them is row 0"),
        ],
    )
    def test_sampler_without_each_row_once_is_refused(
        self, tmp_path: Path, sampler: Any, words: str
    ) -> None:
        loader = DataLoader(POINTS, batch_size=7, sampler=sampler)
        with pytest.raises(StoreError, match=words):
            predict(tmp_path, loader=loader)
        assert nothing_at(tmp_path)

    def test_error_in_the_middle_leaves_the_old_table(self, tmp_path: Path) -> None:
        def fail(batch: Any, step: int) -> Any:
            if step == 3:
                raise RuntimeError("no power")
            return {"row": batch["row"] + 1000}

        predict(tmp_path)
        with pytest.raises(RuntimeError, match="no power"):
            predict(tmp_path, Predictor(fail), overwrite=True)
        assert_holds(open_store(tmp_path / "table"))
        store = predict(tmp_path, Predictor(lambda batch, _: batch["row"] + 1000), overwrite=True)
        assert in_dataset_order(store)["value"].tolist() == [*range(1000, 1000 + NUM_ROWS)]

    def test_table_that_is_there_is_refused_before_anything_is_predicted(
        self, tmp_path: Path
    ) -> None:
        predict(tmp_path)
        steps: list[int] = []
        with pytest.raises(StoreError, match="overwrite=True"):
            predict(tmp_path, Predictor(lambda batch, step: steps.append(step)))
        assert steps == []
