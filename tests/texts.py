"""Texts of any characters, for property tests."""

from hypothesis import strategies as st

_CHARACTERS = st.characters(exclude_categories=["Cs"])


def texts(max_size: int) -> st.SearchStrategy[str]:
    """As ``st.text``, which tries for seconds which characters UTF-8 has: all but surrogates."""
    return st.text(_CHARACTERS, max_size=max_size)
