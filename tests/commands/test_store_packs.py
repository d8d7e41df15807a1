"""The commands that look packs up: the rows of a step, and what packing leaves unused."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_memmap import MemmapDataModule, build_store
from lightning_memmap.commands.rows import describe_step, find_steps
from lightning_memmap.commands.store import store_command
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Packed
from tests.loading.test_packed_batch import LENGTH, Documents

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> MemmapDataModule:
    made = MemmapDataModule(
        Documents(), store_dir=tmp_path, batch_size=2, sampler=Packed("tokens", LENGTH)
    )
    made.prepare_data()
    return made


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_rows_of_a_step_are_the_documents_of_its_packs(
    data: MemmapDataModule, devices: int
) -> None:
    topology = DataTopology((CPU,) * devices)
    order = data.make_train_order(data.open_train_store(), topology)
    seen = []
    for step in range(-(-order.num_positions // (2 * devices))):
        found = describe_step(data, order, topology, 1, step)
        by_device = [row for each in found["devices"] for row in each["rows"]]
        assert sorted(by_device) == sorted(found["rows"])
        for each in found["devices"]:
            own = range(found["first"] + (each["device"] - found["first"]) % devices, found["last"])
            assert each["rows"] == order.dataset_rows(1, own[::devices]).tolist()
        seen += found["rows"]
    assert sorted(seen) == [*range(120)]


def test_rows_are_found_in_the_steps_of_their_packs(data: MemmapDataModule) -> None:
    topology = DataTopology((CPU,))
    order = data.make_train_order(data.open_train_store(), topology)
    for row in (0, 57, 119):
        (step,) = find_steps(data, order, topology, 0, [str(row)])
        assert row in describe_step(data, order, topology, 0, step)["rows"]


def test_plan_says_what_packing_leaves_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Documents()
    build_store(dataset, tmp_path / "train")
    assert store_command(["plan", str(tmp_path), "--pack", f"tokens={LENGTH}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = re.search(r"fill ([0-9,]+) packs of 32 tokens.* ([0-9.]+)% is unused", printed)
    assert found, printed
    packs = int(found[1])
    unused = 1 - dataset.lengths.sum() / (packs * LENGTH)
    assert float(found[2]) == pytest.approx(100 * unused, abs=0.06)
    assert store_command(["plan", str(tmp_path), "--pack", "tokens=16"]) == 0
    long = int(np.count_nonzero(dataset.lengths > 16))
    assert f"{long} rows are longer" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("pack", ["tokens", "tokens=0", "=5", "tokens=many", "other=5"])
def test_wrong_pack_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pack: str
) -> None:
    build_store(Documents(), tmp_path / "train")
    assert store_command(["plan", str(tmp_path), f"--pack={pack}"]) == 2
    name = pack.partition("=")[0] if pack.startswith("other") else "pack"
    assert name in capsys.readouterr().err
