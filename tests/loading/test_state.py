"""A state that is loaded is what was saved, or one clear error."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap import MemmapDataModule
from lightning_memmap.store import Store
from tests.support.datasets import texts
from tests.support.rows import epoch_rows, joined, make_loader, step_rows, take_steps

Stores = Callable[..., Store]

FIT = {"num_batches": 3, "total_batches": 3, "optimizer_steps": 3, "logged_steps": 3}
STATE = {
    "sampler": {
        "sampler": "ShuffledSampler",
        "shards": {"num_rows": 97, "num_shards": 24, "subset": None},
        "seed": 0,
    },
    "num_positions": 97,
    "seed": 0,
    "epoch": 1,
    "position": 16,
    "steps": 2,
}
#: What is changed, and what the error says of it.
WRONG: list[tuple[Any, str]] = [
    ({"position": -3}, r"int` >= 0 - at `\$\.position`"),
    ({"position": 98}, r"position=98 of num_positions=97"),
    *(({"position": wrong}, r"Expected `int`.*\$\.position") for wrong in ("16", 16.5, True, None)),
    ({"steps": 17}, r"steps=17: .*position=16"),
    ({"steps": 0}, r"steps=0: .*position=16"),
    ({"num_positions": 15}, r"position=16 of num_positions=15"),
    ({"sampler": 1}, r"Expected `object`.*\$\.sampler"),
    ({"sampler": {"shards": 3}}, r"sampler: the shards"),
    ({"weights": 1}, r"unknown field `weights`"),
]
#: Another order, and what the error of the epoch says of it.
OTHER_ORDERS: list[tuple[dict[str, Any], str]] = [
    ({"sampler": "SequentialSampler"}, r"sampler=SequentialSampler, .*the shuffle"),
    ({"seed": 7}, r"seed=7, and this loader has seed=0"),
    ({"shuffle_block": 3}, r"shuffle_block=3, and this loader has shuffle_block=None"),
    ({"shards": {"num_rows": 97, "num_shards": 4}}, r"num_shards=4, .* resume with num_shards=4"),
    ({"shards": {}}, r"num_rows=None"),
]


@pytest.mark.parametrize(("changes", "words"), OTHER_ORDERS)
def test_state_of_another_order_is_refused_inside_its_epoch(
    numbered_store: Stores, changes: dict[str, Any], words: str
) -> None:
    loader = make_loader(numbered_store(97, 24), shuffle=True)
    sampler: Any = STATE["sampler"]
    loader.load_state_dict({**STATE, "sampler": {**sampler, **changes}})
    loader.set_epoch(1)
    with pytest.raises(ValueError, match=words):
        next(iter(loader))


def test_state_of_other_blocks_is_refused(numbered_store: Stores) -> None:
    saved, other = (make_loader(numbered_store(97, 24), shuffle=True, window=n) for n in (2, 3))
    next(iter(saved))
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"shuffle_block=2, .*shuffle_block=3"):
        next(iter(other))


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_state_with_a_wrong_value_is_refused(
    numbered_store: Stores, changes: dict[str, Any], words: str
) -> None:
    loader = make_loader(numbered_store(97, 24), shuffle=True)
    with pytest.raises(ValueError, match=rf"{words}.* Resume from a checkpoint"):
        loader.load_state_dict({**STATE, **changes})


@pytest.mark.parametrize(
    "state", [None, [], "state", {k: v for k, v in STATE.items() if k != "seed"}]
)
def test_state_that_is_no_dict_or_lacks_a_key_is_refused(
    numbered_store: Stores, state: Any
) -> None:
    with pytest.raises(ValueError, match=r"Expected `object`|missing required field `seed`"):
        make_loader(numbered_store(97, 24)).load_state_dict(state)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_state_of_another_global_batch_resumes_with_a_notice(
    numbered_store: Stores, caplog: pytest.LogCaptureFixture, num_devices: int
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    saved = make_loader(numbered_store(97, 24), 2, 4, shuffle=True)
    delivered = joined(step_rows(batch) for batch in take_steps(saved, 3))
    # The same global batch on any number of devices is silent.
    make_loader(numbered_store(97, 24), 1, 8, shuffle=True).load_state_dict(saved.state_dict())
    assert not caplog.records
    other = make_loader(numbered_store(97, 24), num_devices, 3, shuffle=True)
    other.load_state_dict(saved.state_dict())
    (record,) = caplog.records
    assert {"8", str(3 * num_devices)} <= {*record.getMessage().split()}
    rest = epoch_rows(other)
    assert len(rest[0]) == 3 * num_devices
    assert sorted(delivered + joined(rest)) == [*range(97)]


values = st.one_of(st.integers(-(2**70), 2**70), st.booleans(), st.none(), texts(3), st.floats())


@given(name=st.sampled_from(list(STATE)), value=values)
def test_state_with_any_value_goes_on_or_is_refused_in_words(
    numbered_store: Stores, name: str, value: Any
) -> None:
    loader = make_loader(numbered_store(97, 24), shuffle=True)
    with contextlib.suppress(ValueError), name_in_error(name):
        loader.load_state_dict({**STATE, name: value})
        loader.set_epoch(1)
        next(iter(loader), None)


@contextlib.contextmanager
def name_in_error(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if f"{name}=" not in str(error) and f"$.{name}" not in str(error):
            raise AssertionError(f"{name} is not named") from error
        raise


def test_state_that_is_refused_leaves_the_loader_as_it_was(numbered_store: Stores) -> None:
    loader, other = (make_loader(numbered_store(97, 24), shuffle=True) for _ in range(2))
    for each in (loader, other):
        list(take_steps(each, 2))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"\$\.position"):
        loader.load_state_dict({**before, "position": -1})
    assert loader.state_dict() == before
    assert epoch_rows(loader) == epoch_rows(other)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([], "the state of the data module cannot be loaded"),
        ({"train": {**STATE, "position": -3}}, "position"),
        ({"train": 3}, r"got `int` - at `\$\.train"),
        ({"fit": {**FIT, "num_batches": -1}}, "num_batches"),
        ({"fit": {**FIT, "logged_steps": True}}, "logged_steps"),
        ({"fit": {"num_batches": 3}}, "total_batches"),
    ],
)
def test_state_of_a_data_module_that_is_wrong_is_refused(state: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemmapDataModule(store_dir="nowhere").load_state_dict(state)


def test_state_of_a_data_module_may_have_more_of_a_subclass() -> None:
    MemmapDataModule(store_dir="nowhere").load_state_dict({"train": STATE, "mine": 1})
