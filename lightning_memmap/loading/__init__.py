"""From rows to batches: located, fetched, decoded, transformed, assembled.

split            the sources of the rows of a split, loaded where its placement wants them
row_source       the contract of a source: memory, or a stream
memory           rows in the file mapping, or copied to a device or the host
stream           rows read block by block (row_file)
fetch            fetches the rows of the next steps (buffers, device_streams)
decoding         decodes the images of the next steps in threads (ahead)
variable_rows    rows that differ in length: padded, jagged or listed
variable_batch   collates a batch, each field in its form
packed_rows      the documents of a field, pack after pack
packed_batch     fetches packs, and collates a batch of them (packing)
transform        runs batch transforms repeatably (row_random, philox)
super_batch      collates, transforms and assembles the batches of a step (nested)
step_weight      the weight of a process in the loss of a step
loader           yields super-batches, or assembled batches (progress, prefetch)
batches          yields batches without a Trainer
"""

from lightning_memmap.loading.decoding import Scaled
from lightning_memmap.loading.packing import Packing
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.schema.fields import RowList

__all__ = ["Packing", "Padded", "RowList", "Scaled"]


def __dir__() -> list[str]:
    return __all__
