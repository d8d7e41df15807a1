"""Results per row: the folder in which `lightning_memmap.callbacks.RowResults` keeps them.

    results/run1/
      results.json            the run, and the number of rows of its dataset
      epoch-000003/           a store of one shard: row i has the values of row i of the dataset
      parts/epoch-000004/     the epoch under way, in one part for each process

A part holds values by position in the order of the epoch, so each process appends to its own files
without looking up rows. At the end of the epoch, rank zero reads all parts and builds the store,
whose manifest is the commit. Nothing is unpickled.
"""

from lightning_memmap.results.column import Results
from lightning_memmap.results.reading import read_row_results
from lightning_memmap.results.row_log import RowLog

__all__ = ["Results", "RowLog", "read_row_results"]


def __dir__() -> list[str]:
    return __all__
