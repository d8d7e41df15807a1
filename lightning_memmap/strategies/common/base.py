"""The base of every strategy of this pack: checks at the start, and undoing at the end."""

from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_memmap._compat.checkpoints import read_checkpoint_folder
from lightning_memmap._compat.modules import uncompiled_log, unless_none
from lightning_memmap._compat.required import check_strategy
from lightning_memmap.strategies.common.checkpoints import (
    ReplacingCheckpointIO,
    is_checkpoint_folder,
    local_path,
)

#: The methods of a module that a Trainer calls with a batch.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Overrides:
    """Sets attributes of instances, and restores them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, dict[str, Any]]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        before = {name: vars(owner)[name]} if name in vars(owner) else {}
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the attributes that were set. A second call does nothing."""
        while self._before:
            owner, name, before = self._before.pop()
            vars(owner).pop(name, None)
            vars(owner).update(before)


class MemmapStrategy(Strategy):
    """A strategy that starts only if torch and Lightning have the private names it needs.

    It uses `ReplacingCheckpointIO` where Lightning would use its own `TorchCheckpointIO`.
    """

    strategy_name: str
    #: A value of `_splitter_of`: modules that were split so can be trained further.
    continues_split: ClassVar[str | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_strategy(type(self))
        #: Attributes that are set on the module, plugins, optimizers and loops until teardown.
        self.overrides = Overrides()
        super().__init__(*args, **kwargs)

    @override
    def connect(self, model: LightningModule) -> None:
        self.overrides.undo()
        splitter = _splitter_of(model)
        if splitter not in (None, self.continues_split):
            raise ValueError(
                f"the {type(model).__name__} was split by {splitter} under another Trainer, and"
                f" strategy={self.strategy_name!r} needs whole parameters: save a checkpoint with"
                " that Trainer, and load it into a new module"
            )
        super().connect(model)
        if (log := uncompiled_log(model)) is not None:
            self.overrides.set(model, "log", log)

    @override
    def teardown(self) -> None:
        self.overrides.undo()
        super().teardown()

    @property
    @override
    def checkpoint_io(self) -> Any:
        if type(super().checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = ReplacingCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if hasattr(io, "checkpoint_io"):
            # It wraps another one. The setter does nothing if it has one already.
            io.checkpoint_io = ReplacingCheckpointIO()
        Strategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file, or a folder to which processes have saved shards."""
        path = local_path(checkpoint_path)
        if path is not None and is_checkpoint_folder(path):
            return read_checkpoint_folder(path, weights_only)
        return super().load_checkpoint(checkpoint_path, *unless_none(weights_only))


def _splitter_of(module: LightningModule) -> str | None:
    """Return what has split a module, which stays so after its Trainer ends."""
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        return "FSDP2"
    _, num_processes, *_ = getattr(module, "pipeline_split", (0, 1))
    return "memmap_pipeline" if num_processes > 1 else None
