"""Variants, and the options of a comparison."""

import re
from dataclasses import dataclass
from typing import Any

from lightning_memmap.arguments import read_config
from lightning_memmap.errors import check_integer, nearest
from lightning_memmap.strategies import STRATEGIES

#: Lightning's own strategies that can be compared, by the name that variants use.
LIGHTNING_STRATEGIES = ("auto", "ddp", "fsdp", "model_parallel")
#: Strategies of this pack under which all devices train one model, so that results can be compared.
_OURS = [name for name, cls, _ in STRATEGIES if getattr(cls, "trains_one_model", True)]
_NAMES = (*LIGHTNING_STRATEGIES, "ddp_find_unused_parameters_true", *_OURS)
_LOADER = re.compile(r"workers[0-9]+|ideal|memmap|first_epoch")


@dataclass(frozen=True)
class Variant:
    """One set-up to measure: a strategy and the loader of its rows."""

    strategy: str
    #: ``memmap``: the `MemmapDataModule` of the config. ``workersN``: its plain dataset through
    #: `torch.utils.data.DataLoader`. ``ideal``: one batch, fetched once and replayed.
    #: ``first_epoch``: the `MemmapDataModule` with a store that each run builds while it trains.
    loader: str = "memmap"

    @property
    def name(self) -> str:
        """The variant as ``--variants`` takes it."""
        return self.strategy if self.loader == "memmap" else f"{self.strategy}+{self.loader}"

    def variant_options(self, devices: int) -> dict[str, Any]:
        """Return the Trainer options of this variant; ``auto`` uses one device."""
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
        num_devices = 1 if self.strategy == "auto" else devices
        return {"strategy": strategy, "devices": num_devices, "num_nodes": 1}


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of variants such as ``ddp,auto+workers2``; ``all`` stands for `all_variants`."""
    variants: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        variants += all_variants() if name == "all" else [_parse(name)]
    if not variants:
        names = ", ".join(variant.name for variant in all_variants())
        raise ValueError(f"variants={text!r}: name at least one, such as {names}")
    for variant in variants:
        if (count := variants.count(variant)) > 1:
            raise ValueError(
                f"variants={text!r}: {variant.name} is listed {count} times. List it once, and set"
                " --repeats to the number of timed runs"
            )
    return tuple(variants)


def all_variants() -> tuple[Variant, ...]:
    """List the single device with each loader, and every other strategy with the store."""
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
        if strategy in {known_name for known_name, *_ in STRATEGIES} - {*_OURS}:
            problem = "trains several models."
        raise ValueError(
            f"variants: {name!r} {problem}"
            f" A variant is a strategy ({', '.join(_NAMES)}),"
            " which may be followed by +workersN (its rows come from a DataLoader with N workers),"
            " +first_epoch (its store is built while it trains) or +ideal (one batch replayed)"
        )
    return Variant(strategy, loader or "memmap")


#: Options of the Trainer that a config may set for all variants. The comparison sets all other
#: options itself, because they could make variants differ.
SHARED_TRAINER_OPTIONS = (
    "accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "deterministic",
    "benchmark", "sync_batchnorm",
)  # fmt: skip
_SECTIONS = ("seed_everything", "model", "data", "optimizer", "lr_scheduler")
#: A rate needs two steps. In a check run, the second step measures the bytes of the model.
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
        check_steps: Steps that are checked for parity, in a separate run.
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
                f"tolerance={self.tolerance}: must be a relative difference of at least 0"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}: must be more than 0 seconds")


def shared_config(path: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Split the config of a fit into shared sections, shared Trainer options, and unused keys."""
    config = read_config(path, "model", "data")
    sections = {name: config[name] for name in _SECTIONS if config.get(name) is not None}
    # A random seed, which True asks for, would differ from run to run.
    if type(sections.get("seed_everything")) is not int:
        sections["seed_everything"] = 0
    options = config.get("trainer") or {}
    shared = {
        name: options[name] for name in SHARED_TRAINER_OPTIONS if options.get(name) is not None
    }
    unused = [f"trainer.{name}" for name in options if name not in SHARED_TRAINER_OPTIONS]
    unused += [name for name in config if name not in (*_SECTIONS, "trainer")]
    return sections, shared, unused
