"""Training from results: a committed column in place of a field, and orders that follow it."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.errors import StoreError
from lightning_memmap.results import Results, read_row_results
from lightning_memmap.sampling import Bucketed, Curriculum, KFold, Subset, Weighted
from lightning_memmap.sampling.columns import DatasetIdentity
from tests.support.fits import NUM_ROWS, NUM_SHARDS, EndError, fit
from tests.support.models import Points, Regression, set_up


class PerRow(Regression):
    """Returns its losses and a weight that depends on the row and the epoch alone."""

    def __init__(self, fails: int = -1, fails_at_end_of: int = -1) -> None:
        super().__init__()
        self.fails = fails
        self.fails_at_end_of = fails_at_end_of
        #: By epoch, the rows of its steps in order.
        self.rows: dict[int, list[int]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.global_step == self.fails:
            raise EndError
        self.rows.setdefault(self.current_epoch, []).extend(batch["row"].tolist())
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        weight = weight_of(batch["row"], self.current_epoch)
        return {"loss": losses.mean(), "row_loss": losses, "weight": weight, "kind": batch["row"]}

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == self.fails_at_end_of:
            raise EndError


def weight_of(row: Tensor, epoch: int) -> Tensor:
    """Return the weight that a row has after an epoch: 0 for every third row."""
    return ((row + epoch) % 3 > 0) * (1.0 + row % 5)


def fit_from_own_results(
    path: Path, module: PerRow, *, key: str = "weight", **options: Any
) -> None:
    results = path / "results"
    fit(
        path,
        module,
        RowResults(results, ["row_loss", "weight"]),
        sampler=Weighted(Results(results, key, each_epoch=True)),
        **options,
    )


def finished(path: Path) -> Path:
    """Return the results of a run of two epochs."""
    results = path / "finished"
    fit(
        path / "earlier",
        PerRow(),
        RowResults(results, ["row_loss", "weight", "kind"]),
        max_epochs=2,
    )
    return results


def rows_of(path: Path, **options: Any) -> list[int]:
    """Return the training rows of the first epoch, in order."""
    module = PerRow()
    fit(path, module, max_epochs=1, **options)
    return module.rows[0]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_each_epoch_draws_by_the_weights_of_the_epoch_before(tmp_path: Path, devices: int) -> None:
    module = PerRow()
    fit_from_own_results(tmp_path, module, devices=devices)
    alone = PerRow()
    fit_from_own_results(tmp_path / "alone", alone)
    assert module.rows == alone.rows
    assert sorted(module.rows[0]) == [*range(NUM_ROWS)]
    latest = weight_of(torch.arange(NUM_ROWS), 0)
    for epoch in (1, 2):
        drawn = Counter(module.rows[epoch])
        assert sum(drawn.values()) == NUM_ROWS
        for shard in range(NUM_SHARDS):
            rows = range(shard, NUM_ROWS, NUM_SHARDS)
            expected = latest[shard::NUM_SHARDS].double()
            expected *= len(rows) / expected.sum()
            for row, mean in zip(rows, expected.tolist(), strict=True):
                assert drawn[row] in {int(mean), int(np.ceil(mean))}, (epoch, row)
        # A row that was not drawn keeps its weight.
        was_drawn = [row for row in range(NUM_ROWS) if drawn[row]]
        latest[was_drawn] = weight_of(torch.tensor(was_drawn), epoch)
    assert set(module.rows[2]) != set(module.rows[1])


@pytest.mark.parametrize(
    ("fails", "checkpoint"),
    [
        (7, "step=5"),  # Without results of an epoch before.
        (22, "step=20"),
        (38, "step=35"),
        (38, "step=20"),  # From an epoch that has been committed.
        (31, "end-epoch=0"),
        (38, "end-epoch=1"),
    ],
)
def test_resumed_run_has_the_rows_and_weights_of_one_that_never_ended(
    tmp_path: Path, fails: int, checkpoint: str
) -> None:
    whole = PerRow()
    fit_from_own_results(tmp_path / "whole", whole, key="row_loss")
    path = tmp_path / "ended"
    with pytest.raises(EndError):
        fit_from_own_results(path, PerRow(fails), key="row_loss")
    module = PerRow()
    fit_from_own_results(path, module, key="row_loss", checkpoint=path / f"{checkpoint}.ckpt")
    for epoch, rows in module.rows.items():
        assert whole.rows[epoch][-len(rows) :] == rows
    assert module.rows
    for name, value in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    expected = read_row_results(tmp_path / "whole" / "results", "all")
    results = read_row_results(path / "results", "all")
    torch.testing.assert_close(
        results["row_loss"], expected["row_loss"], rtol=0, atol=0, equal_nan=True
    )


def test_run_that_ended_before_its_commit_resumes_with_the_results_of_that_epoch(
    tmp_path: Path,
) -> None:
    whole = PerRow()
    fit_from_own_results(tmp_path / "whole", whole)
    path = tmp_path / "ended"

    class Saving(PerRow):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(path / "every.ckpt")

    # All rows of epoch 1 are trained on, and a hook fails before callbacks commit its results.
    with pytest.raises(EndError):
        fit_from_own_results(path, Saving(fails_at_end_of=1))
    module = PerRow()
    fit_from_own_results(path, module, checkpoint=path / "every.ckpt")
    assert module.rows == {2: whole.rows[2]}


def test_resume_with_other_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EndError):
        fit_from_own_results(tmp_path, PerRow(22), key="row_loss")
    checkpoint = tmp_path / "step=20.ckpt"
    with pytest.raises(ValueError, match="row_loss"):
        fit_from_own_results(tmp_path, PerRow(), key="weight", checkpoint=checkpoint)
    other = tmp_path / "other"
    with pytest.raises(EndError):
        fit_from_own_results(other, PerRow(22), key="row_loss", seed=1)
    epoch = "results/epoch-000000"
    (tmp_path / epoch).rename(tmp_path / "removed")
    with pytest.raises(StoreError, match="epoch 0"):
        fit_from_own_results(tmp_path, PerRow(), key="row_loss", checkpoint=checkpoint)
    (other / epoch).rename(tmp_path / epoch)
    with pytest.raises(ValueError, match="digest"):
        fit_from_own_results(tmp_path, PerRow(), key="row_loss", checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("path", "keys", "split", "match"),
    [
        (None, [], "", "RowResults"),
        ("others", ["weight"], "train", "RowResults"),
        ("results", ["weight"], "val", "RowResults"),
        ("results", ["row_loss"], "train", "weight"),
    ],
)
@pytest.mark.parametrize("later", [0, 2])
def test_run_that_does_not_write_its_results_fails_before_its_first_step(
    tmp_path: Path, path: str | None, keys: list[str], split: str, match: str, later: int
) -> None:
    callbacks = [] if path is None else [RowResults(tmp_path / path, keys, split=split)]
    sampler: Any = Weighted(Results(tmp_path / "results", "weight", each_epoch=True))
    if later:
        sampler = Curriculum({0: None, later: sampler})
    module = PerRow()
    with pytest.raises(ValueError, match=match):
        fit(tmp_path, module, *callbacks, sampler=sampler)
    assert not module.rows


class Diverging(PerRow):
    """Returns NaN as the weight of row 7."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["weight"][batch["row"] == 7] = torch.nan
        return output


def test_nan_under_a_key_is_an_error_that_names_a_function(tmp_path: Path) -> None:
    results = tmp_path / "results"
    fit(tmp_path, Diverging(), RowResults(results, ["weight"]), max_epochs=1)
    path = tmp_path / "later"
    with pytest.raises(ValueError, match="row 7") as raised:
        fit(path, PerRow(), sampler=Weighted(Results(results, "weight")))
    code = str(raised.value).partition("pass ")[2].partition(" or another")[0]
    column = eval(code, {"Results": Results})
    weights = weight_of(torch.arange(NUM_ROWS), 0).double()
    weights[7] = (weights.sum() - weights[7]) / (NUM_ROWS - 1)
    assert rows_of(path, sampler=Weighted(column)) == rows_of(path, sampler=Weighted(weights))


def test_nan_of_the_run_itself_is_an_error_that_names_a_function(tmp_path: Path) -> None:
    results = tmp_path / "results"
    module = Diverging()
    with pytest.raises(ValueError, match="function=lambda"):
        fit(
            tmp_path,
            module,
            RowResults(results, ["weight"]),
            sampler=Weighted(Results(results, "weight", each_epoch=True)),
        )
    assert [*module.rows] == [0]


def test_results_of_another_dataset_of_the_same_size_are_an_error(tmp_path: Path) -> None:
    results = finished(tmp_path)
    column = Results(results, "weight")
    for offset, num_shards in ((0, NUM_SHARDS), (0, 3), (1, NUM_SHARDS), (1, 3)):
        for options in (
            {"sampler": Weighted(column)},
            {"subset": Subset(field=column, values=[1])},
        ):
            data = MemmapDataModule(
                Points(NUM_ROWS, offset),
                store_dir=tmp_path / f"{offset} {num_shards}",
                num_shards=num_shards,
                **options,
            )
            if offset:
                with pytest.raises(StoreError, match="another dataset"):
                    set_up(data, "fit")
            else:
                set_up(data, "fit")


def test_resume_into_the_results_of_another_dataset_is_an_error(tmp_path: Path) -> None:
    callback = RowResults(tmp_path / "results", ["weight"])
    with pytest.raises(EndError):
        fit(tmp_path, PerRow(22), callback)
    checkpoint = tmp_path / "end-epoch=0.ckpt"
    with pytest.raises(StoreError, match="another dataset"):
        fit(tmp_path, PerRow(), callback, checkpoint=checkpoint, offset=1, overwrite=True)


def test_curriculum_switches_to_the_results_of_its_own_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    module = PerRow()
    fit(
        tmp_path,
        module,
        RowResults(results, ["weight"]),
        sampler=Curriculum({0: None, 2: Weighted(Results(results, "weight", each_epoch=True))}),
    )
    assert sorted(module.rows[1]) == [*range(NUM_ROWS)]
    zero = (weight_of(torch.arange(NUM_ROWS), 1) == 0).nonzero().flatten().tolist()
    assert not {*zero} & {*module.rows[2]}


def test_column_of_another_run_equals_its_values_in_an_array(tmp_path: Path) -> None:
    results = finished(tmp_path)
    table = read_row_results(results)
    weights = table["weight"]
    path = tmp_path / "later"
    weighted = rows_of(path, sampler=Weighted(Results(results, "weight")))
    assert weighted == rows_of(path, sampler=Weighted(weights))
    first = read_row_results(results, "all")["weight"][0]
    assert rows_of(path, sampler=Weighted(Results(results, "weight", epoch=0))) == rows_of(
        path, sampler=Weighted(first)
    )
    losses = table["row_loss"].numpy()
    lengths = np.unique(losses, return_inverse=True)[1]
    bucketed = rows_of(path, sampler=Bucketed(Results(results, "row_loss"), 4))
    assert bucketed == rows_of(path, sampler=Bucketed(lengths, 4))
    column = Results(results, "row_loss")
    easy = Subset(field=column, where=lambda losses: losses < np.median(losses))
    assert rows_of(path, subset=easy) == rows_of(path, subset=Subset(losses < np.median(losses)))


def test_function_of_all_epochs_is_a_column(tmp_path: Path) -> None:
    results = finished(tmp_path)

    def mean_loss(table: Any) -> Tensor:
        assert table.batch_size == (2, NUM_ROWS)
        return table["row_loss"].mean(0)

    values = read_row_results(results, "all")["row_loss"].mean(0)
    column = Results(results, function=mean_loss, keep="all")
    path = tmp_path / "later"
    assert rows_of(path, sampler=Weighted(column)) == rows_of(path, sampler=Weighted(values))


def test_rows_without_a_value_have_the_mean_weight_and_are_not_selected(tmp_path: Path) -> None:
    results = tmp_path / "part"
    seen = [*range(0, NUM_ROWS, 2)]
    fit(
        tmp_path / "earlier",
        PerRow(),
        RowResults(results, ["weight", "kind"]),
        max_epochs=1,
        subset=Subset(seen),
    )
    weights = weight_of(torch.arange(NUM_ROWS), 0).double()
    weights[1::2] = weights[seen].mean()
    path = tmp_path / "later"
    assert rows_of(path, sampler=Weighted(Results(results, "weight"))) == rows_of(
        path, sampler=Weighted(weights)
    )
    every = Subset(field=Results(results, "weight"), where=lambda values: values >= 0)
    assert sorted(rows_of(path, subset=every)) == seen
    with pytest.raises(ValueError, match="row 1"):
        fit(path, PerRow(), sampler=Bucketed(Results(results, "weight"), 4))


def test_rows_keep_the_latest_of_several_epochs(tmp_path: Path) -> None:
    results = tmp_path / "results"
    weights = torch.ones(NUM_ROWS)
    weights[:10] = 100
    module = PerRow()
    fit(
        tmp_path,
        module,
        RowResults(results, ["weight"]),
        sampler=Weighted(weights),
    )
    column = Results(results, "weight").read(DatasetIdentity(NUM_ROWS, {}))
    last = {row: epoch for epoch in sorted(module.rows) for row in module.rows[epoch]}
    assert column.has_value.nonzero()[0].tolist() == sorted(last)
    assert len({*last.values()}) > 1
    for row, epoch in last.items():
        assert column.values[row] == weight_of(torch.tensor(row), epoch)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "key"),
        ({"key": "a", "function": len}, "key"),
        ({"key": "a", "keep": "all"}, "keep"),
        ({"function": len, "keep": 0}, "keep"),
        ({"function": "len"}, "function"),
        ({"key": "a", "epoch": -1}, "epoch"),
        ({"key": "a", "epoch": 1, "each_epoch": True}, "each_epoch"),
    ],
)
def test_wrong_arguments_of_results_are_errors(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        Results("results", **arguments)


def test_columns_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    results = finished(tmp_path)
    path = tmp_path / "later"
    for options, match in [
        ({"sampler": Weighted(Results(results, "wait"))}, "did you mean 'weight'"),
        ({"sampler": Weighted(Results(tmp_path / "none", "weight"))}, "none"),
        ({"sampler": Weighted(Results(results, "weight", epoch=5))}, "epoch 5"),
        ({"sampler": Weighted(Results(results, function=lambda table: table["weight"][:3]))}, "3"),
        (
            {"sampler": Weighted(Results(results, function=lambda t: t["weight"][:, None]))},
            "function",
        ),
        ({"subset": KFold(2, stratify=Results(results, "kind", each_epoch=True))}, "each_epoch"),
        ({"sampler": Bucketed(Results(results, "weight", each_epoch=True), 4)}, "each_epoch"),
    ]:
        with pytest.raises((ValueError, StoreError), match=match):
            fit(path, PerRow(), **options)
