"""Private names of other packages stay in `_compat`."""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_memmap"
#: Names with an underscore that are public: those of Python's named tuples.
PUBLIC = {"_fields", "_make", "_replace", "_asdict"}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, parsed, by their names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def test_private_names_of_others_are_used_in_compat_alone() -> None:
    own = {name for tree in trees().values() for name in defined_names(tree)}
    for module, tree in trees().items():
        foreign = set(foreign_private_names(tree, own))
        if not module.startswith(f"{PACKAGE}._compat"):
            assert not foreign, module
        elif module != f"{PACKAGE}._compat":
            assert foreign, f"{module} uses no private name: it belongs elsewhere"


def test_private_names_of_a_class_are_none_of_its_foreign_bases() -> None:
    """Neither on purpose, which is a matter for ``_compat``, nor by chance."""
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
                        assert not taken, f"{module}.{node.name}, {base.__qualname__}"
    assert num_bases > 10


def foreign_private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names that a module imports from other packages, or uses as attributes where none of
    its own package has that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [] if node.attr in own else [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] != PACKAGE:
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        else:
            names = []
        yield from filter(is_private, names)


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
