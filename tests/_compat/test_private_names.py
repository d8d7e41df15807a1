"""Private names of other packages: used in one place only, and never taken by chance."""

import ast
import functools
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.preloaded import python

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_memmap"
#: Names with an underscore that are public: those of named tuples, and of what nobody uses.
PUBLIC = {"_", "_fields", "_make", "_replace", "_asdict"}
#: By class, what it sets or overrides where the base has no public name; a comment there says so.
ON_PURPOSE = {
    "DataParallelStrategy": {"_forward_redirection"},
    "FSDP2Strategy": {"_data_parallel_size", "_tensor_parallel_size"},
    "IndependentStrategy": {"_configure_launcher", "_launcher"},
    "OneNode": {"_configure_launcher"},
    "OneProcess": {"_configure_launcher"},
    "SeveralProcesses": {"_configure_launcher"},
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, parsed, by their names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def test_private_names_of_a_class_are_none_of_its_foreign_bases() -> None:
    num_bases = 0
    for module, tree in trees().items():
        if module.startswith(f"{PACKAGE}._compat"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.bases:
                found = getattr(importlib.import_module(module), node.name)
                for base in found.__mro__:
                    if base.__module__.startswith(("lightning.", "torch.")):
                        num_bases += 1
                        if base.__module__ == "torch._C":
                            # It is compiled, and has no source.
                            theirs = set(filter(is_private, vars(base)))
                        else:
                            source = ast.parse(textwrap.dedent(inspect.getsource(base)))
                            theirs = private_names(source)
                        taken = private_names(node) & theirs
                        taken -= ON_PURPOSE.get(node.name, set())
                        assert not taken, f"{module}.{node.name}, {base.__qualname__}"
    assert num_bases > 10


def test_private_names_of_other_packages_are_used_in_compat_only() -> None:
    own = set[str]()
    for tree in trees().values():
        own |= private_names(tree)
    for module, tree in trees().items():
        if module.startswith(f"{PACKAGE}._compat"):
            continue
        for node in ast.walk(tree):
            for name in imported_names(node):
                if not name.startswith(PACKAGE):
                    assert not any(map(is_private, name.split("."))), f"{module}: {name}"
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                pytest.fail(f"{module}:{node.lineno}: {node.attr}")


def imported_names(node: ast.AST) -> Iterator[str]:
    """The modules and names that a statement imports, with their packages."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_names(node: ast.AST) -> set[str]:
    return set(filter(is_private, defined_names(node)))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, variables, class and instance attributes that are defined there."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


#: Names for which `_compat` has a fallback, and which torch and Lightning do not look up later.
WITH_FALLBACK = """
    torch._C:_storage_Use_Count torch:_foreach_copy_ torch:_foreach_add_
    torch.distributed.tensor._utils:compute_local_shape_and_global_offset
    lightning.pytorch.callbacks:WeightAveraging
    lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper
    lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher
    lightning.pytorch.utilities.exceptions:_TunerExitException
"""
#: The names are deleted once torch and Lightning have imported what they use themselves.
PROGRAM = """
import sys, importlib
import lightning as L, tensordict, torch, torchmetrics
import torch._dynamo.eval_frame, torch.distributed.fsdp
from torch.distributed import tensor, pipelining
for name in sys.argv[2].split():
    module, _, name = name.partition(":")
    vars(importlib.import_module(module)).pop(name, None)
from lightning_memmap import MemmapDataModule
from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.strategies.common.buckets import flatten, unflatten
from lightning_memmap.errors import UnsupportedVersionError
from lightning_memmap.strategies import IndependentStrategy
from tests.support.models import Points, Regression

for strategy in ("memmap_superbatch", "memmap_dp"):
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=2, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, MemmapDataModule(Points(48), store_dir=f"{sys.argv[1]}/s", batch_size=4))
    print(strategy, [round(float(p.sum()), 5) for p in module.parameters()])
tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
print([part.tolist() for part in unflatten(flatten(tensors), tensors)])
print([row.tolist() for row in jagged_tensor(torch.arange(3.0), torch.tensor([0, 1, 3])).unbind()])
try:
    IndependentStrategy()
except UnsupportedVersionError as error:
    print(type(error).__name__)
else:
    print("works")
"""


def test_package_works_without_private_names_that_have_a_fallback(tmp_path: Path) -> None:
    outputs = []
    for names in ("", WITH_FALLBACK):
        # Names are deleted before a Python of its own imports the package.
        command = [sys.executable if names else python(), "-c", PROGRAM]
        command += [str(tmp_path / str(len(names))), names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kept = "memmap_", "[[", "Unsupp", "works"
        outputs.append([line for line in done.stdout.splitlines() if line.startswith(kept)])
    assert len(outputs[0]) == 5
    assert outputs[0][:4] == outputs[1][:4]
    assert (outputs[0][4], outputs[1][4]) == ("works", "UnsupportedVersionError")
