"""One order from 6 to 64 data devices: a run that is resumed inside epochs again and again."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Mixture, Subset
from lightning_memmap.schema import Windows
from lightning_memmap.store import TokenStream
from tests.support.models import Points, Regression, make_trainer, weights

ROWS, GLOBAL_BATCH, EPOCHS = 20_160, 192, 3
#: Data devices of each leg, its strategy, and the step after which it ends.
LEGS = [
    (8, "memmap_superbatch", 40),
    (16, "memmap_superbatch", 90),
    (48, "memmap_dp", 131),
    (64, "memmap_superbatch", 200),
    (6, "memmap_superbatch", 250),
    (1, "auto", None),
]


class Stop(L.Callback):
    """Saves after a step, and ends the run."""

    def __init__(self, step: int | None, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.slow
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
            callbacks=[Stop(stop, tmp_path / f"{stop}.ckpt")],
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
        callbacks = [Stop(options.pop("stop", None), tmp_path / "stopped.ckpt")]
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


def subset_of_a_large_store() -> dict[str, Any]:
    return {"train_dataset": Points(20_160), "subset": Subset(range(0, 20_160, 120))}


def mixture() -> dict[str, Any]:
    sets = {"a": Points(15_000), "b": Points(5_300, offset=15_000)}
    return {"train_dataset": sets, "sampler": Mixture({"a": 0.6, "b": 0.4})}


def tokens() -> dict[str, Any]:
    stream = TokenStream(torch.arange(800_000) % 50_000, length=40)
    return {"train_dataset": stream, "windows": Windows("tokens", 40, 40)}


@pytest.mark.parametrize(
    ("make", "num_shards"), [(subset_of_a_large_store, 24), (mixture, 192), (tokens, 192)]
)
def test_shards_are_as_many_as_the_rows_that_are_trained_on_ask_for(
    make: Callable[[], dict[str, Any]], num_shards: int, tmp_path: Path
) -> None:
    found = []
    for devices in (8, num_shards // 2):
        topology = DataTopology((torch.device("cpu"),) * devices)
        data = MemmapDataModule(**make(), store_dir=tmp_path, batch_size=192 // devices)
        data.prepare_data()
        order = data.train_sampler(data.open_train_store(), topology)
        assert order.num_shards == num_shards
        found.append(order.dataset_rows(1, range(order.num_positions)).tolist())
        assert found[-1] != order.dataset_rows(2, range(order.num_positions)).tolist()
        assert found[-1] != sorted(found[-1])
    assert found[0] == found[1]


def test_rows_in_dataset_order_are_striped_again_without_a_word(tmp_path: Path) -> None:
    data = MemmapDataModule(Points(480), store_dir=tmp_path, shuffle=False)
    data.prepare_data()
    topology = DataTopology((torch.device("cpu"),) * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order = data.train_sampler(data.open_train_store(), topology)
    assert order.num_shards == 25
    assert order.dataset_rows(0, range(480)).tolist() == list(range(480))
