"""`RowResults` in one process: what is kept when runs end, resume and fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule, open_store, verify_store
from lightning_memmap.callbacks import RowResults
from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.results import read_row_results
from tests.support.fits import NUM_ROWS, EndError, fit
from tests.support.models import Points, Regression, make_trainer

KEYS = ["row_loss", "row", "step"]


class PerRow(Regression):
    """Returns what it computed for each row, and fails in a step."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.global_step == self.fails:
            raise EndError
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        step = torch.full_like(batch["row"], self.global_step)
        return {"loss": losses.mean(), "row_loss": losses, "row": batch["row"], "step": step}


class Skipping(PerRow):
    """Returns None in each second step."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            return super().training_step(batch, batch_idx)
        self.skipped += batch["row"].tolist()
        return None


class Returning(Regression):
    """Returns what a function makes of a batch and its number besides its loss."""

    def __init__(self, function: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, **self.function(batch, batch_idx)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.function(batch, batch_idx)


def uninterrupted(path: Path) -> Any:
    fit(path, PerRow(), RowResults(path / "results", KEYS))
    return read_row_results(path / "results", "all")


def assert_equal(results: Any, expected: Any) -> None:
    assert results.batch_size == expected.batch_size
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.filterwarnings(
    "ignore:.*was called without a model", "ignore:.*no last checkpoint available"
)
@pytest.mark.parametrize(
    ("fails", "checkpoint"),
    [
        (7, "step=5"),  # Inside the first epoch.
        (9, "stopped"),
        (28, "stopped"),
        (28, "step=25"),  # Inside the second epoch.
        (16, "end-epoch=0"),
        (40, "step=20"),  # From an epoch that has been committed.
        (33, "step=10"),
        (44, "end-epoch=0"),
    ],
)
def test_resumed_run_has_the_results_of_one_that_never_ended(
    tmp_path: Path, fails: int, checkpoint: str
) -> None:
    expected = uninterrupted(tmp_path / "whole")
    path = tmp_path / "ended"
    callbacks: list[Any] = [RowResults(path / "results", KEYS)]
    if checkpoint == "stopped":
        callbacks.append(OnExceptionCheckpoint(path, "stopped"))
    with pytest.raises(EndError):
        fit(path, PerRow(fails), *callbacks)
    committed = fails // 15
    assert sorted(p.name for p in (path / "results").glob("epoch-*")) == [
        f"epoch-{epoch:06d}" for epoch in range(committed)
    ]
    fit(path, PerRow(), RowResults(path / "results", KEYS), checkpoint=path / f"{checkpoint}.ckpt")
    assert_equal(read_row_results(path / "results", "all"), expected)
    assert not [*(path / "results").glob("parts/*")]


def test_last_epoch_is_committed_by_a_resume_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uninterrupted(tmp_path / "whole")
    path = tmp_path / "ended"
    results = RowResults(path / "results", KEYS)
    commit = results.on_train_epoch_end

    def stop_before_the_last_commit(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 2:
            raise EndError
        commit(trainer, module)

    monkeypatch.setattr(results, "on_train_epoch_end", stop_before_the_last_commit)
    with pytest.raises(EndError):
        fit(path, PerRow(), results)
    assert len([*(path / "results").glob("epoch-*")]) == 2
    checkpoint = path / "step=45.ckpt"
    fit(path, PerRow(), RowResults(path / "results", KEYS), checkpoint=checkpoint)
    assert_equal(read_row_results(path / "results", "all"), expected)


def test_run_resumed_twice_on_other_devices_has_each_row_once(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path / "whole")
    path = tmp_path / "ended"
    with pytest.raises(EndError):
        fit(path, PerRow(13), RowResults(path / "results", KEYS), devices=2)
    with pytest.raises(EndError):
        fit(
            path,
            PerRow(9),
            RowResults(path / "results", KEYS),
            checkpoint=path / "step=5.ckpt",
            devices=4,
        )
    fit(path, PerRow(), RowResults(path / "results", KEYS), checkpoint=path / "step=5.ckpt")
    results = read_row_results(path / "results", "all")
    for name in ("row", "step", "seen", "epoch"):
        assert torch.equal(results[name], expected[name])
    torch.testing.assert_close(results["row_loss"], expected["row_loss"])


def test_epoch_that_is_repeated_has_no_results_before_its_end(tmp_path: Path) -> None:
    for fails, checkpoint in ((44, None), (20, tmp_path / "end-epoch=0.ckpt")):
        with pytest.raises(EndError):
            fit(tmp_path, PerRow(fails), RowResults(tmp_path / "r", KEYS), checkpoint=checkpoint)
    assert [path.name for path in (tmp_path / "r").glob("epoch-*")] == ["epoch-000000"]


def test_results_of_another_run_are_kept_or_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results"
    fit(tmp_path, PerRow(), RowResults(path, KEYS), max_epochs=2)
    before = read_row_results(path, "all").clone()
    with pytest.raises(StoreError, match="overwrite=True"):
        fit(tmp_path, PerRow(), RowResults(path, KEYS), max_epochs=1)
    assert_equal(read_row_results(path, "all"), before)
    fit(tmp_path, PerRow(), RowResults(path, KEYS, overwrite=True), max_epochs=1)
    assert read_row_results(path, "all").batch_size == (1, NUM_ROWS)


def test_run_whose_results_another_one_replaces_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results"

    class Replaced(PerRow):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                callback = RowResults(path, KEYS, overwrite=True)
                fit(tmp_path, PerRow(), callback, max_epochs=3)

    with pytest.raises(StoreError, match="another run"):
        fit(tmp_path, Replaced(), RowResults(path, KEYS))
    assert read_row_results(path, "all").batch_size == (3, NUM_ROWS)


def test_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("one")
    with pytest.raises(StoreError, match="thesis"):
        fit(tmp_path, PerRow(), RowResults(tmp_path / "thesis", KEYS, overwrite=True))


def test_folder_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter").write_text("one")
    with pytest.raises(StoreError, match="thesis"):
        fit(tmp_path, PerRow(), RowResults(path, KEYS, overwrite=True))
    assert [child.name for child in path.iterdir()] == ["chapter"]


def test_rows_of_a_subset_have_their_rows_in_the_dataset(tmp_path: Path) -> None:
    from lightning_memmap.sampling import Subset

    chosen = [3, 7, 20, 21, 22, 40, 41, 60]
    fit(tmp_path, PerRow(), RowResults(tmp_path / "r", KEYS), max_epochs=1, subset=Subset(chosen))
    results = read_row_results(tmp_path / "r")
    assert results["seen"].nonzero().flatten().tolist() == chosen
    assert results["row"][chosen].tolist() == chosen
    store = open_store(tmp_path / "r" / "epoch-000000")
    assert store[0] == {"row_loss": None, "row": None, "step": None}
    assert store[7]["row"] == 7
    assert verify_store(store.path) == []


def test_last_epochs_are_read(tmp_path: Path) -> None:
    fit(tmp_path, PerRow(), RowResults(tmp_path / "r", KEYS))
    every = read_row_results(tmp_path / "r", "all")
    assert every["epoch"][:, 0].tolist() == [0, 1, 2]
    assert_equal(read_row_results(tmp_path / "r", 2), every[1:])
    assert_equal(read_row_results(tmp_path / "r"), every[2])
    for keep, error in ((0, ValueError), ("first", ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="keep"):
            read_row_results(tmp_path / "r", keep)  # type: ignore[arg-type]


def test_dtypes_and_shapes_are_kept(tmp_path: Path) -> None:
    def rows(batch: Any, _: int) -> dict[str, Tensor]:
        row = batch["row"]
        return {
            "half": row.to(torch.bfloat16),
            "flag": row % 2 == 0,
            "matrix": row[:, None, None].expand(-1, 2, 3).to(torch.float64),
        }

    fit(tmp_path, Returning(rows), RowResults(tmp_path / "r", ["half", "flag", "matrix"]))
    results = read_row_results(tmp_path / "r")
    numbers = torch.arange(NUM_ROWS)
    assert torch.equal(results["half"], numbers.to(torch.bfloat16))
    assert torch.equal(results["flag"], numbers % 2 == 0)
    assert torch.equal(results["matrix"], numbers[:, None, None].expand(-1, 2, 3).double())


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
def test_skipped_steps_leave_their_rows_masked(tmp_path: Path) -> None:
    module = Skipping()
    fit(tmp_path, module, RowResults(tmp_path / "r", KEYS), max_epochs=1)
    results = read_row_results(tmp_path / "r")
    seen = results["seen"]
    assert (~seen).nonzero().flatten().tolist() == sorted(module.skipped)
    assert torch.equal(results["row"][seen], seen.nonzero().flatten())
    assert torch.equal(results["row_loss"].isnan(), ~seen)


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
def test_rows_that_a_resumed_run_skips_have_no_results_of_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(EndError):
        fit(tmp_path, PerRow(13), RowResults(tmp_path / "r", KEYS))
    module = Skipping()
    results = RowResults(tmp_path / "r", KEYS)
    fit(tmp_path, module, results, checkpoint=tmp_path / "step=5.ckpt", max_epochs=1)
    seen = read_row_results(tmp_path / "r")["seen"]
    assert module.skipped
    assert (~seen).nonzero().flatten().tolist() == sorted(module.skipped)


def test_results_in_memory_that_the_module_uses_again_are_those_of_each_step(
    tmp_path: Path,
) -> None:
    memory = torch.zeros(NUM_ROWS, dtype=torch.int64)
    module = Returning(lambda batch, _: {"row": memory[: len(batch["row"])].copy_(batch["row"])})
    fit(tmp_path, module, RowResults(tmp_path / "r", ["row"]), max_epochs=1)
    assert read_row_results(tmp_path / "r")["row"].tolist() == [*range(NUM_ROWS)]


def test_test_results_are_in_dataset_order(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RowResults(tmp_path / "r", ["y"], split="test")])
    module = Returning(lambda batch, _: {"y": batch["y"]})
    for _ in range(2):
        trainer.test(
            module,
            MemmapDataModule(
                test_dataset=Points(NUM_ROWS), store_dir=tmp_path / "stores", batch_size=7
            ),
            verbose=False,
        )
    assert torch.equal(read_row_results(tmp_path / "r")["y"], Points(NUM_ROWS).y)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda batch, _: {}, ValueError, "'y'"),
        (lambda batch, _: {"y": batch["y"].mean()}, ValueError, "'y'"),
        (lambda batch, _: {"y": batch["y"][:2]}, ValueError, "'y'"),
        (
            lambda batch, step: {"y": batch["y"].to((torch.float32, torch.float64)[step % 2])},
            SchemaError,
            "float64",
        ),
    ],
    ids=["absent", "mean", "short", "dtype"],
)
def test_values_that_are_not_rows_are_errors(
    tmp_path: Path, function: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fit(tmp_path, Returning(function), RowResults(tmp_path / "r", ["y"]))


@pytest.mark.filterwarnings("ignore:You defined a")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_loader_with_unknown_rows_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RowResults(tmp_path / "r", KEYS)])
    with pytest.raises(ValueError, match="MemmapDataModule"):
        trainer.fit(PerRow(), DataLoader(Points(NUM_ROWS), batch_size=4))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keys": "loss"}, "keys"),
        ({"keys": []}, "keys"),
        ({"keys": ["a", "a"]}, "keys"),
        ({"keys": ["seen"]}, "seen"),
        ({"keys": ["a.b"]}, "a.b"),
        ({"keys": ["a"], "split": "predict"}, "split"),
        ({"keys": ["a"], "split": "train/web"}, "split"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        RowResults("results", **arguments)


@pytest.mark.parametrize(
    ("keys", "split"), [(["row"], "train"), (["row_loss"], "val")], ids=["keys", "split"]
)
def test_two_callbacks_with_one_path_are_an_error_before_the_first_step(
    tmp_path: Path, keys: list[str], split: str
) -> None:
    module = PerRow()
    callbacks = [
        RowResults(tmp_path / "r", ["row_loss"]),
        RowResults(tmp_path / "s" / ".." / "r", keys, split=split),
    ]
    with pytest.raises(ValueError, match="two callbacks"):
        fit(tmp_path, module, *callbacks)
    assert not (tmp_path / "r").exists()


def test_damaged_and_foreign_results_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with pytest.raises(StoreError):
        read_row_results(path)
    fit(tmp_path, PerRow(), RowResults(path, KEYS), max_epochs=1)
    run = path / "results.json"
    good = run.read_bytes()
    for bad in (good[:-5], b"{}", good.replace(b'"num_rows":61', b'"num_rows":62')):
        run.write_bytes(bad)
        with pytest.raises(StoreError):
            read_row_results(path)
    run.write_bytes(good)
    manifest = path / "epoch-000000" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b"row_loss", b"row_lost"))
    with pytest.raises(StoreError):
        read_row_results(path)
    manifest.write_bytes(whole)
    (values,) = (path / "epoch-000000").glob("g-*/row_loss.memmap")
    values.write_bytes(values.read_bytes()[:-1])
    with pytest.raises(StoreError):
        read_row_results(path)
