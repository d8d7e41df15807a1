"""Several processes train while one of them has the store built: as from a finished store."""

import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import (
    Bucketed,
    Curriculum,
    KFold,
    Mixture,
    RandomSplit,
    Subset,
    Weighted,
)
from lightning_memmap.store import push_store, verify_store
from tests.support.datasets import DECODE, EncodedImages, Logged, Ragged
from tests.support.models import Brightness, Points, Regression, Sounds, make_trainer
from tests.support.preloaded import python
from tests.support.processes import ROOT, TIMEOUT_S, launch

pytestmark = pytest.mark.slow


ROWS, GLOBAL_BATCH = 331, 24
POINTS: tuple[Any, Any] = (Regression, Points(ROWS))
#: Of sounds and images, fewer.
RAGGED: tuple[Any, Any] = (Sounds, Ragged(150))
SETS: tuple[Any, Any] = (Regression, {"a": Points(231), "b": Points(100, 5000)})
#: Some sets have but empty sounds.
SOUNDS: tuple[Any, Any] = (Sounds, {"a": Ragged(110), "b": Ragged(40, longest=0)})
HALVES = Mixture({"a": 0.5, "b": 0.5})
BY_BATCH = Mixture({"a": 0.5, "b": 0.5}, by_batch=True)
LENGTHS = torch.arange(ROWS) * 37 % 50
#: How training goes: options, and ``of`` other rows than points, in one set or several.
ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "blocks": {"shuffle_block": 3},
    "streamed": {"shuffle_block": 3, "residency": "stream"},
    "on the device": {"residency": "device"},
    "by weight": {"sampler": Weighted(torch.arange(ROWS) % 5 + 0.5)},
    "a part": {"sampler": Weighted(torch.arange(ROWS) < 100), "shuffle_block": 4},
    "buckets": {"sampler": Bucketed(LENGTHS, GLOBAL_BATCH, num_buckets=4)},
    "chosen rows": {"subset": {"train": Subset(rows=range(7, 200, 3))}},
    "held out": {"subset": RandomSplit(0.2)},
    "a fold": {"subset": KFold(5), "member": 2},
    "steps left out": {"skip_steps": [1, 2, 20], "drop_last": True},
    "row numbers": {"with_row_numbers": True, "num_shards": 8},
    "validated": {"val_dataset": Points(60, 1000)},
    "validated on several": {"val_dataset": [Points(60, 1000), Points(30, 2000)]},
    **{
        form: {"of": RAGGED, "layout": {"sound": form, "ids": form, "image": "list"}}
        for form in ("pad", "jagged", "list")
    },
    "streamed sounds": {
        "of": RAGGED,
        "layout": {"sound": "pad", "ids": "list", "image": "list"},
        "shuffle_block": 2,
        "residency": "stream",
    },
    "sounds streamed in order": {
        "of": RAGGED,
        "layout": {"sound": "pad", "ids": "list", "image": "list"},
        "shuffle": False,
        "residency": "stream",
    },
    "images": {"of": (Brightness, EncodedImages(100)), "decode": DECODE},
    "mixture": {"of": SETS, "sampler": Mixture({"a": 0.8, "b": 0.2})},
    "mixture by batch": {"of": SETS, "sampler": BY_BATCH},
    "mixture in blocks": {"of": SETS, "sampler": HALVES, "shuffle_block": 3},
    "streamed mixture": {
        "of": SETS,
        "sampler": HALVES,
        "shuffle_block": 3,
        "residency": "stream",
    },
    "chosen rows of sets": {
        "of": SETS,
        "sampler": HALVES,
        "subset": {"train/a": Subset(rows=range(7, 200, 3))},
    },
    "curriculum": {"of": SETS, "sampler": Curriculum({0: HALVES, 1: Mixture({"a": 1, "b": 9})})},
    "sounds by batch": {
        "of": SOUNDS,
        "sampler": BY_BATCH,
        "layout": {"sound": "pad", "ids": "jagged", "image": "list"},
    },
    "streamed mixture of sounds": {
        "of": SOUNDS,
        "sampler": HALVES,
        "layout": {"sound": "list", "ids": "pad", "image": "list"},
        "shuffle_block": 2,
        "residency": "stream",
    },
}


#: Of these, some in several processes: of each way to choose rows, and of each form of a batch.
SEVERAL = (
    "in order",
    "streamed",
    "a part",
    "buckets",
    "held out",
    "steps left out",
    "validated on several",
    "pad",
    "streamed sounds",
    "images",
    "mixture by batch",
    "chosen rows of sets",
    "curriculum",
    "streamed mixture of sounds",
)


def sets_of(order: str) -> dict[str, Dataset[Any]]:
    """The training sets by name, that of one alone under ``rows``."""
    found = ORDERS[order].get("of", POINTS)[1]
    return found if isinstance(found, dict) else {"rows": found}


def assert_none_is_read_twice(order: str, out: Path) -> Counter[tuple[str, int]]:
    """Check that only the few rows that a build compares were read again. Return what was read."""
    read = Counter[tuple[str, int]]()
    for name in sets_of(order):
        found = Counter(map(int, (out / f"{name}.rows").read_text().split()))
        assert sum(count > 1 for count in found.values()) <= 8, (order, name)
        read |= {(name, row): count for row, count in found.items()}
    return read


class Slow(Logged):
    """Sleeps before each row."""

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(row)


def fit(
    out: Path,
    strategy: str,
    devices: int,
    build: str,
    order: str = "validated",
    url: str | None = None,
    epochs: int = 3,
) -> dict[str, Any]:
    """Train on datasets, or on their stores at a URL."""
    out.mkdir(parents=True, exist_ok=True)
    options = {**ORDERS[order], "store_dir": out / "stores", "build": build}
    kind, _ = options.pop("of", POINTS)
    if url is None:
        kind_of = Logged if build == "first" else Slow
        read = {name: kind_of(each, out / f"{name}.rows") for name, each in sets_of(order).items()}
        options |= {"train_dataset": read.get("rows", read)}
        options |= {"num_workers": 2, "fingerprint": "1"}
    else:
        options |= {"val_dataset": None, "store_dir": url}
        os.environ["LIGHTNING_MEMMAP_CACHE"] = str(out / "cache")
    data = MemmapDataModule(batch_size=GLOBAL_BATCH // devices, **options)
    trainer = make_trainer(out, strategy=strategy, devices=devices, max_epochs=epochs)
    module = kind()
    trainer.fit(module, data)
    assert "stored" not in trainer.callback_metrics | trainer.progress_bar_metrics
    return {"seen": module.seen, "weights": local_weights(module)}


def fit_all(out: Path, **options: Any) -> dict[str, Any]:
    """Train in each order, from stores that are built first or meanwhile."""
    return {
        order: {
            build: fit(out / order / build, build=build, order=order, epochs=2, **options)
            for build in ("first", "while_training")
        }
        for order in SEVERAL
    }


def local_weights(module: nn.Module) -> Tensor:
    """The parameters, or the parts of them, that this process has."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([each.detach().flatten() for each in local if not each.is_meta])


# `ddp` trains in every order, below.
@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2", "memmap_pipeline"])
def test_processes_train_as_from_a_finished_store(tmp_path: Path, strategy: str) -> None:
    options = {"strategy": strategy, "devices": 2}
    found = {}
    for build in ("first", "while_training"):
        out = tmp_path / build
        out.mkdir()
        found[build] = launch(fit, out, processes=2, build=build, **options)
    for first, meanwhile in zip(*found.values(), strict=True):
        assert first["seen"] == meanwhile["seen"]
        assert torch.equal(first["weights"], meanwhile["weights"])
    assert_none_is_read_twice("validated", tmp_path / "while_training")
    assert verify_store(tmp_path / "while_training" / "stores" / "train") == []


def test_processes_train_in_every_order(tmp_path: Path) -> None:
    ranks = launch(fit_all, tmp_path, processes=2, strategy="ddp", devices=2)
    for order in SEVERAL:
        for first, meanwhile in (rank[order].values() for rank in ranks):
            assert first["seen"] == meanwhile["seen"], order
            assert torch.equal(first["weights"], meanwhile["weights"]), order
        assert_none_is_read_twice(order, tmp_path / order / "while_training")


@pytest.mark.parametrize(
    ("strategy", "order"),
    [("ddp", "validated"), ("memmap_superbatch_ddp", "streamed mixture of sounds")],
)
def test_processes_train_on_a_url_as_on_its_directory(
    tmp_path: Path, strategy: str, order: str
) -> None:
    found, options = {}, {"strategy": strategy, "devices": 2, "order": order}
    for name, given in (("directory", {}), ("url", {"url": f"file://{tmp_path}/pushed"})):
        out = tmp_path / name
        out.mkdir()
        build = "while_training" if given else "first"
        found[name] = launch(fit, out, processes=2, build=build, **options, **given)
        if not given:
            for store in {path.parent for path in out.glob("stores/**/manifest.json")}:
                push_store(store, f"file://{tmp_path}/pushed/{store.relative_to(out / 'stores')}")
    for directory, url in zip(*found.values(), strict=True):
        assert directory["seen"] == url["seen"]
        assert torch.equal(directory["weights"], url["weights"])


def test_training_whose_processes_are_killed_goes_on_bit_for_bit() -> None:
    command = [python(), "-m", "tests.programs.reliability.training", "--kills", "8"]
    ended = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
