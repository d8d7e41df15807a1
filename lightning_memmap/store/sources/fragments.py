"""The row groups of datasets of pyarrow and Lance, which consist of fragments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.dataset import FileSystemDataset, IpcFileFormat, ParquetFileFormat
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.store.sources.arrow_types import check_lossless, takeable_type
from lightning_memmap.store.sources.row_groups import RowGroups, count_recorded_nulls

#: Rows of a fragment of Lance that are read at once.
_LANCE_ROWS = 2**16


class FragmentRowGroups(RowGroups):
    """The row groups of a dataset of pyarrow or Lance.

    Args:
        dataset: The dataset.
        choose: Returns the columns to keep, from all names.
    """

    def __init__(self, dataset: Any, choose: Callable[[list[str]], list[str]]) -> None:
        super().__init__()
        is_lance = not isinstance(dataset, FileSystemDataset)
        if is_lance:
            self.files = [(str(dataset.uri), int(dataset.version), None)]
        else:
            infos = dataset.filesystem.get_file_info(dataset.files)
            self.files = [(info.path, info.size, info.mtime_ns) for info in infos]
        self.types = {}
        for name in choose(dataset.schema.names):
            arrow_type = dataset.schema.field(name).type
            check_lossless(name, arrow_type)
            self.types[name] = takeable_type(arrow_type)
        #: The fragment of each row group, and the arguments that read the row group.
        self._groups: list[tuple[Any, dict[str, Any]]] = []
        sizes: list[int] = []
        for fragment in dataset.get_fragments():
            if is_lance:
                num_rows = fragment.count_rows()
                for start in range(0, num_rows, _LANCE_ROWS):
                    count = min(_LANCE_ROWS, num_rows - start)
                    self._groups.append((fragment, {"offset": start, "limit": count}))
                    sizes.append(count)
                continue
            is_parquet = isinstance(dataset.format, ParquetFileFormat)
            for part in fragment.split_by_row_group() if is_parquet else [fragment]:
                # The schema adds the columns that the names of folders hold.
                self._groups.append((part, {"schema": dataset.schema}))
                sizes.append(part.row_groups[0].num_rows if is_parquet else part.count_rows())
        self.stops = np.cumsum(sizes, dtype=np.int64)

    @override
    def _read_column(self, group: int, name: str) -> Any:
        fragment, arguments = self._groups[group]
        try:
            return fragment.to_table(columns=[name], **arguments).column(name)
        except (pa.ArrowException, OSError) as error:
            where = getattr(fragment, "path", self.files[0][0])
            raise DatasetError(f"{where}: it can't be read ({describe_error(error)})") from None

    @override
    def num_nulls(self, group: int, name: str) -> int | None:
        fragment = self._groups[group][0]
        if not hasattr(fragment, "row_groups"):
            return None
        number = fragment.row_groups[0].id
        return count_recorded_nulls(fragment.metadata.row_group(number), name)


def has_fragments(dataset: Any) -> bool:
    """Return whether single columns of a dataset's fragments can be read: other formats store rows,
    and a filtered dataset has no fragments."""
    if not isinstance(dataset, FileSystemDataset):
        return hasattr(dataset, "uri") and hasattr(dataset, "version")  # A dataset of Lance.
    if not isinstance(dataset.format, (ParquetFileFormat, IpcFileFormat)):
        return False
    try:
        dataset.get_fragments()
    except ValueError:
        return False
    return True
