"""What is compared: variants, the options of a comparison, and what a run is told to do."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_memmap.arguments import read_config
from lightning_memmap.compare.folder import RUN_SCHEMA, SPEC
from lightning_memmap.errors import check_integer, nearest
from lightning_memmap.strategies import STRATEGIES

#: Lightning's own strategies that can be compared, by the name that they have here.
LIGHTNING_STRATEGIES = ("auto", "ddp", "fsdp", "model_parallel")
#: Those of this pack under which all devices train one model, whose results can be compared.
_OURS = [name for name, cls, _ in STRATEGIES if getattr(cls, "trains_one_model", True)]
_NAMES = (*LIGHTNING_STRATEGIES, "ddp_find_unused_parameters_true", *_OURS)
_LOADER = re.compile(r"workers[0-9]+|ideal|memmap|first_epoch")


@dataclass(frozen=True)
class Variant:
    """One set-up to measure: a strategy and what supplies its rows."""

    strategy: str
    #: ``memmap``: the `MemmapDataModule` of the config. ``workersN``: its plain dataset through
    #: `torch.utils.data.DataLoader`. ``ideal``: one batch, fetched once and replayed.
    #: ``first_epoch``: the `MemmapDataModule` with a store that each run builds while it trains.
    loader: str = "memmap"

    @property
    def name(self) -> str:
        """The variant as ``--variants`` takes it."""
        return self.strategy if self.loader == "memmap" else f"{self.strategy}+{self.loader}"

    def trainer_options(self, devices: int) -> dict[str, Any]:
        """The options of the Trainer that make the variant; ``auto`` uses one device."""
        strategy: Any = self.strategy
        if strategy == "model_parallel":
            strategy = {
                "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
                "init_args": {
                    "data_parallel_size": devices,
                    "tensor_parallel_size": 1,
                    "save_distributed_checkpoint": False,
                },
            }
        used = 1 if self.strategy == "auto" else devices
        return {"strategy": strategy, "devices": used, "num_nodes": 1}


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of variants such as ``ddp,auto+workers2``; ``all`` stands for `all_variants`."""
    found: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        found += all_variants() if name == "all" else [_parse(name)]
    if not found:
        names = ", ".join(variant.name for variant in all_variants())
        raise ValueError(f"variants={text!r}: name at least one, such as {names}")
    for variant in found:
        if found.count(variant) > 1:
            raise ValueError(
                f"variants={text!r}: {variant.name} is there {found.count(variant)} times; name it"
                " once, and choose by --repeats how often each is timed"
            )
    return tuple(found)


def all_variants() -> tuple[Variant, ...]:
    """The single device with each loader, and every other strategy with the store."""
    return (
        Variant("auto"),
        Variant("auto", "workers0"),
        Variant("auto", "workers2"),
        Variant("auto", "ideal"),
        *(Variant(name) for name in _OURS),
        *(Variant(name) for name in LIGHTNING_STRATEGIES if name != "auto"),
    )


def _parse(name: str) -> Variant:
    strategy, plus, loader = name.partition("+")
    if strategy not in _NAMES or (plus and not _LOADER.fullmatch(loader)):
        workers = "+workers" + (re.sub("[^0-9]", "", loader) or "0")
        ends = ("", "+ideal", "+first_epoch", workers)
        names = [start + end for start in _NAMES for end in ends]
        problem = f"is unknown{nearest(name, names) or '.'}"
        if any(strategy == known for known, *_ in STRATEGIES if known not in _OURS):
            problem = "trains several models."
        raise ValueError(
            f"variants: {name!r} {problem}"
            f" A variant is a strategy ({', '.join(_NAMES)}),"
            " which may be followed by +workersN (its rows come from a DataLoader with N workers),"
            " +first_epoch (its store is built while it trains) or +ideal (one batch replayed)"
        )
    return Variant(strategy, loader or "memmap")


#: ``check`` trains a few steps and notes rows, losses, weights and bytes; ``timed`` measures time
#: and memory, and does nothing else.
RunKind = Literal["check", "timed"]

#: Options of the Trainer that a config may set for all variants. The comparison itself sets the
#: others, which could make variants differ.
TRAINER_OPTIONS = (
    "accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "deterministic",
    "benchmark", "sync_batchnorm",
)  # fmt: skip
_SECTIONS = ("seed_everything", "model", "data", "optimizer", "lr_scheduler")
#: A rate needs two steps. Most of the first steps of a check run look at one thing more.
_LEAST = {"devices": 1, "repeats": 1, "warmup_steps": 1, "steps": 2, "check_steps": 4}


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of a comparison.

    Args:
        config: Path of a config, as for ``lightning-memmap fit``. Its model and data are used,
            its seed, and those options of the Trainer that can be the same for all variants.
        variants: Variants, separated by commas. A variant is a strategy, of this pack or ``auto``,
            ``ddp``, ``fsdp`` or ``model_parallel``. With ``+workersN`` its rows come from a
            DataLoader with N workers; with ``+first_epoch`` each run builds its own store while
            it trains; with ``+ideal`` one batch is replayed: the no-load upper bound. ``all``
            stands for all strategies and, on one device, the other loaders.
        devices: Devices of each variant; on a CPU processes or logical data devices. A step has
            ``batch_size`` of the config times this many rows, in every variant.
        repeats: Timed runs of each variant.
        steps: Steps that are measured in each of them.
        warmup_steps: Steps before those, which are not measured.
        check_steps: Steps that are checked for parity, in a run of their own.
        tolerance: How far losses and weights may differ, relatively; by default as docs/compare.md
            says for the precision.
        timeout_s: Seconds after which a run is ended, and counts as failed.
        out: Folder of the report.

    Raises:
        ValueError: A number is out of range.
    """

    config: str
    variants: str = "all"
    devices: int = 2
    repeats: int = 3
    steps: int = 100
    warmup_steps: int = 10
    check_steps: int = 10
    tolerance: float | None = None
    timeout_s: float = 1800.0
    out: str = "runs/compare"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least)
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(
                f"tolerance={self.tolerance}: give a relative difference of at least 0, or omit it"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}: give more than 0 seconds")


@dataclass(frozen=True)
class RunSpec:
    """What one run, in fresh processes, has to do."""

    kind: RunKind
    config: dict[str, Any]
    trainer: dict[str, Any]
    variant: str
    devices: int
    global_batch: int
    num_shards: int
    warmup_steps: int
    steps: int
    transform_is_random: bool
    out: str
    #: Marks the folder as one of a comparison.
    schema: str = RUN_SCHEMA

    def write(self) -> Path:
        """Write this into its folder, which is made where it is missing."""
        path = Path(self.out) / SPEC
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> "RunSpec":
        """Read what `write` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def shared_config(path: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Of a config of a fit: sections and Trainer options for all variants, and what is left out."""
    config = read_config(path, "model", "data")
    sections = {name: config[name] for name in _SECTIONS if config.get(name) is not None}
    # A random seed, which True asks for, would differ from run to run.
    if type(sections.get("seed_everything")) is not int:
        sections["seed_everything"] = 0
    options = config.get("trainer") or {}
    kept = {name: options[name] for name in TRAINER_OPTIONS if options.get(name) is not None}
    left_out = [f"trainer.{name}" for name in options if name not in TRAINER_OPTIONS]
    left_out += [name for name in config if name not in (*_SECTIONS, "trainer")]
    return sections, kept, left_out
