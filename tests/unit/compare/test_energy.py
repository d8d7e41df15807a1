"""The energy of devices, with a stand-in for NVML."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.compare.run.energy import EnergyMeter

UUIDS = "one", "two", "three"


class FakeNVMLError(Exception):
    pass


class Nvml:
    """Takes the place of ``pynvml``."""

    NVMLError = FakeNVMLError

    def __init__(self) -> None:
        self.used_mj = {"GPU-one": 5000, "GPU-two": 250, "GPU-three": 7}

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if handle not in self.used_mj:
            raise FakeNVMLError("Not Supported")
        return self.used_mj[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()

    def properties(index: int) -> Any:
        return SimpleNamespace(uuid=UUIDS[index])

    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return fake


def test_energy_is_that_of_the_first_devices_in_joules(nvml: Nvml) -> None:
    meter = EnergyMeter(2)
    assert meter.read_joules() == 5.25
    nvml.used_mj["GPU-two"] += 1000
    nvml.used_mj["GPU-three"] += 1000
    assert meter.read_joules() == 6.25


def test_energy_of_a_device_that_does_not_tell_is_unknown(nvml: Nvml) -> None:
    del nvml.used_mj["GPU-two"]
    assert EnergyMeter(2).read_joules() is None


def test_energy_without_the_library_or_without_devices_is_unknown(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EnergyMeter(0).read_joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter(2).read_joules() is None
