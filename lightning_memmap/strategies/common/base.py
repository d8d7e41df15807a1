"""The base of every strategy of this pack: checks at the start, and undoing at the end."""

from typing import Any

from lightning.pytorch import LightningModule
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_memmap._compat.modules import uncompiled_log
from lightning_memmap._compat.required import check_strategy
from lightning_memmap.strategies.common.checkpoints import ReplacesCheckpoints

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


class MemmapStrategy(ReplacesCheckpoints):
    """A strategy that starts only if torch and Lightning have the private names it needs."""

    strategy_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_strategy(type(self))
        #: Attributes that are set on the module, plugins, optimizers and loops until teardown.
        self.overrides = Overrides()
        super().__init__(*args, **kwargs)

    @override
    def connect(self, model: LightningModule) -> None:
        self.overrides.undo()
        self.check_module(model)
        super().connect(model)
        if (log := uncompiled_log(model)) is not None:
            self.overrides.set(model, "log", log)

    def check_module(self, module: LightningModule) -> None:
        """Raise for a module that another Trainer has sharded."""
        if any(isinstance(child, FSDPModule) for child in module.modules()):
            raise ValueError(
                f"the {type(module).__name__} was sharded by FSDP2 under another Trainer, and"
                f" strategy={self.strategy_name!r} needs whole parameters: save a checkpoint with"
                " that Trainer, and load it into a new module"
            )

    @override
    def teardown(self) -> None:
        self.overrides.undo()
        super().teardown()
