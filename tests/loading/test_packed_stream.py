"""Packs in blocks: streamed, mapped and copied rows make the same batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import PlacementError
from lightning_memmap.loading import row_file
from lightning_memmap.sampling import KFold, Packed, Subset
from tests.loading.test_packed_batch import LENGTH, Documents, data_of
from tests.support.models import set_up
from tests.support.rows import read_in_blocks

LONG = Documents(240, most=100)


def contents(batch: Any) -> list[Any]:
    packing = batch["packing"]
    tensors = [batch["tokens"], batch["inner"]["labels"], batch["score"], packing.cu_seqlens]
    return [*(tensor.clone() for tensor in tensors), [*batch["name"]]]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one[:-1], other[:-1])) and one[-1] == other[-1]


def epoch_of(data: MemmapDataModule, epoch: int = 1) -> list[list[Any]]:
    loader: Any = set_up(data, "fit").train_dataloader()
    loader.set_epoch(epoch)
    return [contents(batch) for batch in loader]


def make(path: Path, residency: str, dataset: Any = None, **options: Any) -> MemmapDataModule:
    options = {"num_shards": 4, "shuffle_block": 20, **options}
    return data_of(path, dataset or Documents(240), residency=residency, **options)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (None, {}),
        (None, {"sampler": Packed("tokens", LENGTH, max_documents=3)}),
        (None, {"sampler": Packed("tokens", LENGTH, split=True)}),
        (None, {"subset": Subset([*range(3, 230, 2)])}),
        (None, {"subset": KFold(3), "member": 1}),
        (None, {"num_shards": 12, "shuffle_block": 7}),
        (LONG, {"sampler": Packed("tokens", LENGTH, overflow="split")}),
        (LONG, {"sampler": Packed("tokens", LENGTH, overflow="truncate")}),
        (LONG, {"sampler": Packed("tokens", LENGTH, overflow="drop")}),
        (LONG, {"sampler": Packed("tokens", LENGTH, split=True)}),
        (LONG, {"sampler": Packed("tokens", LENGTH, split=True), "shuffle_block": 1000}),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 512])
def test_streamed_packs_are_those_of_mapped_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Any, options: Any, block_bytes: int
) -> None:
    mapped = epoch_of(make(tmp_path, "mmap", dataset, **options))
    assert len(mapped) > 5
    copied = epoch_of(make(tmp_path, "host", dataset, **options))
    assert all(map(equal, mapped, copied))
    read_in_blocks(monkeypatch, block_bytes, 2 * 4096)
    streamed = epoch_of(make(tmp_path, "stream", dataset, **options))
    assert len(streamed) == len(mapped)
    assert all(map(equal, mapped, streamed))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_streamed_packs_are_the_same_on_any_number_of_processes(
    tmp_path: Path, size: int, split: bool
) -> None:
    sampler = Packed("tokens", LENGTH, split=split)
    alone = epoch_of(make(tmp_path, "mmap", batch_size=8, sampler=sampler))
    data = set_up(make(tmp_path, "stream", batch_size=8 // size, sampler=sampler), "fit")
    whole: Any = data.train_dataloader().loader
    ranks = []
    for rank in range(size):
        loader = whole.of_process(rank, size)
        loader.set_epoch(1)
        ranks.append([contents(batch) for batch in loader])
    start = 0
    for step, batch in enumerate(alone):
        for rank in range(size):
            part = [value[(rank - start) % size :: size] for value in batch]
            assert equal(part, ranks[rank][step])
        start += len(batch[0])


@pytest.mark.parametrize("options", [{}, {"sampler": Packed("tokens", LENGTH, split=True)}])
def test_streamed_epoch_continues_after_any_step(tmp_path: Path, options: Any) -> None:
    expected = epoch_of(make(tmp_path, "stream", **options))
    loader: Any = set_up(make(tmp_path, "stream", **options), "fit").train_dataloader()
    loader.set_epoch(1)
    states = [loader.state_dict() for _ in loader]
    for step in range(0, len(states), 3):
        resumed: Any = set_up(make(tmp_path, "stream", **options), "fit").train_dataloader()
        resumed.load_state_dict(states[step])
        resumed.set_epoch(1)
        rest = [contents(batch) for batch in resumed]
        assert len(rest) == len(expected) - step - 1
        assert all(map(equal, rest, expected[step + 1 :]))


def test_bytes_are_read_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_read: list[int]
) -> None:
    # As in stores whose shards lie further apart.
    monkeypatch.setattr(row_file, "_GAP_BYTES", 0)
    read_in_blocks(monkeypatch, 512, 2**20)
    dataset = Documents(2400)
    data = set_up(make(tmp_path, "stream", dataset, shuffle_block=100), "fit")
    loader: Any = data.train_dataloader()
    del bytes_read[:]
    num_tokens = sum(int((batch["packing"].document_ids >= 0).sum()) for batch in loader)
    assert num_tokens == dataset.lengths.sum()
    # Tokens and labels of 8 bytes, scores of 16 and names.
    assert sum(bytes_read) < 1.3 * (16 * num_tokens + 2400 * 30)


def test_mixture_is_streamed(tmp_path: Path) -> None:
    sampler = Packed("tokens", LENGTH, shares={"a": 1, "b": 3})
    sets: Any = {"a": Documents(300), "b": Documents(150)}
    options: Any = {"sampler": sampler, "shuffle_block": 30}
    for epoch in (0, 3):
        mapped = epoch_of(make(tmp_path, "mmap", sets, **options), epoch)
        streamed = epoch_of(make(tmp_path, "stream", sets, **options), epoch)
        assert len(mapped) == len(streamed)
        assert all(map(equal, mapped, streamed))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampler": Packed("tokens", 2 * LENGTH)}, rf"length.*={LENGTH}"),
        ({"sampler": Packed("tokens", LENGTH, max_documents=9)}, "max_documents"),
        ({"shuffle_block": 60}, "shuffle_block"),
    ],
)
def test_resume_with_other_packs_names_the_option(tmp_path: Path, options: Any, name: str) -> None:
    loader: Any = set_up(make(tmp_path, "mmap"), "fit").train_dataloader()
    steps = iter(loader)
    next(steps)
    state = loader.state_dict()
    other: Any = set_up(make(tmp_path, "mmap", **options), "fit").train_dataloader()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=name) as raised:
        next(iter(other))
    assert "resume with" in str(raised.value)


def test_evaluation_and_prediction_are_streamed(tmp_path: Path) -> None:
    data = make(tmp_path, "stream", with_row_numbers=True, batch_size=3)
    data.options = data.with_options(
        val_dataset=Documents(90), predict_dataset=Documents(30)
    ).options
    set_up(data)
    rows = torch.cat([batch["row_number"].flatten() for batch in data.val_dataloader()])
    assert sorted(rows[rows >= 0].tolist()) == [*range(90)]
    again = torch.cat([batch["row_number"].flatten() for batch in data.val_dataloader()])
    assert torch.equal(again, rows)
    predicted = torch.cat([batch["row_number"] for batch in data.predict_dataloader()])
    assert predicted.tolist() == [[row] for row in range(30)]


def test_blocks_that_exceed_the_memory_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"residency=.stream"):
        set_up(make(tmp_path, "stream", memory_fraction=1e-6), "fit")


def test_stream_without_a_block_size_has_one_by_default(tmp_path: Path) -> None:
    data = make(tmp_path, "stream", shuffle_block=None)
    mapped = make(tmp_path, "mmap", shuffle_block=10**6)
    assert all(map(equal, epoch_of(data), epoch_of(mapped)))


@pytest.mark.parametrize("block", [5, 60])
def test_padding_of_small_blocks_is_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    block: int,
) -> None:
    monkeypatch.setattr("lightning_memmap.data.set_up._printed", {})
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        set_up(make(tmp_path, "mmap", shuffle_block=block), "fit")
    assert ("shuffle_block" in caplog.text) == (block == 5)
