"""From rows to batches: located, fetched, decoded, transformed, assembled.

split            the sources of a split, made for its placement
row_source       what a source is: memory, or a stream
memory           rows in the file mapping, or copied, and where each of them is
stream           rows read window by window (row_file)
fetch            the rows of coming steps (buffers, device_streams)
decoding         images of the next step are decoded while a step is used (image_decoder)
ahead            the threads of both
variable_rows    rows that differ in length, not copied yet: padded, jagged or listed
variable_batch   nests a batch, each field in its form
packed_rows      documents of a field, pack after pack
packed_batch     fetches packs, and nests a batch of them (packing)
transform        batch transforms, repeatable
super_batch      the batches of all data devices in one step (nested)
step_weight      how much of a step's loss belongs to this process
loader           super-batches in an order, or assembled (state, prefetch)
batches          the same without a Trainer
"""

from lightning_memmap.loading.image_decoder import Scaled
from lightning_memmap.loading.packing import Packing
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.schema.fields import RowList

__all__ = ["Packing", "Padded", "RowList", "Scaled"]


def __dir__() -> list[str]:
    return __all__
