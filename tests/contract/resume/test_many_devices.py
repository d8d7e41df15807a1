"""One order from 6 to 64 data devices: a run that is resumed inside epochs again and again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, SaveAt, make_trainer, weights

#: 53 whole steps in an epoch.
ROWS, GLOBAL_BATCH, EPOCHS = 20_352, 384, 3
#: Data devices of each leg, its strategy, and the step after which it ends.
LEGS = [
    (8, "memmap_superbatch", 20),
    (16, "memmap_superbatch", 45),
    (48, "memmap_dp", 66),
    (64, "memmap_superbatch", 100),
    (6, "memmap_superbatch", 125),
    (1, "auto", None),
]


def test_run_on_many_clusters_has_the_rows_and_weights_of_one(tmp_path: Path) -> None:
    points = Points(ROWS)

    def fit(devices: int, strategy: str, stop: int | None, **options: Any) -> Regression:
        torch.manual_seed(0)
        module = Regression()
        data = MemmapDataModule(
            points,
            store_dir=tmp_path / "stores",
            batch_size=GLOBAL_BATCH // devices,
            sampler=None,
            seed=4,
        )
        make_trainer(
            tmp_path,
            strategy=strategy,
            devices=devices,
            max_epochs=EPOCHS,
            limit_val_batches=0,
            callbacks=[SaveAt(stop, tmp_path / f"{stop}.ckpt", ends_run=True)],
        ).fit(module, data, **options)
        return module

    whole = fit(1, "auto", None)
    last, seen, saved = whole, [], None
    for devices, strategy, stop in LEGS:
        last = fit(devices, strategy, stop, ckpt_path=saved)
        steps = last.seen["train"]
        if strategy == "memmap_dp":
            # A replica sees its part of a step.
            flat = [row for step in steps for row in step]
            first = sum(map(len, seen))
            expected = [row for step in whole.seen["train"] for row in step][first:]
            assert sorted(flat) == sorted(expected[: len(flat)])
            count = len(flat) // GLOBAL_BATCH
            seen += whole.seen["train"][len(seen) : len(seen) + count]
        else:
            seen += steps
        saved = tmp_path / f"{stop}.ckpt"
    assert seen == whole.seen["train"]
    torch.testing.assert_close(weights(last), weights(whole), rtol=0, atol=1e-6)


def test_epoch_of_another_striping_is_resumed_by_naming_it(tmp_path: Path) -> None:
    def fit(devices: int, **options: Any) -> Regression:
        module = Regression()
        settings = {"limit_val_batches": 0, "strategy": "memmap_superbatch", "devices": devices}
        callbacks = [SaveAt(options.pop("stop", None), tmp_path / "stopped.ckpt", ends_run=True)]
        ckpt_path = options.pop("ckpt_path", None)
        data = MemmapDataModule(
            Points(480), store_dir=tmp_path / "stores", batch_size=80 // devices, **options
        )
        trainer = make_trainer(tmp_path, callbacks=callbacks, **settings)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return module

    counts = "1, 2, 3, 4, 6, 8, 12 or 24 data devices"
    with pytest.warns(UserWarning, match=f"24 shards, which 16 data devices .* 32, .* {counts}"):
        begun = fit(16, stop=2)
    with pytest.raises(ValueError, match="num_shards=32"):
        fit(8, ckpt_path=tmp_path / "stopped.ckpt")
    resumed = fit(8, ckpt_path=tmp_path / "stopped.ckpt", num_shards=32)
    whole = fit(4, num_shards=32)
    assert begun.seen["train"] + resumed.seen["train"] == whole.seen["train"]
    assert torch.equal(weights(resumed), weights(whole))
