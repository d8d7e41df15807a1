"""Datasets that the tests store, known row by row, and what batches of their rows must be."""

import datetime
import functools
import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.loading import Padded
from lightning_memmap.schema import Decode, Masked
from lightning_memmap.schema.fields import SIGNED
from lightning_memmap.store import Store

if TYPE_CHECKING:
    from hypothesis import strategies as st


class Made(Dataset[dict[str, Any]], ABC):
    """Rows that `sample` makes from their numbers."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        return self.sample(row)

    @abstractmethod
    def sample(self, row: int) -> dict[str, Any]: ...


class Numbered(Made):
    """Row ``i`` is ``{"x": int64 (4,), "label": int}``; every value tells row and version."""

    def __init__(self, num_rows: int, version: int = 0) -> None:
        super().__init__(num_rows)
        self.version = version

    def sample(self, row: int) -> dict[str, Any]:
        first = self.version * 1_000_000_007 + row * 4
        return {
            "x": torch.arange(first, first + 4),
            "label": self.version * 1000 + row % 10,
        }

    def expected(self) -> dict[str, Tensor]:
        """All rows in dataset order, by field."""
        first = self.version * 1_000_000_007
        return {
            "x": torch.arange(first, first + 4 * self.num_rows).view(self.num_rows, 4),
            "label": self.version * 1000 + torch.arange(self.num_rows) % 10,
        }


SIZES = {"a": 50, "b": 21, "c": 7}


SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}


SAMPLES = 120


class NumberedSet(Made):
    """Rows that say what they are: of set ``code``, with ``row % 5`` to ``row % 5 + 3`` steps.

    Args:
        code: Number of the set.
        num_rows: Rows.
        steps: The least steps of a row.
        pad: Floats in each row.
    """

    def __init__(self, code: int, num_rows: int, steps: int = 0, pad: int = 3) -> None:
        super().__init__(num_rows)
        self.code, self.steps, self.pad = code, steps, pad

    def sample(self, row: int) -> dict[str, Any]:
        number = 100 * self.code + row
        return {
            "number": number,
            "pad": torch.full((self.pad,), float(number)),
            "steps": np.arange(self.steps + row % 5, dtype=np.int32) + 1000 * number,
            "image": np.full((row % 3, 1 + row % 2, 2), number, np.int16),
            "name": f"row {number}",
        }


def mixed_sets(**options: Any) -> dict[str, NumberedSet]:
    return {
        name: NumberedSet(code, size, **options)
        for code, (name, size) in enumerate(SIZES.items(), 1)
    }


def checked_numbers(batch: Any) -> list[int]:
    """The numbers of the rows of a batch, once each field is seen to be theirs."""
    numbers: list[int] = batch["number"].tolist()
    for index, number in enumerate(numbers):
        code, row = divmod(number, 100)
        sample = NumberedSet(code, 100)[row]
        assert torch.equal(batch["pad"][index], sample["pad"])
        assert batch["steps"][index].tolist() == sample["steps"].tolist()
        assert batch["image"][index].tolist() == sample["image"].tolist()
        assert batch["name"][index] == sample["name"]
    return numbers


#: A step of series ``i`` is this many times ``i``, and its number within the series.
BASE = 1000


class Series(Made):
    """Series of numbers and of times, each with a number and a name.

    Args:
        lengths: Steps of each series.
    """

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(len(lengths))
        self.lengths = lengths

    def sample(self, row: int) -> dict[str, Any]:
        steps = np.arange(self.lengths[row])
        return {
            "value": (row * BASE + steps).astype(np.int32),
            "row": row,
            "time": np.stack([steps, -steps], axis=1).astype(np.float32),
            "name": f"series {row}",
        }


def all_windows(lengths: list[int], length: int, stride: int) -> list[tuple[int, int]]:
    """The series and the first step of each window, in dataset order."""
    return [
        (row, step)
        for row, steps in enumerate(lengths)
        for step in range(0, steps - length + 1, stride)
    ]


def windows_in(batch: Any, length: int) -> list[tuple[int, int]]:
    """The windows in a batch of `Series`, once each of their fields is seen to be right."""
    found = []
    for value, pair, row, name in zip(
        batch["value"].tolist(), batch["time"].tolist(), batch["row"], batch["name"], strict=True
    ):
        series, step = divmod(value[0], BASE)
        assert value == [value[0] + index for index in range(length)]
        assert pair == [[step + index, -step - index] for index in range(length)]
        assert (int(row), name) == (series, f"series {series}")
        found.append((series, step))
    return found


class Ragged(Made):
    """Row ``i`` has its number, a sound, an image, token ids in a list, and a text.

    Args:
        num_rows: Rows.
        longest: The sound of a row has 0 to this many samples.
    """

    def __init__(self, num_rows: int, longest: int = 40) -> None:
        super().__init__(num_rows)
        self.longest = longest

    def sample(self, row: int) -> dict[str, Any]:
        random = np.random.default_rng(row)
        length = int(random.integers(0, self.longest + 1))
        height, width = (int(size) for size in random.integers(0, 6, 2))
        return {
            "row": row,
            "sound": torch.from_numpy(random.standard_normal(length).astype(np.float32)),
            "image": random.integers(0, 255, (height, width, 2), dtype=np.uint8),
            "ids": random.integers(0, 99, random.integers(0, 20)).tolist(),
            "text": "żółw " * int(random.integers(0, 3)) + str(row),
        }


def padded(rows: list[Any], value: float = 0, multiple: int = 1, num_variable: int = 1) -> Tensor:
    """Rows padded to the longest, one by one."""
    tensors = [torch.as_tensor(row) for row in rows]
    shapes = torch.tensor([tensor.shape[:num_variable] for tensor in tensors])
    widths = (-(-shapes.amax(0) // multiple) * multiple).tolist()
    first = next((t for t in tensors if t.numel()), tensors[0])
    out = torch.full((len(rows), *widths, *first.shape[num_variable:]), value, dtype=first.dtype)
    for target, tensor in zip(out, tensors, strict=True):
        target[tuple(map(slice, tensor.shape))] = tensor
    return out


def assert_ragged(
    batch: Any, samples: list[dict[str, Any]], value: float = 0, multiple: int = 1
) -> None:
    """A batch of `Ragged`, its fields in any form, has these samples in this order."""
    assert batch["row"].tolist() == [sample["row"] for sample in samples]
    assert batch["text"] == [sample["text"] for sample in samples]
    for name, dims in (("sound", 1), ("image", 2), ("ids", 1)):
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        found = batch[name]
        if isinstance(found, Padded):
            expected = padded(rows, value, multiple, dims).to(found.values.dtype)
            assert torch.equal(found.values, expected), name
            sizes = [list(row.shape[:dims]) if dims > 1 else len(row) for row in rows]
            assert found.lengths.tolist() == sizes
            assert found.lengths.dtype == torch.int64
            found = found.rows()
        elif isinstance(found, Tensor):
            assert found.layout is torch.jagged
            found = found.unbind()
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, rows, strict=True)), name


class Mixed(Made):
    """Rows with a field of one shape, one that differs in two dimensions, text, records, None."""

    classes: ClassVar[list[str]] = ["odd", "even"]
    declared: ClassVar[dict[str, Any]] = {
        "variable": {"box": 2, "records": 1}, "nullable": ["maybe"]
    }  # fmt: skip

    def sample(self, row: int) -> dict[str, Any]:
        return {
            "x": np.full(3, row, np.int16),
            # Above the largest int64.
            "unsigned": np.uint64(2**64 - 1 - row),
            "box": np.full((row % 3, row % 2 + 1), row, np.float32),
            "name": "n" * (row % 4) + str(row),
            "records": [{"label": row, "score": 0.5}] * (row % 3),
            "maybe": None if row % 5 == 3 else row,
        }


START = datetime.datetime(2024, 5, 1, 12)


class Scenes(Made):
    """Row ``i`` has its number, a list of objects, captions, and values that may be None.

    Args:
        num_rows: Rows. The first one has no objects.
    """

    def sample(self, row: int) -> dict[str, Any]:
        random = np.random.default_rng(row)
        size = int(random.integers(1, 4))
        return {
            "row": row,
            "objects": [
                {
                    "box": random.random(4).tolist(),
                    "label": int(random.integers(9)),
                    "name": "żółw" * int(random.integers(3)),
                    "score": None if random.random() < 0.5 else float(random.random()),
                    "mask": torch.from_numpy(random.integers(0, 2, (size, 2)) > 0),
                }
                for _ in range(int(random.integers(4)) if row else 0)
            ],
            "captions": [f"caption {i}" for i in range(int(random.integers(3)))],
            "age": None if row % 3 == 1 else row,
            "title": None if row % 4 == 2 else f"row {row}",
            "sound": None if row % 5 == 3 else torch.arange(row % 7, dtype=torch.float32),
            "at": START + datetime.timedelta(minutes=row),
        }


def objects_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The objects of a sample as a batch gives them row by row."""
    objects = sample["objects"]
    scores = [each["score"] for each in objects]
    masks = [each["mask"] for each in objects]
    return {
        "box": torch.tensor([each["box"] for each in objects], dtype=torch.float64).view(-1, 4),
        "label": torch.tensor([each["label"] for each in objects], dtype=torch.int64),
        "name": [each["name"] for each in objects],
        "score": Masked(
            torch.tensor([score or 0.0 for score in scores], dtype=torch.float64),
            torch.tensor([score is not None for score in scores], dtype=torch.bool),
        ),
        "mask": torch.stack(masks) if masks else torch.zeros(0, 0, 2, dtype=torch.bool),
    }


def assert_scenes(batch: Any, samples: list[dict[str, Any]]) -> None:
    """A batch of `Scenes`, its objects in any form, has these samples in this order."""
    assert batch["row"].tolist() == [sample["row"] for sample in samples]
    assert_has_objects(batch["objects"], [objects_of(sample) for sample in samples])
    assert batch["captions"] == [sample["captions"] for sample in samples]
    for name in ("age", "title", "sound"):
        found, expected = batch[name], [sample[name] for sample in samples]
        assert found.mask.dtype == torch.bool
        assert found.mask.tolist() == [value is not None for value in expected]
        for a, b in zip(found.rows(), expected, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
    assert batch["age"].values.tolist() == [sample["age"] or 0 for sample in samples]
    minutes = [(sample["at"] - START) // datetime.timedelta(microseconds=1) for sample in samples]
    start = int(np.datetime64(START, "us").astype(np.int64))
    assert (batch["at"] - start).tolist() == minutes


def assert_has_objects(found: Any, rows: list[dict[str, Any]]) -> None:
    if isinstance(found, list):
        assert len(found) == len(rows)
        for one, other in zip(found, rows, strict=True):
            assert list(one) == list(other)
            assert one["name"] == other["name"]
            for name in ("box", "label", "mask"):
                assert torch.equal(one[name], other[name]), name
                assert one[name].dtype == other[name].dtype
            assert all(map(torch.equal, one["score"], other["score"]))
        return
    assert found["name"] == [row["name"] for row in rows]
    for name in ("box", "label"):
        assert isinstance(found[name], Padded)
        assert torch.equal(found[name].values, padded([row[name] for row in rows]))
        assert found[name].lengths.tolist() == [len(row[name]) for row in rows]
    masks = found["mask"].rows()
    assert all(torch.equal(a, row["mask"]) for a, row in zip(masks, rows, strict=True))
    score = found["score"]
    for values, mask, row in zip(score.values.rows(), score.mask.rows(), rows, strict=True):
        assert torch.equal(values, row["score"].values)
        assert torch.equal(mask, row["score"].mask)


HEIGHT, WIDTH = 10, 7


DECODE: dict[str, Any] = {"image": Decode(), "mask": Decode("L")}


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file with these pixels, of shape (height, width) or (height, width, C)."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def plain(data: bytes, mode: str = "RGB") -> Tensor:
    """An image decoded without this package, channels first."""
    from PIL import Image

    pixels = np.array(Image.open(io.BytesIO(data)).convert(mode))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).movedim(-1, 0)


@functools.cache
def files_of(row: int) -> tuple[bytes, bytes]:
    """The image of a row, a PNG or JPEG file, and its mask, a PNG file."""
    random = np.random.default_rng(row)
    pixels = random.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    image = encoded(pixels, "PNG" if row % 3 else "JPEG")
    return image, encoded((pixels[..., 0] > 99).astype(np.uint8))


@functools.cache
def decoded_files_of(row: int) -> tuple[Tensor, Tensor]:
    image, mask = files_of(row)
    return plain(image), plain(mask, "L")


class EncodedImages(Made):
    """Row ``i`` has its number, an image as the bytes of a PNG or JPEG file, and a mask as PNG.

    Args:
        num_rows: Rows.
        decoded: Give the same images decoded.
        broken: By row, other bytes.
    """

    def __init__(
        self, num_rows: int, decoded: bool = False, broken: dict[int, bytes] | None = None
    ) -> None:
        super().__init__(num_rows)
        self.decoded = decoded
        self.broken = broken or {}

    def sample(self, row: int) -> dict[str, Any]:
        if self.decoded:
            pixels, opaque = decoded_files_of(row)
            return {"row": row, "image": pixels.clone(), "mask": opaque.clone()}
        image, mask = files_of(row)
        return {"row": row, "image": self.broken.get(row, image), "mask": mask}


def assert_images(batch: Any, rows: list[int]) -> None:
    """A batch of `EncodedImages` has these rows in this order, decoded."""
    dataset = EncodedImages(max(rows) + 1, decoded=True)
    assert batch["row"].tolist() == rows
    for name in ("image", "mask"):
        assert batch[name].dtype == torch.uint8
        assert batch[name].is_contiguous()
        assert torch.equal(batch[name].cpu(), torch.stack([dataset[row][name] for row in rows]))


def photographs() -> list[Path]:
    """Two photographs as JPEG files, which scikit-learn ships."""
    import sklearn

    folder = Path(sklearn.__file__).parent / "datasets" / "images"
    return sorted(folder.glob("*.jpg"))


def icons() -> list[Path]:
    """Icons of several sizes as PNG files with transparency, which matplotlib ships."""
    import matplotlib

    return sorted((Path(matplotlib.get_data_path()) / "images").glob("*.png"))


class Wrapped(Dataset[Any]):
    """Passes everything on to another dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


class Counting(Wrapped):
    """Notes which rows were read, in order."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.rows: list[int] = []

    def __getitem__(self, row: int) -> Any:
        self.rows.append(row)
        return super().__getitem__(row)


class Logged(Wrapped):
    """Notes which rows were read in a file that several processes may share."""

    def __init__(self, dataset: Any, log: Path | str) -> None:
        super().__init__(dataset)
        self.log = str(log)

    def __getitem__(self, row: int) -> Any:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, f"{row}\n".encode())
        finally:
            os.close(descriptor)
        return super().__getitem__(row)


class Slow(Wrapped):
    """Sleeps before every so many rows."""

    def __init__(self, dataset: Any, delay_s: float, every: int = 16) -> None:
        super().__init__(dataset)
        self.delay_s, self.every = delay_s, every

    def __getitem__(self, row: int) -> Any:
        if row % self.every == 0:
            time.sleep(self.delay_s)
        return super().__getitem__(row)


class Replaced(Wrapped):
    """Other samples at some rows; an exception given as a sample is raised."""

    def __init__(self, dataset: Any, samples: Mapping[int, Any]) -> None:
        super().__init__(dataset)
        self.samples = samples

    def __getitem__(self, row: int) -> Any:
        if row not in self.samples:
            return super().__getitem__(row)
        if isinstance(self.samples[row], Exception):
            raise self.samples[row]
        return self.samples[row]


class Failing(Replaced):
    """It raises at row 3."""

    def __init__(self) -> None:
        super().__init__(Numbered(20), {3: KeyError("three")})


def texts(max_size: int) -> "st.SearchStrategy[str]":
    """As ``st.text``, which tries for seconds which characters UTF-8 has: all but surrogates."""
    from hypothesis import strategies as st

    return st.text(st.characters(exclude_categories=["Cs"]), max_size=max_size)


def assert_same(found: Any, expected: Any) -> None:
    """Same containers, same keys, same values, same dtypes."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def column_files(store: Store) -> dict[str, bytes]:
    """What the files of all fields contain, by their names."""
    files = (path for path in store.files.iterdir() if path.name != "manifest.json")
    return {path.name: path.read_bytes() for path in files}


def in_dataset_order(store: Store) -> dict[str, Tensor]:
    """All rows of a store by field, put in dataset order by the rule of the layout: row ``i``
    lies at ``start[i % C] + i // C``."""
    rows = torch.arange(store.num_rows)
    starts = torch.from_numpy(store.manifest.shards.starts)
    places = starts[rows % store.num_shards] + rows // store.num_shards
    names = [field.name for field in store.schema.fields]
    complete = store.completed()
    complete.download()
    columns: list[Any] = complete.mapped_columns
    return {name: take(column.tensor, places) for name, column in zip(names, columns, strict=True)}


def take(values: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor. Until 2.10, torch indexes no unsigned integers but bytes."""
    signed = SIGNED.get(values.dtype, values.dtype)
    return values.view(signed)[rows].view(values.dtype)


def holds(store: Store, dataset: Numbered) -> bool:
    """Whether a store holds exactly the rows of a `Numbered` dataset."""
    found, expected = in_dataset_order(store), dataset.expected()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
