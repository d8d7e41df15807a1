"""Several processes train while one of them has the store built: as from a finished store."""

import subprocess
from pathlib import Path

import pytest
import torch

from lightning_memmap.store import push_store, verify_store
from tests.support.distributed.harness import ROOT, TIMEOUT_S, launch
from tests.support.distributed.scenarios.first_epoch import ORDERS, assert_none_is_read_twice
from tests.support.preloaded import python

pytestmark = pytest.mark.slow

FIT = "first_epoch.fit"


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("ddp", 2), ("memmap_superbatch_ddp", 2), ("memmap_fsdp2", 2), ("memmap_pipeline", 2)],
)
def test_processes_train_as_from_a_finished_store(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    options = {"strategy": strategy, "devices": devices}
    found = {}
    for build in ("first", "while_training"):
        out = tmp_path / build
        out.mkdir()
        found[build] = launch(FIT, out, processes=2, build=build, **options)
    for first, meanwhile in zip(*found.values(), strict=True):
        assert first["seen"] == meanwhile["seen"]
        assert torch.equal(first["weights"], meanwhile["weights"])
    assert_none_is_read_twice("validated", tmp_path / "while_training")
    assert verify_store(tmp_path / "while_training" / "stores" / "train") == []


@pytest.mark.slow
def test_processes_train_in_every_order(tmp_path: Path) -> None:
    ranks = launch("first_epoch.fit_all", tmp_path, processes=2, strategy="ddp", devices=2)
    for order in ORDERS:
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
        found[name] = launch(FIT, out, processes=2, build=build, **options, **given)
        if not given:
            for store in {path.parent for path in out.glob("stores/**/manifest.json")}:
                push_store(store, f"file://{tmp_path}/pushed/{store.relative_to(out / 'stores')}")
    for directory, url in zip(*found.values(), strict=True):
        assert directory["seen"] == url["seen"]
        assert torch.equal(directory["weights"], url["weights"])


@pytest.mark.slow
def test_training_whose_processes_are_killed_goes_on_bit_for_bit() -> None:
    command = [python(), "-m", "tests.programs.reliability.training", "--kills", "6"]
    ended = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
