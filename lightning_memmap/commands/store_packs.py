"""``lightning-memmap store plan --pack``: how many packs rows fill, and what they leave unused."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from lightning_memmap.sampling.packed import Packed
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.store import Store
from lightning_memmap.tables import GOOD, UNSURE, text

#: Up to this fraction of padding, a note is shown as good.
_LITTLE_PADDING = 0.05


def describe_packs(stores: Mapping[str, Store], pack: str) -> list[Text]:
    """Plan the packs of stores.

    Args:
        stores: The stores by name.
        pack: A field and the tokens of a pack, such as ``tokens=2048``.

    Raises:
        ValueError: ``pack`` isn't of this form, or a store has no such field of variable length.
    """
    field, _, number = pack.partition("=")
    if not field or not number.isdecimal() or not int(number):
        raise ValueError(f"pack={pack!r}: pass a field and the tokens of a pack, like tokens=2048")
    length = int(number)
    notes = []
    for name, store in stores.items():
        num_long = int(np.count_nonzero(store.lengths(field) > length))
        packed = Packed(field, length, overflow="split" if num_long else "error")
        order = packed.make(Pool.of(store.rows(), store.num_shards), 0, store)
        per_pack = order.documents.documents_per_group.sum() / order.num_positions
        words = (
            f"{name}: {store.num_rows:,} rows fill {order.num_positions:,} packs of {length:,}"
            f" tokens, {per_pack:.1f} documents each; {order.padding_fraction:.1%} is unused."
        )
        if num_long:
            words += f" {num_long:,} rows are longer: choose their overflow, here 'split'."
        notes.append(text(words, GOOD if order.padding_fraction <= _LITTLE_PADDING else UNSURE))
    return notes
