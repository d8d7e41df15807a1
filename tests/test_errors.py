"""The words of messages."""

import pytest

from lightning_memmap.errors import with_article


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int", "an int"),
        ("OrderedDict", "an OrderedDict"),
        ("str", "a str"),
        ("NoneType", "a NoneType"),
        ("uint8", "a uint8"),
    ],
)
def test_name_has_the_article_that_it_is_spoken_with(name: str, expected: str) -> None:
    assert with_article(name) == expected
