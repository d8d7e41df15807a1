"""From row sources to batches: fetch, transform, collate, assemble.

row_source       rows in one place, and how they come into a batch
resident         on a device, on the host, or in the file mapping
streamed         in the files, read window by window (window_layout, window_places,
                 window_items, window_series, window_reads, window_reader)
split            all sources of a split (store_offsets, upload)
fetch            the rows of coming steps (steps, buffers, device_streams)
decoding         images of the next step are decoded while a step is used
transform        batch transforms, repeatable
super_batch      the batches of all data devices in one step (nested)
variable_rows    rows that differ in length, not copied yet
variable_batch   what a batch has for them (variable_padding, variable_steps, variable_leaves)
loader           super-batches in the order of the sampler, or assembled (state, prefetch)
batches          the same without a Trainer
"""

from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.row_source import EpochRows, RowSource
from lightning_memmap.loading.split import SplitRows, load_split
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.transform import OnSuperBatch
from lightning_memmap.loading.variable_batch import FormedCollate, Padded, Scaled
from lightning_memmap.schema import RowList

__all__ = [
    "BatchLoader",
    "EpochRows",
    "FormedCollate",
    "OnSuperBatch",
    "Padded",
    "RowList",
    "RowSource",
    "Scaled",
    "SplitRows",
    "SuperBatch",
    "SuperBatchLoader",
    "has_streams",
    "load_split",
]
