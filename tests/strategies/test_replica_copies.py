"""How the values of a module get to its replicas, for more devices than this machine has."""

from collections import Counter
from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_memmap.strategies.replicas import transfer


@given(num_devices=st.integers(2, 17), shapes=st.lists(st.lists(st.integers(0, 3)), min_size=1))
def test_devices_pass_tensors_on_and_each_sends_them_log2_times(
    num_devices: int, shapes: list[list[int]]
) -> None:
    sends: list[tuple[int, int]] = []
    copies: dict[int, tuple[int, Tensor]] = {}

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        sender, _ = copies.get(id(tensor), (0, tensor))
        sends.append((sender, device.index))
        copy = tensor.clone()
        copies[id(copy)] = device.index, copy
        return copy

    devices = [torch.device("cuda", index) for index in range(num_devices)]
    tensors = [torch.rand(shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "send", send)
        found = transfer.copies_on(tensors, devices)
    assert [receiver for _, receiver in sends] == list(range(1, num_devices))
    assert all(sender < receiver for sender, receiver in sends)
    assert max(Counter(sender for sender, _ in sends).values()) <= ceil(log2(num_devices))
    for device in devices:
        assert all(map(torch.equal, found[device], tensors))


def test_gradients_are_brought_in_one_piece_whatever_their_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Tensor] = []

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        sent.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(transfer, "send", send)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (3, 2), ())]
    grads = dict(
        zip(
            parameters,
            (torch.rand(2, 3), torch.rand(4), torch.rand(2, 3).t(), torch.rand(())),
            strict=True,
        )
    )
    found = transfer.brought(grads, torch.device("cpu"))
    assert [len(tensor) for tensor in sent] == [6 + 4 + 6 + 1]
    assert all(torch.equal(found[parameter], grad) for parameter, grad in grads.items())
