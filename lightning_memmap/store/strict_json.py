"""Untrusted JSON: of limited size, with each key once, and with integers as its only numbers.

The size of the result is counted before the text is parsed: a few megabytes of brackets make
gigabytes of Python objects.
"""

import json
from itertools import accumulate
from typing import Any

#: The largest integer has 63 bits: 19 digits and a sign.
_MAX_DIGITS = 20
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def parse_json(text: bytes, *, max_values: int, max_containers: int, max_depth: int) -> Any:
    """Parse JSON that has not been checked.

    Args:
        text: JSON in UTF-8.
        max_values: The most values of all kinds.
        max_containers: The most lists and objects.
        max_depth: The most lists and objects that contain each other.

    Returns:
        Its value: dicts, lists, strings, integers, bools and None.

    Raises:
        ValueError: The text is not JSON, is larger than allowed, has a key of an object twice, or
            has a fraction or an integer of more than 20 characters.
    """
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # Of the pieces between quotes, every other one is outside of strings. A key and its value can
    # both be strings, of two quotes each.
    if unescaped.count(b'"') > 4 * max_values:
        raise ValueError(f"it has more than {2 * max_values} strings")
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b",") > max_values:
        raise ValueError(f"it has more than {max_values} values")
    brackets = outside.translate(None, _OTHERS)
    if len(brackets) > 2 * max_containers:
        raise ValueError(f"it has more than {max_containers} lists and objects")
    steps = (1 if bracket in b"[{" else -1 for bracket in brackets)
    if max(accumulate(steps), default=0) > max_depth:
        raise ValueError(f"it is nested deeper than {max_depth} lists and objects")
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_make_dict,
        parse_int=_parse_int,
        parse_float=_refuse_number,
        parse_constant=_refuse_number,
    )


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("it names a key of an object twice")
    return made


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} characters")
    return int(digits)


def _refuse_number(digits: str) -> None:
    raise ValueError(f"it holds {digits[:_MAX_DIGITS]}, which is not an integer")
