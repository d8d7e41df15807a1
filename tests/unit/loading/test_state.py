"""A state that is loaded is what was saved, or one clear error."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memmap import MemmapDataModule
from lightning_memmap.store import Store
from tests.rows import epoch_rows, make_loader, take_steps

Stores = Callable[..., Store]

STATE = {
    "num_rows": 97,
    "num_shards": 24,
    "seed": 0,
    "shuffle": True,
    "shuffle_window": None,
    "epoch": 1,
    "position": 16,
    "steps": 2,
}
#: What is changed, and what the error says of it.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"position": -3}, r"position=-3: it must be a whole number, 0 or more"),
    ({"position": 98}, r"position=98: it must be within num_rows=97"),
    ({"position": "16"}, r"position='16': it must be a whole number"),
    ({"position": 16.0}, r"position=16\.0: it must be a whole number"),
    ({"position": True}, r"position=True: it must be a whole number"),
    ({"position": None}, r"position=None: it must be a whole number"),
    ({"epoch": -1}, r"epoch=-1: it must be a whole number, 0 or more"),
    ({"steps": 17}, r"steps=17: each step has at least one of the position=16 rows"),
    ({"steps": 0}, r"steps=0: each step has at least one"),
    ({"num_rows": 0}, r"num_rows=0: it must be a whole number of at least 1"),
    ({"num_shards": [24]}, r"num_shards=\[24\]: it must be a whole number of at least 1"),
    ({"seed": "x"}, r"seed='x': it must be a whole number"),
    ({"shuffle": 1}, r"shuffle=1: it must be True or False"),
    ({"shuffle_window": 0}, r"shuffle_window=0: it must be a whole number of at least 1"),
    ({"weights": 1}, r"it has weights, which this version of lightning_memmap does not know"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_state_with_a_wrong_value_is_refused(
    numbered_store: Stores, changes: dict[str, Any], words: str
) -> None:
    loader = make_loader(numbered_store(97, 24), shuffle=True)
    with pytest.raises(ValueError, match=rf"{words}.* Resume from a checkpoint"):
        loader.load_state_dict({**STATE, **changes})


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_state_that_is_no_dict_is_refused(numbered_store: Stores, state: Any) -> None:
    with pytest.raises(ValueError, match=rf"it is a {type(state).__name__}, not a dict"):
        make_loader(numbered_store(97, 24)).load_state_dict(state)


@pytest.mark.parametrize("name", STATE)
def test_state_that_lacks_a_key_is_refused(numbered_store: Stores, name: str) -> None:
    state = {key: value for key, value in STATE.items() if key != name}
    with pytest.raises(ValueError, match=f"it lacks {name}"):
        make_loader(numbered_store(97, 24)).load_state_dict(state)


values = st.one_of(
    st.integers(-(2**70), 2**70), st.booleans(), st.none(), st.text(max_size=3), st.floats()
)


@given(name=st.sampled_from(list(STATE)), value=values)
@settings(deadline=None, max_examples=200)
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
        if f"{name}=" not in str(error):
            raise AssertionError(f"{name} is not named") from error
        raise


def test_state_that_is_refused_leaves_the_loader_as_it_was(numbered_store: Stores) -> None:
    loader, other = (make_loader(numbered_store(97, 24), shuffle=True) for _ in range(2))
    for each in (loader, other):
        list(take_steps(each, 2))
    before = loader.state_dict()
    with pytest.raises(ValueError, match="position=-1"):
        loader.load_state_dict({**before, "position": -1})
    assert loader.state_dict() == before
    assert epoch_rows(loader) == epoch_rows(other)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([], "the state of the data module is a list"),
        ({"train": {**STATE, "position": -3}}, "position=-3"),
        ({"train": 3}, "it is a int, not a dict"),
        ({"rows": "all"}, "rows='all', which names no fold and no part"),
        ({"rows": {"index": "0", "count": 2, "excluded": True}}, "rows=.* names no fold"),
        ({"rows": {"index": 3, "count": 2, "excluded": True}}, "rows=.* names no fold"),
        ({"num_trained": -1}, "num_trained=-1, which is no number of batches"),
        ({"num_trained": True}, "num_trained=True, which is no number of batches"),
    ],
)
def test_state_of_a_data_module_that_is_wrong_is_refused(state: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemmapDataModule(store_dir="nowhere").load_state_dict(state)


def test_state_of_a_data_module_may_have_more_of_a_subclass() -> None:
    MemmapDataModule(store_dir="nowhere").load_state_dict({"train": STATE, "mine": 1})
