"""Windows, mixtures, records, images, buckets, combined loaders: two processes train as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Bucketed, Curriculum, Mixture, Weighted
from lightning_memmap.schema import Windows
from tests.support.datasets import (
    DECODE,
    SAMPLES,
    SHARES,
    EncodedImages,
    Ragged,
    Scenes,
    Series,
    assert_images,
    assert_ragged,
    assert_scenes,
    checked_numbers,
    mixed_sets,
    windows_in,
)
from tests.support.models import CombinedData, Points, SaveAt, make_trainer, weights
from tests.support.processes import launch, sorted_steps
from tests.support.training import make_strategy

EPOCHS = 2
#: Rows of a step over all devices. The last step of an epoch can be halved as well, since stock ddp
#: weighs processes, not rows.
GLOBAL_BATCH = 6
LENGTH, STRIDE = 8, 3
SERIES = [5 + row * 7 % 30 for row in range(41)]
SOUNDS = Ragged(180)
SCENES = Scenes(60)


class Noting(L.LightningModule):
    """Learns from four numbers of each row, and notes the rows of each step.

    Args:
        read: Returns the names of the rows of a batch, once their fields are seen to be right, and
            numbers of shape (B, 4).
    """

    def __init__(self, read: Callable[[Any], tuple[list[Any], Tensor]]) -> None:
        super().__init__()
        self.read = read
        self.net = nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1, 0.2]]))
            self.net.bias.zero_()
        self.seen: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        names, numbers = self.read(batch)
        self.seen.append(names)
        return nn.functional.mse_loss(self.net(numbers), numbers.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def read_windows(batch: Any) -> tuple[list[Any], Tensor]:
    return windows_in(batch, LENGTH), batch["value"][:, :4] / 4e4


def read_mixture(batch: Any) -> tuple[list[Any], Tensor]:
    return checked_numbers(batch), (batch["number"][:, None] / 300) ** torch.arange(4)


def read_bucketed(batch: Any) -> tuple[list[Any], Tensor]:
    rows = batch["row"].tolist()
    assert_ragged(batch, [SOUNDS[row] for row in rows])
    lengths = batch["sound"].lengths[:, None] / 40
    return rows, lengths ** torch.arange(4)


def read_combined(batch: Any) -> tuple[list[Any], Tensor]:
    found = {name: part for name, part in batch.items() if part is not None}
    rows = [(name, row) for name, part in found.items() for row in part["row"].tolist()]
    return rows, torch.cat([part["x"][:, :4] for part in found.values()])


def read_records(batch: Any) -> tuple[list[Any], Tensor]:
    rows, objects = batch["row"].tolist(), batch["objects"]
    assert batch["row_number"].tolist() == rows
    assert_scenes(batch, [SCENES[row] for row in rows])
    if isinstance(objects, list):
        return rows, torch.stack([each["box"].sum(0) for each in objects]).float()
    # Padding is zeros.
    return rows, objects["box"].values.sum(1).float()


def read_images(batch: Any) -> tuple[list[Any], Tensor]:
    rows = batch["row"].tolist()
    assert_images(batch, rows)
    means = [batch[name].float().mean((2, 3)) / 255 for name in ("image", "mask")]
    return rows, torch.cat(means, 1)


def read_points(batch: Any) -> tuple[list[Any], Tensor]:
    return batch["row"].tolist(), batch["x"][:, :4]


WEIGHTED = Weighted([float(row % 7) for row in range(60)], 120)
BACKWARDS = Weighted([float(60 - row) for row in range(60)], 120)
BLOCKS: dict[str, dict[str, Any]] = {
    "in blocks": {"shuffle_block": 2},
    "streamed": {"shuffle_block": 2, "residency": "stream"},
}
#: By name, what makes the data from a directory and a batch size, and what reads batches.
CASES: dict[str, tuple[Callable[[Path, int], L.LightningDataModule], Any]] = {
    "windows": (
        lambda path, size: MemmapDataModule(
            Series(SERIES),
            store_dir=path,
            batch_size=size,
            windows=Windows(("value", "time"), LENGTH, STRIDE),
        ),
        read_windows,
    ),
    **{
        f"mixture{name}": (
            lambda path, size, options=options: MemmapDataModule(
                mixed_sets(),
                store_dir=path,
                batch_size=size,
                layout={"steps": "list", "image": "list"},
                **{"sampler": Mixture(SHARES, SAMPLES), **options},
            ),
            read_mixture,
        )
        for name, options in {
            "": {},
            " streamed": BLOCKS["streamed"],
            " by batch": {"sampler": Mixture(SHARES, SAMPLES, by_batch=True)},
        }.items()
    },
    **{
        f"points {name}": (
            lambda path, size, options=options: MemmapDataModule(
                Points(60), store_dir=path, batch_size=size, **options
            ),
            read_points,
        )
        for name, options in {
            **BLOCKS,
            # Rows by weight, more than there are, some of which never come.
            "weighted": {"sampler": WEIGHTED},
            "of a curriculum": {"sampler": Curriculum({0: WEIGHTED, 1: BACKWARDS})},
        }.items()
    },
    **{
        f"records as {form}": (
            lambda path, size, form=form: MemmapDataModule(
                SCENES,
                store_dir=path,
                batch_size=size,
                layout={"objects": form},
                with_row_numbers=True,
            ),
            read_records,
        )
        for form in ("list", "pad")
    },
    "encoded images": (
        lambda path, size: MemmapDataModule(
            EncodedImages(60), store_dir=path, batch_size=size, decode=DECODE
        ),
        read_images,
    ),
    "bucketed": (
        lambda path, size: MemmapDataModule(
            SOUNDS,
            store_dir=path,
            batch_size=size,
            sampler=Bucketed("sound", GLOBAL_BATCH, num_buckets=5),
            layout={"sound": "pad", "ids": "jagged", "image": "list"},
        ),
        read_bucketed,
    ),
    **{
        mode: (
            lambda path, size, mode=mode: CombinedData(path, mode, size, shuffle=True),
            read_combined,
        )
        for mode in ("min_size", "max_size", "max_size_cycle")
    },
}


def fit(
    out: Path,
    case: str,
    strategy: str,
    devices: int,
    strategy_options: dict[str, Any] | None = None,
    save_at: int | None = None,
    ckpt_path: Path | None = None,
) -> dict[str, Any]:
    """Train on the data of one case, from the start or from a checkpoint."""
    make_data, read = CASES[case]
    trainer = make_trainer(
        out / case,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=EPOCHS,
        limit_val_batches=0,
        callbacks=[SaveAt(save_at, out / case / "middle.ckpt")],
    )
    module = Noting(read)
    data = make_data(out / case / "stores", GLOBAL_BATCH // devices)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {"seen": module.seen, "weights": weights(module)}


def fit_all(out: Path, save_at: int, **variant: Any) -> dict[str, Any]:
    """Train on the data of each case, and go on from a checkpoint inside an epoch.

    Returns:
        By case, the ``whole`` run and the ``resumed`` one.
    """
    return {
        case: {
            "whole": fit(out, case, save_at=save_at, **variant),
            "resumed": fit(out, case, ckpt_path=out / case / "middle.ckpt", **variant),
        }
        for case in CASES
    }


#: Inside an epoch of every case. Under max_size_cycle, the shorter set has begun again.
SAVE_AT = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "memmap_superbatch_ddp": {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 1},
    },
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case, the run on two data devices of one process."""
    out = tmp_path_factory.mktemp("one")
    (rank,) = launch(
        fit_all,
        out,
        processes=1,
        strategy="memmap_superbatch",
        devices=2,
        save_at=SAVE_AT,
    )
    return rank


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_and_resume_as_one(
    tmp_path: Path, one_process: dict[str, Any], variant: str
) -> None:
    options = {**VARIANTS[variant], "devices": 2, "save_at": SAVE_AT}
    ranks = launch(fit_all, tmp_path, processes=2, **options)
    for case in CASES:
        alone = one_process[case]["whole"]
        whole, resumed = ([rank[case][run] for rank in ranks] for run in ("whole", "resumed"))
        expected = sorted_steps([alone["seen"]])
        assert all(run["seen"][0] for run in whole), case
        assert sorted_steps([run["seen"] for run in whole]) == expected, case
        assert sorted_steps([run["seen"] for run in resumed]) == expected[SAVE_AT:], case
        first, second = expected[: len(expected) // 2], expected[len(expected) // 2 :]
        assert first != second, case
        for one, other in zip(whole, resumed, strict=True):
            assert torch.equal(one["weights"], other["weights"]), case
            # float32 sums in another order, over some 60 steps of Adam.
            torch.testing.assert_close(one["weights"], alone["weights"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
def test_one_process_resumes_bitwise(one_process: dict[str, Any], case: str) -> None:
    whole, resumed = one_process[case]["whole"], one_process[case]["resumed"]
    assert resumed["seen"] == whole["seen"][SAVE_AT:]
    assert torch.equal(resumed["weights"], whole["weights"])


def test_stream_has_the_rows_and_weights_of_the_mapping(one_process: dict[str, Any]) -> None:
    stream, mapping = (one_process[f"points {name}"]["whole"] for name in ("streamed", "in blocks"))
    assert stream["seen"] == mapping["seen"]
    assert torch.equal(stream["weights"], mapping["weights"])
