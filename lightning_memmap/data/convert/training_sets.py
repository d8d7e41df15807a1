"""The data modules of several training loaders, each with its own store directory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any


class TrainingSets:
    """One data module for each of several training loaders; none if there is only one."""

    def __init__(self) -> None:
        self._modules = dict[Any, Any]()

    def update(self, owner: Any, options_of_sets: Mapping[Any, Mapping[str, Any]]) -> None:
        """Create the data modules, or update their options.

        Args:
            owner: The data module that reads the loaders, whose other options they share.
            options_of_sets: The options of each by key; see `LoaderSource.options_of_sets`.
        """
        modules = dict[Any, Any]()
        for key, options in options_of_sets.items():
            module = self._modules.get(key) or _make_set(owner, key)
            module.options = replace(module.options, **options)
            module.trainer = owner.trainer
            module._fabric = owner._fabric
            modules[key] = module
        self._modules = modules

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def train_dataloaders(self) -> dict[Any, Any]:
        """Return the training loader of each data module, by key."""
        return {key: module.train_dataloader() for key, module in self._modules.items()}


def _make_set(owner: Any, key: Any) -> Any:
    module = owner.with_options(
        store_dir=owner.options.store_dir / f"train-{key}",
        val_dataset=None,
        test_dataset=None,
        predict_dataset=None,
        eval_batch_size=None,
    )
    module._source = None
    return module
