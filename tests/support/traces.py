"""What a fit leaves on the objects of a user: the module, the precision plugin and the Trainer."""

from typing import Any

import lightning as L


def changed_by_fit(trainer: Any, module: L.LightningModule, data: Any) -> set[str]:
    """Fit, and return the attributes that have another value than before, such as ``net.forward``.

    Args:
        trainer: The Trainer, with its precision plugin.
        module: The module.
        data: The data module.
    """
    before = _attributes(trainer, module)
    trainer.fit(module, datamodule=data)
    after = _attributes(trainer, module)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _attributes(trainer: Any, module: L.LightningModule) -> dict[str, Any]:
    epochs = trainer.fit_loop.epoch_loop
    owners: dict[str, Any] = {
        "trainer": trainer,
        "plugin": trainer.precision_plugin,
        "fit_loop": trainer.fit_loop,
        "epoch_loop": epochs,
        "val_loop": epochs.val_loop,
        "validate_loop": trainer.validate_loop,
        "test_loop": trainer.test_loop,
        "predict_loop": trainer.predict_loop,
        **{f"module.{name}": child for name, child in module.named_modules()},
    }
    return {
        f"{label}.{name}": _identity(value)
        for label, owner in owners.items()
        for name, value in vars(owner).items()
    }


def _identity(value: Any) -> Any:
    """Return a value that changes with the object, or with the hooks in a dict of hooks."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return id(value), [*value] if isinstance(value, dict) else None
