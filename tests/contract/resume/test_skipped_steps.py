"""``skip_steps``: the rows of these steps are left out, and all others come as they would have."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.contract.resume import runs
from tests.support.models import Points, Regression, set_up, weights

#: 10 steps of 32 rows in an epoch; the last two have 17 and 16.
ROWS, BATCH, STEPS, EPOCHS = 289, 32, 10, 3


class Recorder(Regression):
    """Notes after how many optimizer steps each batch came."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_steps: list[int] = []
        self.validated = 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        self.optimizer_steps.append(self.global_step)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated += 1


def fit(
    path: Path,
    skip_steps: Any = None,
    devices: int = 2,
    strategy: str = "memmap_superbatch",
    checkpoint: Path | None = None,
    save: bool = False,
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> Recorder:
    data = MemmapDataModule(
        Points(ROWS),
        Points(10, 1000),
        store_dir=path / "stores",
        skip_steps=skip_steps,
        **{"batch_size": BATCH // devices, **(options or {})},
    )
    saver = ModelCheckpoint(path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    return runs.fit(
        Recorder(),
        data,
        checkpoint,
        strategy=strategy,
        devices=devices,
        max_epochs=EPOCHS,
        callbacks=[saver] if save else [],
        **trainer_options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("whole")
    return path, fit(path, save=True).seen["train"]


@pytest.mark.parametrize(
    "skipped",
    [
        range(3, 5),
        range(0, 1),
        [8],
        [9],
        [8, 9, 18, 19, 29],
        range(7, 14),
        [2, 3, 25],
        range(40, 60),
        range(28, 40),
    ],
    ids=str,
)
def test_other_steps_have_the_rows_that_they_would_have_had(
    whole: tuple[Path, list[list[int]]], skipped: Any
) -> None:
    if skipped in (range(40, 60), range(28, 40)):
        # An epoch that is never reached, but would have no step.
        with pytest.raises(ValueError, match=r"skip_steps: all 10 steps of epoch [34]"):
            fit(whole[0], skipped)
        return
    found = fit(whole[0], skipped)
    assert found.seen["train"] == [
        rows for step, rows in enumerate(whole[1]) if step not in skipped
    ]
    assert found.validated == EPOCHS


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("memmap_dp", 2),
        ("auto", 1),
        ("memmap_superbatch", 8),
        ("memmap_model_parallel", 2),
        ("memmap_independent", 1),
    ],
)
@pytest.mark.parametrize("options", [{}, {"residency": "stream", "shuffle_block": 3}], ids=str)
def test_steps_are_left_out_the_same_under_every_strategy(
    tmp_path: Path, strategy: str, devices: int, options: dict[str, Any]
) -> None:
    skipped = [4, 5, 6, 19, 20]
    all_rows = fit(tmp_path, options=options).seen["train"]
    found = fit(tmp_path, skipped, devices, strategy, options=options).seen["train"]
    kept = [rows for step, rows in enumerate(all_rows) if step not in skipped]
    if strategy == "memmap_dp":
        # Each replica notes its own.
        found = [sorted(chain(*found[at : at + devices])) for at in range(0, len(found), devices)]
        kept = [sorted(rows) for rows in kept]
    assert found == kept


@pytest.mark.parametrize("step", [2, 4, 10, 14])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_run_resumed_before_a_spike_leaves_it_out(
    whole: tuple[Path, list[list[int]]], tmp_path: Path, step: int, devices: int
) -> None:
    path, rows = whole
    skipped = range(4, 16) if step == 2 else range(12, 21)
    if step == 2:
        with pytest.raises(ValueError, match="skip_steps: all 10 steps of epoch 1"):
            fit(path, range(4, 20), checkpoint=path / "saved" / "step=2.ckpt")
    resumed = fit(path, skipped, devices, checkpoint=path / "saved" / f"step={step}.ckpt")
    kept = [rows[at] for at in range(step, EPOCHS * STEPS) if at not in skipped]
    assert resumed.seen["train"] == kept


def test_a_checkpoint_keeps_what_is_left_out_for_other_device_counts_too(tmp_path: Path) -> None:
    skipped = range(5, 13)
    whole = fit(tmp_path, skipped, save=True)
    expected = list(chain(*whole.seen["train"]))
    for step in (1, 4, 5, 6, 21):
        checkpoint = tmp_path / "saved" / f"step={step}.ckpt"
        begin = len(list(chain(*whole.seen["train"][:step])))
        # Neither named again, nor in steps of the same size; and named again.
        for given, devices, options in (
            (None, 2, {}),
            (None, 3, {"batch_size": 8}),
            (skipped, 3, {"batch_size": 8}),
        ):
            found = fit(tmp_path, given, devices, checkpoint=checkpoint, options=options)
            assert list(chain(*found.seen["train"])) == expected[begin:]
            if not options:
                assert torch.equal(weights(found), weights(whole))
    # And others beside them.
    found = fit(tmp_path, [20], checkpoint=tmp_path / "saved" / "step=4.ckpt")
    assert found.seen["train"] == [*whole.seen["train"][4:12], *whole.seen["train"][13:]]


def test_steps_are_batches_where_an_optimizer_step_has_several(
    whole: tuple[Path, list[list[int]]],
) -> None:
    # Optimizer steps 1 and 2 of groups of two batches.
    found = fit(whole[0], range(2, 6), accumulate_grad_batches=2)
    assert found.seen["train"] == [rows for s, rows in enumerate(whole[1]) if s not in range(2, 6)]
    # An epoch of fewer steps still ends with an optimizer step.
    assert found.optimizer_steps[:6] == [0, 0, 1, 1, 2, 2]
    odd = fit(whole[0], [2], accumulate_grad_batches=2)
    assert odd.optimizer_steps[:11] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5]


def test_without_a_trainer_a_loader_leaves_them_out(
    whole: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    def loader(skip_steps: Any) -> Any:
        data = MemmapDataModule(
            Points(ROWS), store_dir=tmp_path / "stores", batch_size=BATCH, skip_steps=skip_steps
        )
        return set_up(data, "fit").train_dataloader()

    kept = [rows for step, rows in enumerate(whole[1]) if step not in (1, 9, 10)]
    batches = loader([1, 9, 10])
    assert len(batches) == 8
    found = [batch["row"].tolist() for _ in range(2) for batch in batches]
    assert found == kept[:17]
    again = loader(None)
    again.load_state_dict(batches.state_dict())
    assert [batch["row"].tolist() for batch in again] == kept[17:]


def test_steps_that_were_left_out_say_nothing_of_other_rows(tmp_path: Path) -> None:
    def made(rows: int, skip_steps: Any = None) -> Any:
        data = MemmapDataModule(
            Points(rows), store_dir=tmp_path / str(rows), skip_steps=skip_steps, batch_size=BATCH
        )
        return set_up(data, "fit").train_dataloader().loader

    saved = made(ROWS, skip_steps=range(44, 52))
    saved.set_epoch(4)
    fewer = made(100)
    fewer.load_state_dict(saved.state_dict())
    assert [fewer.num_steps_of(epoch) for epoch in range(24)] == [4] * 24
