"""What one run in a fresh process is told, as a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

RunKind = Literal["prepare", "check", "timed"]

#: Options of the Trainer that a config may set for all arms. All others belong to the comparison,
#: or would make arms differ.
TRAINER_OPTIONS = (
    "accelerator",
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "sync_batchnorm",
)
_SECTIONS = ("seed_everything", "model", "data", "optimizer", "lr_scheduler")


@dataclass(frozen=True)
class RunSpec:
    """One run.

    Args:
        kind: ``prepare`` builds the store and looks at model and data; ``check`` trains a few
            steps and notes rows, losses, weights and bytes; ``timed`` trains and measures time
            and memory, and does nothing else.
        config: The sections of the user's config that all arms share.
        trainer: Options of the Trainer for this arm.
        arm: Name of the arm; empty for ``prepare``.
        devices: Devices of the comparison.
        global_batch: Rows of a step over all processes; 0 until ``prepare`` has said it.
        warmup_steps: Steps before those that are measured.
        steps: Steps that are measured, or checked.
        split_steps: Steps after them, in which the parts of a step are timed.
        calm: Take out what is random by nature: dropout, and a random training transform, for
            which the one of evaluation steps in.
        transform_is_random: What ``prepare`` found.
        out: Folder of this run's files.
    """

    kind: RunKind
    config: dict[str, Any]
    trainer: dict[str, Any]
    arm: str
    devices: int
    global_batch: int
    warmup_steps: int
    steps: int
    split_steps: int
    calm: bool
    transform_is_random: bool
    out: str

    @property
    def total_steps(self) -> int:
        """All steps of the run."""
        return self.warmup_steps + self.steps + self.split_steps

    def write(self) -> Path:
        """Write this into its folder."""
        path = Path(self.out) / "spec.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> "RunSpec":
        """Read what `write` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def shared_config(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The parts of a config for ``lightning-memmap fit`` that a comparison uses.

    Args:
        config: What the yaml file holds.

    Returns:
        The sections for all arms, the options of the Trainer for all arms, and the names of what
        is left out.

    Raises:
        ValueError: There is no model or no data in it.
    """
    if isinstance(config, dict) and "model" not in config and isinstance(config.get("fit"), dict):
        config = config["fit"]
    for name in ("model", "data"):
        if not isinstance(config, dict) or not config.get(name):
            raise ValueError(f"config: it has no section {name!r}; give the one of a fit")
    sections = {name: config[name] for name in _SECTIONS if config.get(name) is not None}
    # A random seed, which True asks for, would be another one in each run.
    if type(sections.get("seed_everything")) is not int:
        sections["seed_everything"] = 0
    options = config.get("trainer") or {}
    kept = {name: options[name] for name in TRAINER_OPTIONS if options.get(name) is not None}
    left_out = [f"trainer.{name}" for name in options if name not in TRAINER_OPTIONS]
    left_out += [name for name in config if name not in (*_SECTIONS, "trainer")]
    return sections, kept, left_out
