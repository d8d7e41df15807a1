"""How other libraries read the rows of a case: shuffled, local, each in several ways.

Every library gets the rows in its own format and is read through its public interface. What is
tried for each is what its documentation offers for speed; nothing is compressed, files are large,
and row by row work is avoided wherever the library lets a batch be handled at once. Left out is
what gives up the shuffling of single rows: ready-made batches stored as one item.

`tuned` marks the ways in which a user takes over part of the library's work: rows stored as plain
bytes, or as blocks, that are decoded or taken apart by hand. They are usually the fastest.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from loader import Case, RandomRows
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

WORKERS = (0, 2)
#: So many files, so that workers can share them evenly.
NUM_FILES = 8


@dataclass(frozen=True)
class Way:
    """One way to read a data set: an epoch of batches for each iteration over ``batches``."""

    form: str
    num_workers: int
    batches: Iterable[Any]
    tuned: bool = False

    @property
    def name(self) -> str:
        """What tells it from the library's other ways."""
        return f"{self.form}, {self.num_workers} workers"


class Rows:
    """The rows of a case as each library wants them written."""

    def __init__(self, case: Case, source: RandomRows) -> None:
        self.case = case
        self.tensor = source.rows
        self.array = source.rows.numpy()
        self.labels = np.arange(case.num_rows) % 10 if case.label else None
        self.width = self.array[0].size
        #: Bytes of a file, where there are `NUM_FILES`.
        self.file_bytes = self.array.nbytes // NUM_FILES + 1

    def __len__(self) -> int:
        return len(self.array)

    def flat(self) -> Tensor:
        """One flat row each, uint8 with a last byte for the label where there is one."""
        rows = self.tensor.flatten(1)
        if self.labels is None:
            return rows
        return torch.cat([rows, torch.from_numpy(self.labels.astype(np.uint8))[:, None]], 1)


def from_flat(case: Case, rows: Tensor) -> Any:
    """A batch from flat rows of the case's dtype: what `Rows.flat` put together."""
    if case.label:
        return rows[:, :-1].unflatten(1, case.shape), rows[:, -1].to(torch.int64)
    return rows.view(-1, *case.shape)


def from_flat_list(case: Case, rows: list[Tensor]) -> Any:
    """A batch from single flat rows."""
    return from_flat(case, torch.stack(rows))


def from_bytes(case: Case, rows: list[Any]) -> Any:
    """A batch from the bytes of each row: one copy for all."""
    joined = torch.frombuffer(bytearray().join(rows), dtype=case.dtype)
    return from_flat(case, joined.view(len(rows), -1))


def from_samples(case: Case, samples: list[Any]) -> Any:
    """A batch from the arrays and the labels of single samples."""
    rows = torch.from_numpy(np.stack([sample[0] for sample in samples]))
    return (rows, torch.tensor([int(sample[1]) for sample in samples])) if case.label else rows


def with_workers(
    loader: Callable[..., DataLoader[Any]], dataset: Any, workers: int, **options: Any
) -> DataLoader[Any]:
    """A loader whose workers, if any, live on from epoch to epoch."""
    return loader(dataset, num_workers=workers, persistent_workers=workers > 0, **options)


# --- litdata ----------------------------------------------------------------------------------


def litdata(rows: Rows, directory: Path) -> Iterator[Way]:
    """Arrays and tensors as items, bytes joined by hand, and blocks of "tokens" of any dtype.

    A sample is read faster where `batch_decode` rows are decoded at once, and only if the shuffle
    inside a file has blocks of that size.
    """
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    library = import_module("litdata")
    cache = import_module("litdata.streaming.cache").Cache
    case, flat, window = rows.case, rows.flat(), 256

    def sample(row: Any, index: int) -> Any:
        return row if rows.labels is None else (row, int(rows.labels[index]))

    def no_loader() -> None:
        return None

    tokens = partial(library.TokensLoader, flat.shape[1])
    plain_tokens = not case.label and len(case.shape) == 1
    items: dict[str, tuple[Callable[[int], Any], Callable[[], Any], Any, bool]] = {
        "arrays": (lambda i: sample(rows.array[i], i), no_loader, None, False),
        "tensors": (lambda i: sample(rows.tensor[i], i), no_loader, None, False),
        "bytes": (lambda i: flat[i].numpy().tobytes(), no_loader, partial(from_bytes, case), True),
        "TokensLoader": (
            lambda i: flat[i],
            tokens,
            None if plain_tokens else partial(from_flat_list, case),
            not plain_tokens,
        ),
    }
    for name, (item, item_loader, collate, tuned) in items.items():
        folder = directory / name
        writer = cache(str(folder), chunk_bytes=rows.file_bytes, item_loader=item_loader())
        for index in range(len(rows)):
            writer[index] = item(index)
        writer.done()
        writer.merge()
        for workers in WORKERS:
            dataset = library.StreamingDataset(
                str(folder),
                shuffle=True,
                item_loader=item_loader(),
                batch_decode=window,
                item_shuffle_block=window,
            )
            loader = with_workers(
                library.StreamingDataLoader,
                dataset,
                workers,
                batch_size=case.batch,
                collate_fn=collate,
            )
            yield Way(name, workers, loader, tuned)


# --- mosaicml-streaming -----------------------------------------------------------------------


def import_streaming() -> ModuleType:
    """The package, which imports torchvision for image data sets that are not used here.

    PyPI has no torchvision for a build of torch without CUDA; where it is not installed, the names
    that are asked for are empty.
    """
    if find_spec("torchvision") is not None:
        return import_module("streaming")
    names = ("", ".datasets", ".transforms", ".transforms.functional")
    empty: dict[str, Any] = {
        f"torchvision{name}": ModuleType(f"torchvision{name}") for name in names
    }
    empty["torchvision.datasets"].VisionDataset = object
    empty["torchvision.transforms.functional"].to_tensor = None
    sys.modules.update(empty)
    try:
        return import_module("streaming")
    finally:
        for name in empty:
            del sys.modules[name]


def of_field(case: Case, samples: list[dict[str, bytes]]) -> Any:
    """A batch from samples of one field of bytes."""
    return from_bytes(case, [sample["rows"] for sample in samples])


def mosaicml_streaming(rows: Rows, directory: Path) -> Iterator[Way]:
    """MDS files with arrays of a fixed shape, and with bytes that are joined by hand."""
    library, case = import_streaming(), rows.case
    shape = ",".join(str(size) for size in case.shape)
    array = {
        "rows": f"ndarray:{rows.array.dtype}:{shape}",
        **({"label": "int"} if case.label else {}),
    }
    flat = rows.flat().numpy()

    def arrays(index: int) -> dict[str, Any]:
        label = {} if rows.labels is None else {"label": int(rows.labels[index])}
        return {"rows": rows.array[index], **label}

    formats: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]], Any]] = {
        "ndarray": (array, arrays, None),
        "bytes": (
            {"rows": "bytes"},
            lambda index: {"rows": flat[index].tobytes()},
            partial(of_field, case),
        ),
    }
    for name, (columns, sample, collate) in formats.items():
        folder = str(directory / name)
        with library.MDSWriter(out=folder, columns=columns, size_limit=rows.file_bytes) as writer:
            for index in range(len(rows)):
                writer.write(sample(index))
        for workers in WORKERS:
            dataset = library.StreamingDataset(
                local=folder, shuffle=True, batch_size=case.batch, num_canonical_nodes=1
            )
            loader = with_workers(
                library.StreamingDataLoader,
                dataset,
                workers,
                batch_size=case.batch,
                collate_fn=collate,
            )
            yield Way(name, workers, loader, collate is not None)


# --- webdataset -------------------------------------------------------------------------------


def webdataset(rows: Rows, directory: Path) -> Iterator[Way]:
    """A sample for each member of a tar file, and blocks of 100 rows taken apart after reading.

    Reading a member costs far more than a row. Blocks share that, and a buffer of single rows
    behind them shuffles as it does for members.
    """
    library, case = import_module("webdataset"), rows.case
    for name, block in (("a member a row", 1), ("a member 100 rows", 100)):
        folder = directory / name.replace(" ", "-")
        folder.mkdir()
        num_members = -(-len(rows) // block)
        fields = ["rows.npy", "label.npy"] if case.label else ["rows.npy"]
        with library.ShardWriter(
            f"{folder}/%02d.tar", maxcount=-(-num_members // NUM_FILES), maxsize=2**40, verbose=0
        ) as writer:
            for start in range(0, len(rows), block):
                chosen = start if block == 1 else slice(start, start + block)
                sample = {"__key__": f"{start:09d}", "rows.npy": rows.array[chosen]}
                if rows.labels is not None:
                    sample["label.npy"] = np.asarray(rows.labels[chosen])
                writer.write(sample)
        files = sorted(str(file) for file in folder.iterdir())
        for workers in WORKERS:
            dataset = library.WebDataset(files, shardshuffle=len(files)).decode().to_tuple(*fields)
            if block > 1:
                dataset = dataset.shuffle(20).unbatched()
            dataset = dataset.shuffle(1000).batched(
                case.batch, collation_fn=partial(from_samples, case)
            )
            loader = with_workers(library.WebLoader, dataset, workers, batch_size=None)
            yield Way(name, workers, loader, block > 1)


# --- Hugging Face datasets --------------------------------------------------------------------


def from_columns(case: Case, columns: dict[str, Any]) -> Any:
    """A batch from flat columns, tensors or arrays, that all have the dtype of the rows."""
    rows = torch.as_tensor(columns["rows"]).view(-1, *case.shape)
    return (rows, torch.as_tensor(columns["label"]).long()) if case.label else rows


def from_table(case: Case, table: Any) -> Any:
    """A batch from an Arrow table, whose memory is used as it is."""
    rows = torch.from_numpy(table["rows"].combine_chunks().flatten().to_numpy())
    rows = rows.view(-1, *case.shape)
    return (rows, torch.from_numpy(table["label"].to_numpy())) if case.label else rows


def hugging_face(rows: Rows, directory: Path) -> Iterator[Way]:
    """Rows as flat lists of a fixed length, asked for a batch at a time, in three formats.

    Without a dtype, "torch" and "numpy" make int64 of all integers, which is slower and not what
    was stored. The nested `Array3D` was several times slower than flat lists. "arrow" hands over
    the table that the library took, which is decoded by hand without a copy.
    """
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")})
    library, arrow = import_module("datasets"), import_module("pyarrow")
    library.disable_progress_bars()
    flat = arrow.array(rows.array.reshape(-1))
    columns = {"rows": arrow.FixedSizeListArray.from_arrays(flat, rows.width)}
    if rows.labels is not None:
        columns["label"] = arrow.array(rows.labels)
    library.Dataset(arrow.table(columns)).save_to_disk(str(directory / "rows"))
    stored = library.load_from_disk(str(directory / "rows"))
    formats: dict[str, tuple[dict[str, Any], Any]] = {
        "torch": ({"dtype": rows.case.dtype}, from_columns),
        "numpy": ({"dtype": rows.array.dtype}, from_columns),
        "arrow": ({}, from_table),
    }
    for name, (options, collate) in formats.items():
        for workers in WORKERS:
            dataset = stored.with_format(name, **options)
            sampler = BatchSampler(RandomSampler(dataset), rows.case.batch, drop_last=False)
            loader = with_workers(
                DataLoader,
                dataset,
                workers,
                sampler=sampler,
                batch_size=None,
                collate_fn=partial(collate, rows.case),
            )
            yield Way(f"format {name}", workers, loader, name == "arrow")


#: The name of each distribution, and its ways to read rows that it wrote into a directory.
LIBRARIES: dict[str, Callable[[Rows, Path], Iterator[Way]]] = {
    "datasets": hugging_face,
    "litdata": litdata,
    "webdataset": webdataset,
    "mosaicml-streaming": mosaicml_streaming,
}
