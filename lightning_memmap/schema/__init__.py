"""The schema of a sample: its nesting and its fields.

A sample is any nesting of tuple, list, dict, named tuple, dataclass and TensorDict around leaves:
tensors, numpy arrays and scalars, PIL images, numbers, bools, text, bytes and times. Each leaf is a
field. Its dtype and shape are the same in every row, except for leading dimensions that vary from
row to row. A long list or tuple of numbers of one dtype is a single field. In a list of records,
each leaf of a record is a field. A part that is None in some rows has a bool field, its mask.
`Schema` is a value and reads or writes no file.
"""

from lightning_memmap.schema.forms import Decode, Layout, Pad, Windows
from lightning_memmap.schema.structure import Masked

__all__ = ["Decode", "Layout", "Masked", "Pad", "Windows"]


def __dir__() -> list[str]:
    return __all__
