"""The private names that a strategy cannot do without, looked up when it starts."""

from importlib import import_module
from importlib.metadata import version

from lightning_memmap.errors import UnsupportedVersionError

#: Set by the Trainer's connector on every strategy, when everything else is set.
_LAUNCHER = "lightning.pytorch.strategies:Strategy._configure_launcher"
_BACKWARD = "torch.autograd:Variable._execution_engine.queue_callback"
#: By strategy: an alternative, and the names it needs. All other private names have a fallback.
REQUIRED: dict[str, tuple[str, ...]] = {
    "memmap_superbatch": ("Lightning's 'auto'", _LAUNCHER),
    "memmap_model_parallel": ("Lightning's 'auto'", _LAUNCHER),
    "memmap_superbatch_ddp": ("Lightning's 'ddp'", _LAUNCHER),
    "memmap_dp": (
        "'memmap_superbatch_ddp'",
        _LAUNCHER,
        _BACKWARD,
        "lightning.pytorch.strategies.strategy:_ForwardRedirection",
        "lightning.pytorch:LightningModule._on_before_batch_transfer",
    ),
    "memmap_fsdp2": ("Lightning's 'fsdp'", _LAUNCHER),
    "memmap_independent": (
        "one program per member with Lightning's 'auto'",
        _LAUNCHER,
        "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
        "lightning.pytorch:Trainer.default_root_dir",
    ),
    "memmap_pipeline": (
        "'memmap_fsdp2'",
        _LAUNCHER,
        _BACKWARD,
        # Depending on the version.
        "torch.distributed.pipelining:PipelineStage._compute_outputs"
        "|torch.distributed.pipelining:PipelineStage._shape_inference",
    ),
}


def check_strategy(strategy: type) -> None:
    """Raise for a strategy of this pack, or a subclass, if a name that it needs is missing."""
    for base in strategy.__mro__:
        name = vars(base).get("strategy_name")
        if name in REQUIRED:
            alternative, *names = REQUIRED[name]
            for alternatives in names:
                if not any(map(has_name, alternatives.split("|"))):
                    raise missing(name, alternatives.partition("|")[0], alternative)
            return


def has_name(path: str) -> bool:
    """Return whether ``module:attribute.attribute`` exists."""
    module, _, attributes = path.partition(":")
    try:
        value = import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def missing(strategy: str, path: str, alternative: str) -> UnsupportedVersionError:
    """Return the error for a name that a strategy needs and the installed version lacks."""
    package = path.partition(":")[0].partition(".")[0]
    return UnsupportedVersionError(
        f"strategy={strategy!r}: {package} {version(package)} has no"
        f" {path.replace(':', '.')}, which it needs; use {alternative}, or another version of"
        f" {package} (docs/tested.md lists those tested)"
    )
