"""The report of a comparison: what is written as ``report.json``, and read back."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_memmap.compare.against import Difference
from lightning_memmap.compare.results import ArmResult

#: Goes up when a field changes its meaning or goes away. See docs/compare.md.
SCHEMA_VERSION = 1
_SCHEMA = "lightning_memmap.compare"


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
    """The values of a ``report.json``.

    Raises:
        ValueError: The file is no report, or one of another version.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(values, dict) or values.get("schema") != _SCHEMA:
        raise ValueError(f"{path} is not the report of a comparison")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {values.get('schema_version')}, and this version of the"
            f" package reads {SCHEMA_VERSION}: run the comparison again"
        )
    return values


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
