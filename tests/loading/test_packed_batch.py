"""Batches of packs: the documents that the order names, and the attention of documents alone."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import Packing
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.sampling import KFold, Packed
from tests.support.models import make_trainer, set_up

LENGTH = 32


class Documents(Dataset[dict[str, Any]]):
    """Documents of 1 to 20 tokens, which tell their row, with labels and other fields."""

    def __init__(self, num_rows: int = 120, most: int = 20) -> None:
        self.lengths = np.random.default_rng(0).integers(1, most + 1, num_rows)
        self.lengths[:2] = 1, most

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        length = int(self.lengths[row])
        tokens = torch.arange(length) + 1000 * row
        labels = tokens.clone()
        labels[: length // 3] = -100
        return {
            "tokens": tokens,
            "inner": {"labels": labels},
            "score": torch.tensor([row, -row]),
            "name": f"document {row}",
        }


def data_of(path: Path, dataset: Any = None, **options: Any) -> MemmapDataModule:
    sampler = options.pop("sampler", None) or Packed("tokens", LENGTH)
    options = {"batch_size": 4, "num_shards": 12, **options}
    return MemmapDataModule(
        dataset or Documents(),
        store_dir=path,
        sampler=sampler,
        layout={"inner.labels": {"value": -100}},
        **options,
    )


def batches_of(data: MemmapDataModule) -> list[Any]:
    set_up(data, "fit")
    return [*data.train_dataloader()]


def documents_in(values: Any, packing: Packing) -> list[list[Any]]:
    """The values of each document, by the ids of a batch."""
    ids = packing.document_ids
    return [[values[b][ids[b] == d] for d in range(int(ids[b].max()) + 1)] for b in range(len(ids))]


def test_batch_has_the_documents_of_its_packs(tmp_path: Path) -> None:
    dataset = Documents()
    data = data_of(tmp_path, dataset, with_row_numbers=True)
    seen = []
    for batch in batches_of(data):
        packing = batch["packing"]
        num_packs = len(batch["tokens"])
        assert batch["tokens"].shape == batch["inner"]["labels"].shape == (num_packs, LENGTH)
        assert batch["score"].shape == (num_packs, packing.cu_seqlens.shape[1] - 1, 2)
        tokens = documents_in(batch["tokens"], packing)
        labels = documents_in(batch["inner"]["labels"], packing)
        places = documents_in(packing.position_ids, packing)
        for b in range(num_packs):
            rows = [row for row in batch["row_number"][b].tolist() if row >= 0]
            assert len(tokens[b]) == len(rows)
            seen += rows
            assert [*batch["name"][b]] == [f"document {row}" for row in rows]
            for d, row in enumerate(rows):
                expected = dataset[row]
                assert tokens[b][d].tolist() == expected["tokens"].tolist()
                assert labels[b][d].tolist() == expected["inner"]["labels"].tolist()
                assert batch["score"][b, d].tolist() == expected["score"].tolist()
                assert places[b][d].tolist() == [*range(len(expected["tokens"]))]
            is_padding = packing.document_ids[b] < 0
            assert (batch["tokens"][b][is_padding] == 0).all()
            assert (batch["inner"]["labels"][b][is_padding] == -100).all()
            assert not packing.target_mask[b][is_padding].any()
        stops = packing.cu_seqlens[:, -1]
        assert stops.tolist() == (packing.document_ids >= 0).sum(1).tolist()
        targets = packing.targets(batch["tokens"])
        assert (targets[packing.target_mask] == batch["tokens"][packing.target_mask] + 1).all()
        assert int(packing.target_mask.sum()) == sum(
            len(each) - 1 for pack in tokens for each in pack
        )
        assert packing.max_seqlen == 20
        flat = packing.flat_cu_seqlens()
        assert flat[0] == 0
        assert flat[-1] == num_packs * LENGTH
        assert (flat.diff() >= 0).all()
    assert sorted(seen) == [*range(120)]


@pytest.mark.parametrize(
    "sampler",
    [
        Packed("tokens", LENGTH, overflow="split"),
        Packed("tokens", LENGTH, overflow="truncate"),
        Packed("tokens", LENGTH, split=True),
    ],
    ids=["split", "truncate", "concatenate"],
)
def test_long_documents_are_cut_in_all_fields(tmp_path: Path, sampler: Packed) -> None:
    dataset = Documents(60, most=100)
    data = data_of(tmp_path, dataset, sampler=sampler, num_shards=4)
    found = dict[int, set[int]]()
    for batch in batches_of(data):
        packing = batch["packing"]
        for pack, labels in zip(
            documents_in(batch["tokens"], packing),
            documents_in(batch["inner"]["labels"], packing),
            strict=True,
        ):
            for tokens, of_tokens in zip(pack, labels, strict=True):
                row, start = divmod(int(tokens[0]), 1000)
                places = set(range(start, start + len(tokens)))
                assert tokens.tolist() == [1000 * row + place for place in sorted(places)]
                expected = dataset[row]["inner"]["labels"][start : start + len(tokens)]
                assert of_tokens.tolist() == expected.tolist()
                assert not found.setdefault(row, set()) & places
                found[row] |= places
    limit = LENGTH if sampler.overflow == "truncate" else 100
    assert {row: len(places) for row, places in found.items()} == {
        row: min(limit, length) for row, length in enumerate(dataset.lengths.tolist())
    }


def contents(batch: Any) -> tuple[Any, ...]:
    packing = batch["packing"]
    tensors = batch["tokens"].clone(), packing.position_ids.clone(), packing.cu_seqlens.clone()
    return *tensors, [*batch["name"]], packing.max_seqlen


@pytest.mark.parametrize("residency", ["mmap", "host"])
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
def test_batches_are_the_same_on_any_number_of_devices(
    tmp_path: Path, devices: int, residency: str
) -> None:
    alone = batches_of(data_of(tmp_path, batch_size=12))
    data = data_of(tmp_path, batch_size=12 // devices, residency=residency)
    trainer = make_trainer(
        tmp_path, strategy="memmap_superbatch", devices=devices, limit_val_batches=0
    )
    seen = list[Any]()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(contents(batch))
            return self.weight * 2

        def validation_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer.fit(Module(), data)
    assert len(seen) == len(alone)
    for one, other in zip(map(contents, alone), seen, strict=True):
        assert all(map(torch.equal, one[:3], other[:3]))
        assert one[3:] == other[3:]
        assert one[-1] == 20


def test_evaluation_is_packed_and_prediction_is_in_dataset_order(tmp_path: Path) -> None:
    data = data_of(tmp_path, with_row_numbers=True)
    data.options = data.with_options(
        val_dataset=Documents(30), predict_dataset=Documents(30)
    ).options
    set_up(data)
    val = [*data.val_dataloader()]
    rows = torch.cat([batch["row_number"].flatten() for batch in val])
    assert sorted(rows[rows >= 0].tolist()) == [*range(30)]
    assert sum(len(batch["tokens"]) for batch in val) < 30
    again = torch.cat([batch["row_number"].flatten() for batch in data.val_dataloader()])
    assert torch.equal(again, rows)
    predict = torch.cat([batch["row_number"] for batch in data.predict_dataloader()])
    assert predict.tolist() == [[row] for row in range(30)]


def test_state_of_packs_of_another_length_is_refused(tmp_path: Path) -> None:
    loader = set_up(data_of(tmp_path), "fit").train_dataloader()
    next(iter(loader))
    other = set_up(data_of(tmp_path, sampler=Packed("tokens", 2 * LENGTH)), "fit")
    changed = other.train_dataloader()
    changed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="length"):
        next(iter(changed))


def test_five_resumes_on_other_numbers_of_processes_continue_the_epoch(tmp_path: Path) -> None:
    expected = [batch["tokens"].clone() for batch in batches_of(data_of(tmp_path))]
    found, state = list[Any](), None
    for session, size in enumerate([1, 2, 4, 2, 1]):
        data = data_of(tmp_path, batch_size=4 // size)
        set_up(data, "fit")
        whole = data.train_dataloader().loader
        loaders = [whole.of_process(rank, size) for rank in range(size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for step, parts in enumerate(zip(*loaders, strict=True)):
            tokens = [part["tokens"] for part in parts]
            joined = torch.empty(sum(map(len, tokens)), LENGTH, dtype=torch.int64)
            for rank, own in enumerate(tokens):
                joined[rank::size] = own
            found.append(joined)
            if step == 1 and session < 4:
                break
        state = loaders[0].state_dict()
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_random_numbers_of_a_pack_are_those_of_its_position(tmp_path: Path) -> None:
    def draw(batch: Any, random: RowRandom) -> Any:
        return {**batch, "drawn": random.uniform(3)}

    alone = [batch["drawn"].clone() for batch in batches_of(data_of(tmp_path, transform=draw))]
    assert len(torch.cat(alone).unique(dim=0)) == sum(map(len, alone))
    data = data_of(tmp_path, transform=draw, batch_size=2)
    set_up(data, "fit")
    whole = data.train_dataloader().loader
    ranks = [[batch["drawn"].clone() for batch in whole.of_process(rank, 2)] for rank in range(2)]
    for step, drawn in enumerate(alone):
        for rank in range(2):
            assert torch.equal(ranks[rank][step], drawn[rank::2])


def test_training_sets_are_packed_together(tmp_path: Path) -> None:
    sampler = Packed("tokens", LENGTH, shares={"a": 1, "b": 3}, shares_of="documents")
    sets: Any = {"a": Documents(60), "b": Documents(90)}
    data = data_of(tmp_path, sets, sampler=sampler, with_row_numbers=True)
    rows = torch.cat([batch["row_number"].flatten() for batch in batches_of(data)])
    rows = rows[rows >= 0]
    assert len(rows) == 150
    assert int((rows < 60).sum()) == pytest.approx(150 / 4, abs=1)


def test_folds_and_skipped_steps_are_those_of_other_orders(tmp_path: Path) -> None:
    whole = [batch["tokens"].clone() for batch in batches_of(data_of(tmp_path))]
    skipping = batches_of(data_of(tmp_path, skip_steps=[0, 3]))
    kept = [tokens for step, tokens in enumerate(whole) if step not in (0, 3)]
    assert len(kept) == len(skipping)
    assert all(
        torch.equal(batch["tokens"], tokens) for batch, tokens in zip(skipping, kept, strict=True)
    )
    seen = list[int]()
    for member in range(3):
        data = data_of(tmp_path, subset=KFold(3), member=member, with_row_numbers=True)
        set_up(data, "fit")
        held_out = set[int]()
        for batch in data.val_dataloader():
            held_out |= {*batch["row_number"].flatten().tolist()} - {-1}
        trained = set[int]()
        for batch in data.train_dataloader():
            trained |= {*batch["row_number"].flatten().tolist()} - {-1}
        assert trained == {*range(120)} - held_out
        seen += held_out
    assert sorted(seen) == [*range(120)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"decode": {"name": {}}}, r"decode=\['name'\] with sampler=Packed"),
        ({"decode": {"nothing": {}}}, r"decode=\['nothing'\] with sampler=Packed"),
        ({"layout": {"labels": "pad"}}, r"layout: .*no field 'labels'.*inner\.labels"),
        ({"layout": {"score": "pad"}}, r"layout: .*'score' have the shape"),
        ({"layout": {"name": "pad"}}, r"layout: field 'name' is text"),
    ],
)
def test_forms_that_packs_do_not_have_are_an_error(
    tmp_path: Path, options: Any, match: str
) -> None:
    batches_of(data_of(tmp_path))
    with pytest.raises(ValueError, match=match):
        batches_of(data_of(tmp_path).with_options(**options))


def test_packed_text_is_an_error(tmp_path: Path) -> None:
    rows = [{"text": "a" * (1 + row % 7)} for row in range(20)]
    data = MemmapDataModule(rows, store_dir=tmp_path, sampler=Packed("text", LENGTH))
    with pytest.raises(ValueError, match=r"'text'.*tokens"):
        batches_of(data)


def test_documents_of_one_length_are_packed_where_declared(tmp_path: Path) -> None:
    rows = [{"tokens": torch.arange(20), "labels": torch.arange(20)} for _ in range(3)]
    options: Any = {"store_dir": tmp_path, "num_shards": 1, "sampler": Packed("tokens", LENGTH)}
    with pytest.raises(ValueError, match=r"variable=\['tokens'\] and overwrite=True"):
        batches_of(MemmapDataModule(rows, **options))
    options |= {"variable": ["tokens", "labels"], "overwrite": True}
    (batch,) = batches_of(MemmapDataModule(rows, **options))
    assert batch["labels"].shape[1] == LENGTH
    assert int(batch["packing"].cu_seqlens.amax(1).sum()) == 60


class OtherLengths(Documents):
    """Another field has other lengths."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"tokens": super().__getitem__(row)["tokens"], "patches": torch.arange(row % 5)}


def test_field_of_other_lengths_is_an_error_unless_it_is_packed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patches"):
        batches_of(
            MemmapDataModule(OtherLengths(), store_dir=tmp_path, sampler=Packed("tokens", LENGTH))
        )
    limits = {"tokens": LENGTH, "patches": 8}
    data = MemmapDataModule(
        OtherLengths(), store_dir=tmp_path, sampler=Packed("tokens", limits), with_row_numbers=True
    )
    for batch in batches_of(data):
        assert batch["patches"].shape == (len(batch["tokens"]), 8)
        patches = documents_in(batch["patches"], batch["packing"]["patches"])
        for pack, rows in zip(patches, batch["row_number"].tolist(), strict=True):
            kept = [row % 5 for row in rows if row >= 0]
            stops = np.cumsum(kept)
            assert [len(each) for each in pack if len(each)] == [n for n in kept if n]
            assert len(stops) == sum(row >= 0 for row in rows)


@pytest.mark.parametrize("kind", ["tuple", "key"])
def test_samples_that_leave_no_place_are_an_error(tmp_path: Path, kind: str) -> None:
    class Other(Documents):
        def __getitem__(self, row: int) -> Any:
            tokens = super().__getitem__(row)["tokens"]
            return (tokens, row) if kind == "tuple" else {"tokens": tokens, "packing": row}

    name = "0" if kind == "tuple" else "tokens"
    with pytest.raises(ValueError, match="tuple" if kind == "tuple" else "packing"):
        batches_of(MemmapDataModule(Other(), store_dir=tmp_path, sampler=Packed(name, LENGTH)))
