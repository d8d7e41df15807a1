"""What is given as a dataset, and is none: the way out, in words for a message."""

import inspect
from typing import Any

#: By library and class, the method that makes a table of one that is computed or read only then.
_FRAMES = {
    ("pandas", "DataFrame"): "",
    ("polars", "DataFrame"): "",
    ("polars", "LazyFrame"): "collect",
    ("pyarrow", "Table"): "",
    ("pyarrow", "RecordBatch"): "",
    ("pyarrow", "RecordBatchReader"): "read_all",
    ("pyarrow", "Dataset"): "to_table",
    ("pyarrow", "Scanner"): "to_table",
    ("duckdb", "DuckDBPyRelation"): "to_arrow_table",
}


def library_of(value: Any) -> str:
    """Find which library of tables a value is of, also where its class is derived from theirs.

    Returns:
        ``pandas``, ``polars`` or ``pyarrow``; empty for any other value.
    """
    known = {library for library, _ in _FRAMES}
    modules = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((module for module in modules if module in known), "")


def is_frame(value: Any) -> bool:
    """Whether a value is a table of a known library, or will be one when it is computed or read."""
    return _method_of(value) is not None


def as_table(value: Any) -> Any:
    """Compute or read a table, where that is still to be done.

    Args:
        value: One that `is_frame` knows.

    Returns:
        A DataFrame of pandas or polars, or a Table or RecordBatch of pyarrow.
    """
    method = _method_of(value)
    return getattr(value, method)() if method else value


def _method_of(value: Any) -> str | None:
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)
    return next((_FRAMES[name] for name in names if name in _FRAMES), None)


def is_dict_of_splits(value: Any) -> bool:
    """Whether a value is a ``DatasetDict`` of Hugging Face, whose entries are datasets."""
    kinds = ("DatasetDict", "IterableDatasetDict")
    return isinstance(value, dict) and any(kind.__name__ in kinds for kind in type(value).__mro__)


def way_out(value: Any) -> str | None:
    """Say what to give instead of a value that holds rows, but is no dataset.

    Args:
        value: What was given as a dataset.

    Returns:
        What it is and what to give, to follow the name of the argument; None where the value may be
        a dataset, or where nothing is known of it.
    """
    kind = type(value).__name__
    if is_dict_of_splits(value):
        return f"a {kind} has a dataset for each split: choose one of the splits {list(value)}"
    names = list(value) if isinstance(value, dict) else []
    is_dict = bool(names) and all(isinstance(name, str) for name in names)
    if is_dict or is_frame(value):
        return f"a {kind} has columns and no rows: give lightning_memmap.ColumnDataset(...) of it"
    if inspect.isgeneratorfunction(value):
        return f"{value.__name__} is a generator function: call it, and give what it returns"
    if isinstance(value, type):
        return f"{value.__name__} is a class: give an instance of it"
    return None
