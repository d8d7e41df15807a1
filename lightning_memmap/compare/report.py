"""The report of a comparison: what is written as ``report.json``, and read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_memmap.compare.against import Difference
from lightning_memmap.compare.results import ArmResult

#: Goes up when a field changes its meaning or goes away. See docs/compare.md.
SCHEMA_VERSION = 1
_SCHEMA = "lightning_memmap.compare"
#: Reports have some ten kilobytes, and a number for each step of a memory trace.
_MAX_BYTES = 2**26


@dataclass(frozen=True)
class ScalingPoint:
    """Speed of an arm on one number of devices, with the rows per device held the same.

    Args:
        arm: Its name.
        devices: Devices that it used.
        global_batch: Rows of a step.
        samples_per_s: Rows a second in each run, over all devices.
        reason: Why there is no figure.
    """

    arm: str
    devices: int
    global_batch: int
    samples_per_s: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """A comparison.

    Args:
        created: When it began, ISO 8601.
        command: The command line.
        environment: Machine and versions.
        settings: What the command was told.
        data: The store.
        model: The model.
        reference: Name of the arm that the others are compared with; empty where none finished.
        arms: In the order in which they were asked for.
        scaling: Speed on several numbers of devices.
        left_out: Parts of the config that a comparison does not use.
        interrupted: Whether the user stopped it.
        against: What changed since another report.
    """

    created: str
    command: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    reference: str
    arms: tuple[ArmResult, ...]
    scaling: tuple[ScalingPoint, ...] = ()
    left_out: tuple[str, ...] = field(default=())
    interrupted: bool = False
    against: Difference | None = None

    @property
    def parity_held(self) -> bool:
        """Whether no arm was found to differ."""
        return not any(arm.parity is not None and arm.parity.held is False for arm in self.arms)

    @property
    def exit_code(self) -> int:
        """0: every arm that ran agrees. 1: one does not. 3: one failed, or could not be judged,
        or nothing ran. 4: all is well, but an arm is slower than in the report that this one was
        compared with. 130: interrupted."""
        if self.interrupted:
            return 130
        if not self.parity_held:
            return 1
        ran = [arm for arm in self.arms if arm.status == "ok"]
        unjudged = [arm for arm in ran if arm.parity is not None and arm.parity.held is None]
        failed = [arm for arm in self.arms if arm.status in ("failed", "pending")]
        if failed or unjudged or not ran:
            return 3
        return 4 if self.against is not None and self.against.is_slower else 0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        values = {"schema": _SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}
        values |= {"parity_held": self.parity_held, "exit_code": self.exit_code}
        for arm, result in zip(values["arms"], self.arms, strict=True):
            if result.holding is not None:
                arm["holding"]["state_bytes_per_device"] = result.holding.state_bytes_per_device
                arm["holding"]["moved_bytes"] = result.holding.moved_bytes
        plain: dict[str, Any] = _plain(values)
        return plain

    def write(self, path: Path) -> None:
        """Write the report as JSON; the file is whole or it is not there."""
        partial = path.with_suffix(".partial")
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def read_report(path: str | Path) -> dict[str, Any]:
    """The values of a ``report.json``, of which each field of `Report` has its type. A figure may
    be None: it is not known.

    Raises:
        ValueError: The file is no report, or one of another version.
        OSError: It cannot be read.
    """
    values = _read_json(Path(path))
    if not isinstance(values, dict) or values.get("schema") != _SCHEMA:
        raise ValueError(f"{path} is not the report of a comparison")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {values.get('schema_version')!r:.50}, and this version of"
            f" the package reads {SCHEMA_VERSION}: run the comparison again"
        )
    try:
        _check_type(values, Report, "the report")
    except TypeError as error:
        raise ValueError(f"{path} is not a whole report of a comparison: {error}") from None
    return values


def _read_json(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"it has {name}, which is not JSON")

    # Not a pipe, at which one would wait forever.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: name the report.json of a comparison")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is larger than any report of a comparison")
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error


def _check_type(value: Any, expected: Any, name: str) -> None:
    """See that a JSON value could have become of a value of a type.

    Args:
        value: What was read.
        expected: A dataclass, or the annotation of a field of one.
        name: What the value is, for the message.

    Raises:
        TypeError: It could not. The message names the field.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any:
        return
    if is_dataclass(expected):
        _check_kind(value, dict, name)
        for field_name, annotation in get_type_hints(expected).items():
            if field_name not in value:
                raise TypeError(f"{name} has no {field_name!r}")
            _check_type(value[field_name], annotation, f"{field_name!r} of {name}")
    elif origin is UnionType:
        if value is not None:
            _check_type(value, arguments[0], name)
    elif origin is Mapping:
        _check_kind(value, dict, name)
        for key, item in value.items():
            _check_type(item, arguments[1], f"{key!r:.50} of {name}")
    elif origin in (tuple, Sequence):
        _check_kind(value, list, name)
        for item in value:
            _check_type(item, arguments[0], f"an item of {name}")
    elif origin is Literal:
        if value not in arguments:
            raise TypeError(f"{name} is {value!r:.50}")
    elif expected is float:
        if value is not None:
            _check_kind(value, (int, float), name)
    else:
        _check_kind(value, expected, name)


def _check_kind(value: Any, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r:.50}")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
