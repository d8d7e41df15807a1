"""What users rely on: public names, signatures, and an import without side effects."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_memmap
from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import (
    DataParallelStrategy,
    FSDP2Strategy,
    IndependentStrategy,
    LocalModelParallelStrategy,
    SuperBatchDDPStrategy,
    SuperBatchStrategy,
)
from tests.support.preloaded import run

NAMES = {
    "lightning_memmap": """
        ColumnDataset ImageFolder MemmapDataModule Store TarDataset append_store build_part
        build_store finish_store open_store pull_store push_store verify_store
    """,
    "lightning_memmap.callbacks": """
        PredictionTable RowResults StepSeeder
    """,
    "lightning_memmap.compare": """
        compare
    """,
    "lightning_memmap.loading": """
        Packing Padded RowList Scaled
    """,
    "lightning_memmap.results": """
        Results RowLog read_row_results
    """,
    "lightning_memmap.sampling": """
        Bucketed ComputedSampler Curriculum DrawnSampler Fields Holdout KFold Mixture Packed Parts
        Pool RandomSplit Sampler SamplerFactory Selection SequentialSampler ShuffledSampler Subset
        TableSampler Weighted
    """,
    "lightning_memmap.schema": """
        Decode Layout Masked Pad Windows
    """,
    "lightning_memmap.store": """
        ColumnDataset Damage ImageFolder Store TarDataset TarStream TokenStream append_store
        build_part build_store finish_store open_store pull_store push_store verify_store
    """,
    "lightning_memmap.strategies": """
        DataParallelStrategy FSDP2Strategy IndependentStrategy LocalModelParallelStrategy
        MemberResult MemberResults PipelineStrategy STRATEGIES SuperBatchDDPStrategy
        SuperBatchStrategy read_results register
    """,
}

#: Arguments and their defaults. A star parts those that are given by name alone.
SIGNATURES = {
    MemmapDataModule: """
        train_dataset=None, val_dataset=None, test_dataset=None, predict_dataset=None, *,
        store_dir, batch_size=32, transform=None, eval_transform=None, shuffle=True,
        drop_last=False, seed=0, num_shards=None, residency='auto', memory_fraction=0.7,
        num_workers=0, overwrite=False, fingerprint=None, subset=None, member=None,
        shuffle_block=None, sampler=None, variable=None, nullable=None,
        layout=None, decode=None, windows=None, with_row_numbers=False,
        skip_steps=None, build='first', prefetch=None, eval_batch_size=None,
        weight=None, datamodule=None
    """,
    SuperBatchStrategy: """
        data_devices=None, **kwargs
    """,
    DataParallelStrategy: """
        data_devices=None, **kwargs
    """,
    LocalModelParallelStrategy: """
        data_devices=None, **kwargs
    """,
    SuperBatchDDPStrategy: """
        data_devices_per_process=1, root_holds_data=True, **kwargs
    """,
    FSDP2Strategy: """
        wrap_classes=None, min_unit_parameters=1000000, replicate_size=1,
        reshard_after_forward=None, cpu_offload=False, reduce_dtype=None,
        activation_checkpointing=False, compile_units=False, sync_each_micro_batch=False,
        save_distributed_checkpoint=False, exclude_frozen_parameters=False,
        process_group_backend=None,
        timeout=datetime.timedelta(seconds=1800)
    """,
    IndependentStrategy: """
        num_members=None, raise_on_failure=True, **kwargs
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_of_a_module_are_these(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == NAMES[module].split()
    for name in found.__all__:
        assert hasattr(found, name)


@pytest.mark.parametrize("module", NAMES)
def test_dir_lists_public_names_alone(module: str) -> None:
    found = {*dir(importlib.import_module(module))} - {"__builtins__"}
    if module == "lightning_memmap":
        assert found - {*NAMES[module].split()} <= {
            *(name.partition(".")[2] for name in NAMES), "errors", "transforms"
        }  # fmt: skip
        found &= {*NAMES[module].split()}
    assert sorted(found) == NAMES[module].split()


@pytest.mark.parametrize("made", SIGNATURES, ids=lambda made: made.__name__)
def test_signature_of_a_class_is_this(made: Any) -> None:
    found = inspect.signature(made)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=found.empty))
    assert text == f"({' '.join(SIGNATURES[made].split())})"


def test_package_is_marked_as_typed() -> None:
    assert (Path(lightning_memmap.__file__).parent / "py.typed").is_file()


#: It imports the dependencies first, so that all that is seen afterwards to be opened, started or
#: changed is the work of the package itself.
WATCH = """
import importlib, os, sys, threading

import jsonargparse, lightning.pytorch.cli, psutil, rich.console, rich.table, rich.progress
import filelock, tensordict, torch, torchmetrics, xxhash
import lightning.pytorch.strategies

allowed = tuple(os.path.realpath(path) for path in sys.argv[1:])
seen = []

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith(allowed):
            seen.append(f"{event} {path}")
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "os.mkdir"):
        seen.append(event)

for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_memmap"]:
    del sys.modules[name]  # This Python has imported it already.
threads, environment = set(threading.enumerate()), dict(os.environ)
sys.addaudithook(watch)
for name in NAMES:
    importlib.import_module(name)
changed = {name for name, value in os.environ.items() if environment.get(name) != value}
print(seen, set(threading.enumerate()) - threads, changed, os.listdir("."))
"""


@pytest.mark.slow
def test_import_opens_nothing_and_starts_nothing(tmp_path: Path) -> None:
    package = Path(lightning_memmap.__file__).parent
    program = WATCH.replace("NAMES", repr([*NAMES, "lightning_memmap.cli"]))
    places = {str(package), sys.prefix, sys.base_prefix, *(str(Path(p)) for p in sys.path if p)}
    done = run("-c", program, *sorted(places), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] set() set() []"


@pytest.mark.slow
def test_import_needs_no_parser_of_commands(tmp_path: Path) -> None:
    rooms = [name for name in NAMES if name != "lightning_memmap.compare"]
    program = f"""
import importlib, sys
import lightning, tensordict
before = set(sys.modules)  # Lightning brings jinja2 where transformers is installed
for name in {rooms}:
    importlib.import_module(name)
names = ("jsonargparse", "lightning.pytorch.cli", "docstring_parser", "jinja2")
names += ("torch.distributed.checkpoint", "torch.distributed.pipelining")
print(*(name for name in names if name in sys.modules.keys() - before))
"""
    # Not from a Python that has imported them already.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.slow
def test_import_twice_registers_once(tmp_path: Path) -> None:
    program = """
import importlib
import lightning_memmap, lightning_memmap.strategies as registry
from lightning.pytorch.strategies import StrategyRegistry
before = dict(StrategyRegistry)
importlib.reload(registry)
importlib.reload(lightning_memmap)
assert dict(StrategyRegistry) == before
assert all(name in before for name, *_ in registry.STRATEGIES)
"""
    done = run("-W", "error", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
