"""The layers of the package: imports point one way, and other packages' private names stay out."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_memmap"
COMPAT = "_compat"

#: From the lowest layer to the highest; a module imports from lower layers and from its own.
#: What stands side by side in a layer knows nothing of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    (COMPAT, "arguments", "costs", "errors", "sampling", "host_memory", "process_group"),
    ("schema",),
    ("store",),
    ("placement", "ranks"),
    ("loading",),
    ("transforms",),
    ("datamodule", "strategies"),
    ("callbacks",),
    ("compare",),
    ("cli",),
    ("__init__",),
    ("__main__",),
)
#: These work without Lightning.
WITHOUT_LIGHTNING = (
    *(
        "errors",
        "sampling",
        "schema",
        "store",
        "host_memory",
        "placement",
        "ranks",
        "process_group",
    ),
)
FOREIGN = ("lightning.", "torch.")
#: Names with an underscore that are public: Python's own for named tuples.
PUBLIC = {"_fields", "_make", "_replace", "_asdict"}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def part(self) -> str:
        """The name below the package: a module or a subpackage."""
        return self.name.split(".")[1]

    @cached_property
    def imports(self) -> set[str]:
        """The dotted names that are imported anywhere in the file, ``from`` names included."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: imports are absolute"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def read_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        # A subpackage is named by its folder, the package itself by `__init__`.
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)
        modules[name] = Module(name, path)
    return modules


MODULES = read_modules()
every_module = pytest.mark.parametrize("name", MODULES)


def own_imports(module: Module) -> Iterator[str]:
    """The modules of the package that a module imports."""
    for name in module.imports:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            known = [known for known in MODULES if name == known or name.startswith(f"{known}.")]
            yield max(known, key=len, default=f"{PACKAGE}.__init__")


def layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def test_modules_are_all_in_a_layer() -> None:
    parts = {module.part for module in MODULES.values()}
    assert {"sampling", "store", "loading", "datamodule", "strategies", "cli"} <= parts
    assert parts <= {part for parts in LAYERS for part in parts}


@every_module
def test_imports_of_a_module_point_to_lower_layers(name: str) -> None:
    module = MODULES[name]
    for imported in own_imports(module):
        other = MODULES[imported].part
        assert layer(other) < layer(module.part) or other == module.part, (
            f"{name} imports {imported}"
        )


def test_imports_make_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle of imports: {' -> '.join((*path, name))}"
        if name not in done:
            for imported in own_imports(MODULES[name]):
                visit(imported, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())
    assert done == set(MODULES)


@every_module
def test_lower_layers_import_no_lightning(name: str) -> None:
    module = MODULES[name]
    if module.part not in WITHOUT_LIGHTNING:
        assert module.part in {part for parts in LAYERS for part in parts}
        return
    tops = {imported.split(".")[0] for imported in module.imports}
    assert not tops & {"lightning", "pytorch_lightning", "lightning_utilities"}
    assert not any(imported.startswith(f"{PACKAGE}.{COMPAT}") for imported in module.imports)


@every_module
def test_only_the_lightning_namespace_is_used(name: str) -> None:
    assert not any(
        imported.split(".")[0] in ("pytorch_lightning", "lightning_fabric")
        for imported in MODULES[name].imports
    )


@every_module
def test_private_names_of_others_are_used_in_compat_alone(name: str) -> None:
    if MODULES[name].part == COMPAT:
        is_package = MODULES[name].path.name == "__init__.py"
        assert is_package or set(foreign_private_names(MODULES[name])), "what is it good for?"
        return
    assert not set(foreign_private_names(MODULES[name]))


def foreign_private_names(module: Module) -> Iterator[str]:
    """Private names that a module takes from elsewhere: imported ones, and attributes that no
    module of the package defines."""
    for name in module.imports:
        if not name.startswith(f"{PACKAGE}."):
            yield from (part for part in name.split(".") if is_private(part))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OWN:
            yield node.attr


@pytest.mark.parametrize(
    "name", sorted(name for name, module in MODULES.items() if module.part != COMPAT)
)
def test_private_names_of_a_class_are_none_of_its_foreign_bases(name: str) -> None:
    """Neither on purpose, which is a matter for ``_compat``, nor by chance."""
    for node in ast.walk(MODULES[name].tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            found = getattr(importlib.import_module(name), node.name)
            bases = [base for base in found.__mro__ if base.__module__.startswith(FOREIGN)]
            taken = {private for base in bases for private in private_names(read_class(base))}
            assert not private_names(node) & taken


def private_names(node: ast.AST) -> set[str]:
    return {name for name in defined_names(node) if is_private(name)}


def read_class(found: type) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(found)))


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


OWN = {name for module in MODULES.values() for name in defined_names(module.tree)}
