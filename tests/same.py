"""Equality of samples and batches, containers included."""

from typing import Any

import torch
from torch import Tensor


def assert_same(found: Any, expected: Any) -> None:
    """Same containers, same keys, same values, same dtypes."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
