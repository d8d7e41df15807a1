"""Reading committed results, of one run or of the members of several."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.errors import StoreError, check_integer, nearest, nearest_file
from lightning_memmap.results.folder import ResultFolder
from lightning_memmap.sampling.columns import DatasetIdentity

if TYPE_CHECKING:
    from tensordict import TensorDict

#: Which epochs to read.
Keep: TypeAlias = Literal["last", "all"] | int
_MEMBER = "{member}"


def read_row_results(path: str | Path, keep: Keep = "last", container: str = "tensordict") -> Any:
    """Read the results that `lightning_memmap.callbacks.RowResults` has committed.

    Args:
        path: The folder of the results. If it contains ``{member}``, the last results of all
            members are joined, such as the predictions of folds for the rows that they held out. A
            row that several members have seen has the mean of their values.
        keep: ``"last"`` for the last epoch, ``"all"``, or the number of last epochs.
        container: ``"tensordict"``, ``"arrow"`` or ``"pandas"``.

    Returns:
        A TensorDict on the CPU in dataset order, of batch size (N,) for ``"last"`` and else
        (epochs, N). It has each key of the results with its shape and dtype; ``"seen"``, bool,
        which is False for rows without a value; and ``"epoch"``, int64. Floating-point values of
        such rows are NaN, other values 0. Values of a single epoch are memory-mapped, and writing
        to them changes no file. Or an Arrow table or a pandas DataFrame with the columns ``epoch``,
        ``row_number`` and the keys, epoch after epoch, in which missing values are null and
        tensors are lists. In a DataFrame, integers and bools of which some are missing have a
        nullable dtype, such as Int64.

    Raises:
        StoreError: There are no results, or they are damaged; or members have different fields, or
            different values that are not floating-point for one row.
        ValueError: ``keep`` or ``container`` is another value, or ``keep`` isn't ``"last"`` for
            several members.
    """
    if container not in ("tensordict", "arrow", "pandas"):
        raise ValueError(f"container={container!r}: choose tensordict, arrow or pandas")
    table = read_epochs(path, check_keep(keep))
    if container == "tensordict":
        return table
    arrow = _as_arrow(table)
    return arrow if container == "arrow" else _as_pandas(arrow)


def _as_arrow(table: "TensorDict") -> Any:
    """Return results as an Arrow table, epoch after epoch."""
    import pyarrow as pa  # An optional dependency.

    num_rows = table.batch_size[-1]
    table = table.reshape(-1)
    is_missing = ~table["seen"].numpy()
    row_numbers = torch.arange(num_rows).repeat(len(table) // num_rows)
    columns = {"epoch": pa.array(table["epoch"].numpy()), "row_number": row_numbers.numpy()}
    for name, value in table.items():
        if name in ("seen", "epoch"):
            continue
        values = (value.float() if value.dtype == torch.bfloat16 else value).contiguous()
        if values.ndim == 1:
            columns[name] = pa.array(values.numpy(), mask=is_missing)
            continue
        array = pa.array(values.reshape(-1).numpy())
        for size in values.shape[:1:-1]:
            array = pa.FixedSizeListArray.from_arrays(array, size)
        mask = pa.array(is_missing)
        columns[name] = pa.FixedSizeListArray.from_arrays(array, values.shape[1], mask=mask)
    return pa.table(columns)


def _as_pandas(arrow: Any) -> Any:
    """Return a table as a DataFrame, in which missing integers and bools don't become floats."""
    import pandas as pd  # Optional dependencies.
    import pyarrow as pa

    frame = arrow.to_pandas()
    for name, column in zip(arrow.column_names, arrow.columns, strict=True):
        nullable = None
        if pa.types.is_boolean(column.type):
            nullable = "boolean"
        elif pa.types.is_integer(column.type):
            nullable = str(column.type).replace("i", "I").replace("u", "U")
        if nullable is not None and column.null_count:
            dtype = pd.api.types.pandas_dtype(nullable)
            frame[name] = column.to_pandas(types_mapper=lambda _, dtype=dtype: dtype)
    return frame


def check_keep(keep: Keep) -> Keep:
    """Check which epochs to read."""
    if keep in ("last", "all"):
        return keep
    choices = "'last', 'all', or the number of last epochs"
    if isinstance(keep, str):
        raise ValueError(f"keep={keep!r}: {choices}")
    return check_integer("keep", keep, 1, choices)


def read_epochs(path: str | Path, keep: Keep, before: int | None = None) -> "TensorDict":
    """Read results of epochs before one; see `read_row_results`."""
    from tensordict import TensorDict  # Importing it takes long.

    folders = folders_of(path)
    if _MEMBER in str(path):
        _check_one_dataset(folders)
        if keep != "last":
            raise ValueError(
                f"keep={keep!r} with {str(path)!r}: members may have trained for different numbers"
                " of epochs: read each member by itself"
            )
        return _join([read_epoch(folder, _epochs(folder, before)[-1]) for folder in folders])
    folder = folders[0]
    epochs = _epochs(folder, before)
    if keep == "last":
        return read_epoch(folder, epochs[-1])
    kept = epochs if keep == "all" else epochs[-int(keep) :]
    tables = [read_epoch(folder, epoch) for epoch in kept]
    for epoch, table in zip(kept, tables, strict=True):
        for name, value in table.items():
            first = tables[0].get(name, None)
            if first is None or (first.dtype, first.shape) != (value.dtype, value.shape):
                raise StoreError(
                    f"{path}: {name!r} of epoch {epoch} is not in epoch {kept[0]} with the same"
                    " shape and dtype: read the epochs one by one"
                )
    return TensorDict.stack(tables)  # type: ignore[no-any-return]


def read_latest(
    path: str | Path, key: str, before: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """Read the latest value of each row.

    Returns:
        The values, of shape (N, ...); which rows have one, bool of shape (N,); and the last epoch.
    """
    if _MEMBER in str(path):
        table = read_epochs(path, "last", before)
        return _entry(table, key, path), table["seen"], int(table["epoch"].max())
    (folder,) = folders_of(path)
    epochs = _epochs(folder, before)
    table = read_epoch(folder, epochs[-1])
    values = _entry(table, key, path)
    is_seen = table["seen"]
    for epoch in reversed(epochs[:-1]):
        if is_seen.all():
            break
        table = read_epoch(folder, epoch)
        is_new = table["seen"] & ~is_seen
        values = values.clone()
        values[is_new] = _entry(table, key, path)[is_new]
        is_seen = is_seen | is_new
    return values, is_seen, epochs[-1]


def folders_of(path: str | Path) -> list[ResultFolder]:
    """Return the folder of a path, or the folders of its members in order."""
    text = str(path)
    if _MEMBER not in text:
        return [ResultFolder(Path(text).resolve())]
    parts = Path(text).absolute().parts
    depth = next(index for index, part in enumerate(parts) if _MEMBER in part)
    pattern = re.compile(re.escape(parts[depth]).replace(re.escape(_MEMBER), "([0-9]+)"))
    parent = Path(*parts[:depth])
    names = parent.iterdir() if parent.is_dir() else iter(())
    matches = [match for child in names if (match := pattern.fullmatch(child.name))]
    folders = []
    for match in sorted(matches, key=lambda match: int(match[1])):
        rest = [part.replace(_MEMBER, match[1]) for part in parts[depth + 1 :]]
        folder = ResultFolder(parent.joinpath(match[0], *rest).resolve())
        if folder.run() is not None:
            folders.append(folder)
    if not folders:
        raise StoreError(f"{path} has no results of any member")
    return folders


def read_epoch(folder: ResultFolder, epoch: int) -> "TensorDict":
    """Read a committed epoch."""
    from tensordict import TensorDict  # Importing it takes long.

    store = folder.open_epoch(epoch)
    table = store.as_tensordict()
    values: dict[str, Tensor] = {}
    for field in store.schema.structure.keys:
        values[str(field)] = table[field, "values"]
        values["seen"] = table[field, "mask"]
    values["epoch"] = torch.full((len(store),), epoch)
    return TensorDict(values, batch_size=(len(store),))


def check_dataset(path: str | Path, dataset: DatasetIdentity) -> None:
    """Check that all results at a path belong to a dataset; see `ResultFolder.check_dataset`."""
    for folder in folders_of(path):
        folder.check_dataset(dataset)


def _check_one_dataset(folders: Sequence[ResultFolder]) -> None:
    """Check that the results of all members belong to one dataset."""
    run = folders[0].run()
    assert run is not None
    for folder in folders[1:]:
        folder.check_dataset(DatasetIdentity(run.num_rows, run.dataset))


def _epochs(folder: ResultFolder, before: int | None) -> list[int]:
    """List the committed epochs before one, of which there must be at least one."""
    epochs = folder.epochs() if folder.run() is not None else []
    if before is not None:
        epochs = [epoch for epoch in epochs if epoch < before]
    if not epochs:
        limit = "" if before is None else f" before epoch {before}"
        raise StoreError(
            f"{folder.path} has no results of a complete epoch{limit}{nearest_file(folder.path)}"
        )
    return epochs


def _entry(table: "TensorDict", key: str, path: str | Path) -> Tensor:
    value = table.get(key, None)
    if value is None:
        names = sorted(str(name) for name in table.keys())  # noqa: SIM118
        raise ValueError(
            f"key={key!r}: the results in {path} have {', '.join(names)}{nearest(key, names)}"
        )
    return value  # type: ignore[no-any-return]


def _join(tables: Sequence["TensorDict"]) -> "TensorDict":
    """Join the results of members, row by row."""
    from tensordict import TensorDict  # Importing it takes long.

    first = tables[0]
    shapes = [{n: (v.dtype, v.shape) for n, v in table.items()} for table in tables]
    if any(shape != shapes[0] for shape in shapes):
        raise StoreError("the members have results of different fields, or of different datasets")
    num_seen = torch.stack([table["seen"] for table in tables]).sum(0)
    joined: dict[str, Any] = {"seen": num_seen > 0}
    joined["epoch"] = torch.stack([t["epoch"] * t["seen"] for t in tables]).amax(0)
    for name in shapes[0].keys() - joined.keys():
        values = torch.zeros_like(first[name])
        for table in tables:
            is_seen = table["seen"]
            values[is_seen] += table[name][is_seen]
        by_row = num_seen.view(-1, *[1] * (values.ndim - 1))
        if values.is_floating_point() or values.is_complex():
            joined[name] = values / by_row.to(values.dtype)
            continue
        values = torch.zeros_like(values)
        for table in tables:
            is_seen = table["seen"]
            values[is_seen] = table[name][is_seen]
        for member, table in enumerate(tables):
            differs = (table[name] != values)[:, None].flatten(1).any(1)
            wrong = (differs & table["seen"]).nonzero()
            if len(wrong):
                raise StoreError(
                    f"{name!r} of row {int(wrong[0])} differs between member {member} and a later"
                    " one: several members have seen it. Read the members one by one, or record"
                    " floating-point values, whose mean is read"
                )
        joined[name] = values
    return TensorDict(joined, batch_size=first.batch_size)
