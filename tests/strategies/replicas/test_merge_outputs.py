"""The batches of replicas: how rows are divided, and outputs merged."""

import dataclasses
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.loading import Padded, RowList
from lightning_memmap.strategies.common.split_rows import split_rows
from lightning_memmap.strategies.replicas.batches import ReplicaBatches
from lightning_memmap.strategies.replicas.merge_outputs import OutputLengths, OutputMerger
from tests.support.rows import CPU


@dataclasses.dataclass(frozen=True)
class Boxes:
    boxes: list[Tensor]
    score: Tensor


def test_tensordict_is_scattered_and_assembled() -> None:
    batch = TensorDict({"a": torch.arange(7), "b": {"c": torch.ones(7, 2)}}, [7])
    scattered = ReplicaBatches.split(batch, [CPU] * 3)
    assert [each["a"].tolist() for each in scattered.batches] == [[0, 3, 6], [1, 4], [2, 5]]
    assert scattered.assembled.batch_size == (7,)
    assert torch.equal(scattered["a"], torch.arange(7))
    assert scattered.assembled["b", "c"].shape == (7, 2)


def test_batch_of_two_is_unpacked() -> None:
    x, y = ReplicaBatches.split((torch.arange(5), torch.arange(5, 10)), [CPU] * 2)  # type: ignore[misc]
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert y.tolist() == [5, 6, 7, 8, 9]


def test_loop_over_a_dict_names_the_keys() -> None:
    batch: Any = ReplicaBatches.split({"x": torch.arange(3), "y": torch.ones(3)}, [CPU] * 2)
    assert [*batch.keys()] == ["x", "y"]
    with pytest.raises(TypeError, match=r"batch\[0\]: .*batch\.keys\(\)"):
        list(batch)
    with pytest.raises(KeyError, match="z"):
        batch["z"]


@pytest.mark.parametrize("batch", [["a", "b"], {"x": torch.ones(3), "name": "a"}, torch.ones(())])
def test_batch_with_values_that_are_not_rows_stays_whole(batch: Any) -> None:
    with pytest.warns(UserWarning, match=r"^batch.* 2 parts"):
        scattered = ReplicaBatches.split(batch, [CPU] * 2)
    assert scattered.batches == [batch]
    assert [*map(len, scattered.row_ranges)] == [1]
    assert OutputMerger(scattered.row_ranges, CPU).merge([["output"]]) == ["output"]


def test_batch_with_rows_that_differ_in_length_is_divided() -> None:
    texts = [f"row {row}" for row in range(5)]
    batch = {"text": RowList(texts), "sound": Padded(torch.ones(5, 3), torch.arange(5))}
    scattered = ReplicaBatches.split(batch, [CPU] * 2)
    assert [each["text"] for each in scattered.batches] == [texts[::2], texts[1::2]]
    assert [each["sound"].lengths.tolist() for each in scattered.batches] == [[0, 2, 4], [1, 3]]
    assert scattered["text"] == texts


@pytest.mark.parametrize(("num_rows", "num_devices"), [(1, 2), (5, 1)])
def test_batch_that_is_not_divided_is_merged_as_it_is(num_rows: int, num_devices: int) -> None:
    scattered = ReplicaBatches.split(torch.arange(num_rows), [CPU] * num_devices)
    assert [*map(len, scattered.row_ranges)] == [num_rows]
    assert torch.equal(scattered.assembled, torch.arange(num_rows))
    ragged = [torch.ones(row + 1) for row in range(num_rows)]
    output = {"rows": torch.arange(num_rows) * 2, "ragged": ragged, "mean": torch.tensor(3.0)}
    found = OutputMerger(scattered.row_ranges, CPU).merge([output])
    assert torch.equal(found["rows"], output["rows"])
    assert list(map(len, found["ragged"])) == [row + 1 for row in range(num_rows)]
    assert found["mean"] == 3.0


@pytest.mark.parametrize("first", [0, 1, 2])
def test_merge_puts_rows_into_the_order_of_the_step(first: int) -> None:
    batches = [torch.arange((i - first) % 3, 8, 3) for i in range(3)]
    scattered = ReplicaBatches.of_devices(batches, 8, first, CPU)
    assert [*map(len, scattered.row_ranges)] == [len(rows) for rows in batches]
    merged = OutputMerger(scattered.row_ranges, CPU).merge(
        [
            {
                "rows": rows,
                "pair": (rows * 2, {"deep": rows[:, None]}),
                "mean": rows.double().mean(),
                "number": float(len(rows)),
                "ragged": [torch.ones(int(row)) for row in rows],
                "boxes": Boxes([torch.ones(int(row)) for row in rows], rows),
                "name": "same",
                "count": len(rows),
                "of_replica": torch.ones(7 + len(rows)),
                "nothing": None,
            }
            for rows in batches
        ]
    )
    assert merged["rows"].tolist() == list(range(8))
    assert merged["pair"][0].tolist() == list(range(0, 16, 2))
    assert merged["pair"][1]["deep"].tolist() == [[row] for row in range(8)]
    assert merged["mean"].item() == pytest.approx(3.5)
    assert merged["number"] == pytest.approx((9 + 9 + 4) / 8)
    assert [len(item) for item in merged["ragged"]] == list(range(8))
    assert [len(item) for item in merged["boxes"].boxes] == list(range(8))
    assert merged["boxes"].score.tolist() == list(range(8))
    assert merged["name"] == "same"
    assert sorted(merged["count"]) == [2, 3, 3]
    assert [len(item) for item in merged["of_replica"]] == [7 + len(rows) for rows in batches]
    assert merged["nothing"] is None


def test_parts_have_the_rows_of_their_places_and_all_that_has_none() -> None:
    batch = {
        "x": torch.arange(3),
        "text": RowList(["a", "b", "c"]),
        "scale": torch.tensor(2.0),
        "name": "n",
    }
    parts = split_rows(batch, [range(2), range(2, 2), range(2, 3)], [CPU] * 3)
    # A part without rows has a copy of one.
    assert [part["x"].tolist() for part in parts] == [[0, 1], [0], [2]]
    assert [part["text"] for part in parts] == [["a", "b"], ["a"], ["c"]]
    assert [(part["scale"].item(), part["name"]) for part in parts] == [(2.0, "n")] * 3
    for name, wrong in (("x", torch.arange(4)), ("text", RowList("ab"))):
        with pytest.raises(ValueError, match=rf"batch\['{name}'\].* 3 rows"):
            split_rows({**batch, name: wrong}, [range(1), range(1, 3)], [CPU] * 2)


class TestOutputLengths:
    def steps(self, *lengths: tuple[int, int]) -> list[Any]:
        """What a step of two parts returns for each class, of 4 classes, merged."""
        known, found = OutputLengths(), []
        for rows in lengths:
            places = [range(0, sum(rows), 2), range(1, sum(rows), 2)]
            outputs = [{"classes": torch.arange(4), "rows": torch.arange(n)} for n in rows]
            found.append(OutputMerger(places, CPU, known).merge(outputs))
        return found

    def test_entries_per_class_are_not_rows_once_the_rows_are_others(self) -> None:
        with pytest.warns(UserWarning, match=r"output\['classes'\] has 4 entries") as warned:
            first, tail, again = self.steps((4, 4), (4, 3), (4, 4))
        assert len(warned) == 1
        assert first["classes"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for step in (tail, again):
            assert [value.tolist() for value in step["classes"]] == [[0, 1, 2, 3]] * 2
        assert [step["rows"].tolist() for step in (first, tail, again)] == [
            [0, 0, 1, 1, 2, 2, 3, 3],
            [0, 0, 1, 1, 2, 2, 3],
            [0, 0, 1, 1, 2, 2, 3, 3],
        ]

    def test_entries_of_other_lengths_are_a_list_without_a_word(self) -> None:
        for step in self.steps((3, 3), (3, 2)):
            assert [value.tolist() for value in step["classes"]] == [[0, 1, 2, 3]] * 2
