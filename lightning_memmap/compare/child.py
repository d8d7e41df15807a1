"""One run in a fresh process: ``python -m lightning_memmap.compare.child SPEC``.

Under a strategy with several processes, each of them runs this file again.
"""

import json
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_memmap.arguments import TrainingParser, shortened
from lightning_memmap.callbacks import MemoryTrace
from lightning_memmap.compare.arms import parse_arms
from lightning_memmap.compare.clock import StepClock
from lightning_memmap.compare.environment import describe_environment
from lightning_memmap.compare.feeds import feed_data
from lightning_memmap.compare.measure import (
    FIRST_TRACED_STEP,
    NUM_TRACED_STEPS,
    CheckRun,
    RunCallback,
    TimedRun,
    synchronizer,
)
from lightning_memmap.compare.rows import NotedLoader, Tap, expected_hashes, hash_batch
from lightning_memmap.compare.spec import RunSpec
from lightning_memmap.datamodule import MemmapDataModule
from lightning_memmap.errors import MemmapError
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.sampling import BatchSchedule
from lightning_memmap.store import Store, open_store

#: Errors by which a strategy, a store or the Trainer says that it cannot do what it is asked for.
REFUSALS = (MemmapError, ValueError, ModuleNotFoundError, MisconfigurationException)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PROBE_ROWS = 8


class RunCLI(LightningCLI):
    """LightningCLI that is given its config, and leaves the running to others.

    Raises:
        ValueError: The config has a name or a value that the classes do not take.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(
            args=config,
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
            # No checkpoint is written.
            load_from_checkpoint_support=False,
            parser_class=TrainingParser,
            parser_kwargs={"exit_on_error": False},
        )

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        # Lightning's own would warn that this process has arguments too.
        assert isinstance(parser, ArgumentParser)
        try:
            self.config = parser.parse_object(args)
        except ArgumentError as error:
            raise ValueError(f"config: {shortened(str(error))}") from error


class ConfigCheck(RunCLI):
    """Parses the config of a run, as the run will, and makes nothing of it."""

    def __init__(self, spec: RunSpec) -> None:
        # A seed would be set here, in a process that trains nothing.
        config = {key: value for key, value in spec.config.items() if key != "seed_everything"}
        super().__init__({**config, "trainer": trainer_options(spec)})

    @override
    def instantiate_classes(self) -> None:
        """Leave that to the run."""


def main() -> None:
    """Do the run, and write what came out, or what went wrong, into its folder."""
    spec = RunSpec.read(sys.argv[1])
    try:
        prepare(spec) if spec.kind == "prepare" else train(spec)
    except BaseException as error:
        _write_error(spec, error)
        raise


def _write_error(spec: RunSpec, error: BaseException) -> None:
    out = Path(spec.out)
    # The first process that fails says why; the others are ended by it.
    if (out / "error.json").exists():
        return
    found = {
        "type": type(error).__name__,
        "message": str(error),
        "refused": isinstance(error, REFUSALS) and not (out / "progress").exists(),
        "traceback": traceback.format_exc(),
    }
    (out / "error.json").write_text(json.dumps(found), encoding="utf-8")


def trainer_options(spec: RunSpec) -> dict[str, Any]:
    """All options of the Trainer of a run."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "max_epochs": -1,
        "max_steps": spec.total_steps,
        "default_root_dir": spec.out,
        **spec.trainer,
    }


def _make_cli(spec: RunSpec) -> tuple[RunCLI, MemmapDataModule]:
    cli = RunCLI({**spec.config, "trainer": trainer_options(spec)})
    data = cli.datamodule
    if not isinstance(data, MemmapDataModule):
        raise ValueError(
            f"config: data is a {type(data).__name__}; a comparison needs a MemmapDataModule, from"
            " whose datasets and stores all arms are fed"
        )
    # Steps of one size: in an uneven one, DDP weighs processes and not rows.
    data.drop_last = True
    data.overwrite = False
    return cli, data


def train(spec: RunSpec) -> None:
    """Train an arm and write what each process measured.

    Raises:
        ValueError: The config has no `MemmapDataModule`, or the arm cannot share the batch.
    """
    cli, data = _make_cli(spec)
    train_arm(spec, cli.trainer, cli.model, data)


def train_arm(
    spec: RunSpec, trainer: Any, model: L.LightningModule, data: MemmapDataModule
) -> None:
    """Train and measure with what the config stands for; see `train`."""
    (arm,) = parse_arms(spec.arm)
    if spec.calm:
        for module in model.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        if spec.transform_is_random and data.eval_transform is not None:
            data.transform = data.eval_transform
    callback: RunCallback
    if spec.kind == "check":
        taken: list[int] = []
        if data.transform is None:
            _note_batches(trainer.strategy, taken)
        else:
            data.transform = Tap(data.transform, taken)
        callback = CheckRun(spec, data, taken)
        trainer.callbacks.append(MemoryTrace(spec.out, FIRST_TRACED_STEP, NUM_TRACED_STEPS))
    else:
        clock = StepClock(synchronizer(trainer.strategy.root_device))
        trainer.profiler = clock
        callback = TimedRun(spec, data, clock)
    trainer.callbacks.append(callback)
    fed = feed_data(data, arm.feed, spec.global_batch, transform_here=spec.kind == "check")
    trainer.fit(model, datamodule=fed)


def _note_batches(strategy: Any, hashes: list[int]) -> None:
    """Note the rows of each batch as the loader of a strategy gives it: before the precision casts
    it and the module's transfer hooks change it."""
    process = strategy.process_dataloader
    strategy.process_dataloader = lambda loader: NotedLoader(process(loader), hashes)


def prepare(spec: RunSpec) -> None:
    """Build the store, and write the facts about model and data that all arms need.

    Raises:
        ValueError: There are fewer rows than a step takes.
    """
    cli, data = _make_cli(spec)
    for split in ("test", "predict"):
        data.datasets[split] = None
    path = data.store_dir / "train"
    was_built = (path / "manifest.json").exists()
    started_s = perf_counter()
    data.prepare_data()
    built_s = perf_counter() - started_s
    store = open_store(path)
    global_batch = data.batch_size * spec.devices
    plan = BatchSchedule(store.num_rows, global_batch, store.num_shards, drop_last=True)
    if not len(plan):
        raise ValueError(
            f"batch_size={data.batch_size} on {spec.devices} devices makes steps of {global_batch}"
            f" rows, and the training split has {store.num_rows}: choose smaller ones"
        )
    sampler = data.train_sampler(store.manifest)
    is_random = _is_random(data, store)
    facts = {
        "environment": describe_environment(),
        "data_class": _name(data),
        "store_path": str(path),
        "num_rows": store.num_rows,
        "num_shards": store.num_shards,
        "row_bytes": store.schema.row_bytes,
        "num_bytes": store.manifest.num_bytes,
        "fields": {field.name: str(field) for field in store.schema.fields},
        "store_s": None if was_built else built_s,
        "check_store_s": built_s if was_built else None,
        "steps_per_epoch": len(plan),
        "batch_size": data.batch_size,
        "global_batch": global_batch,
        "has_transform": data.transform is not None,
        "transform_is_random": is_random,
        "has_eval_transform": data.eval_transform is not None,
        "expected": expected_hashes(store, sampler, plan, spec.steps),
        "model_class": _name(cli.model),
        "configures_itself": is_overridden("configure_model", cli.model, L.LightningModule),
        "automatic_optimization": cli.model.automatic_optimization,
        "num_parameters": sum(p.numel() for p in cli.model.parameters()),
        "parameter_bytes": sum(p.nbytes for p in cli.model.parameters()),
        "dropouts": _class_names(m for m in cli.model.modules() if isinstance(m, _DROPOUTS)),
        "batch_norms": _class_names(m for m in cli.model.modules() if isinstance(m, _BATCH_NORMS)),
    }
    (Path(spec.out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _is_random(data: MemmapDataModule, store: Store) -> bool:
    """Whether two seeds make the training transform give two results for the same rows."""
    if data.transform is None:
        return False
    sample = data.datasets["train"][0] if data.datasets["train"] is not None else None
    build = store.schema.builder(sample if store.schema.has_classes else None)
    rows = min(_PROBE_ROWS, store.num_rows)
    results = []
    for seed in (1, 2):
        leaves = [tensor[:rows].clone().as_subclass(torch.Tensor) for tensor in store.tensors]
        transform = DeviceTransform(data.transform, torch.device("cpu"))
        results.append(hash_batch(transform(build(leaves), seed)))
    return results[0] != results[1]


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _class_names(modules: Iterable[nn.Module]) -> list[str]:
    return sorted({type(module).__name__ for module in modules})


if __name__ == "__main__":
    main()
