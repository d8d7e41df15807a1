"""Fields: what one sample consists of, and how a batch is put back together.

A sample is any nesting of tuple, list, dict, named tuple, dataclass, TensorDict
around leaves: tensors, numpy arrays and scalars, PIL images, numbers, bools, text, bytes and
times. Each leaf is a field with a dtype and a shape, which every row shares, except for
leading dimensions that are declared to differ from row to row or were found to. A long list or
tuple of numbers of one dtype is one field as well. So is each part of the records of a list of any
length. What is None in some rows has a field beside it that says in which.
`Schema` is a value: it touches no file.
"""

from lightning_memmap.schema.forms import Decode, Layout, Pad, Windows
from lightning_memmap.schema.structure import Masked

__all__ = ["Decode", "Layout", "Masked", "Pad", "Windows"]


def __dir__() -> list[str]:
    return __all__
