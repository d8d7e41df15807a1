"""An existing data module, and the options that its loaders stand for."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import IterableDataset

from lightning_memmap._compat.modules import copy_hyperparameters
from lightning_memmap.data.convert.loader_facts import LoaderFacts, LoaderTree
from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.splits import ROLES_OF_STAGE
from lightning_memmap.errors import with_article
from lightning_memmap.sampling.selection import Subset

#: Hooks that change batches on their way to a step. Lightning looks them up in the data module.
TRANSFER_HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
#: Attributes of a data module that the Trainer reads.
_ATTRIBUTES = ("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices")
#: The stages that are set up if no Trainer names one, and the split that each is for.
_STAGES = {"fit": "train", "test": "test", "predict": "predict"}


class LoaderSource:
    """An existing data module, and the options that its loaders stand for.

    Args:
        datamodule: The data module. Its hooks are called when Lightning calls ours.
        chosen: The names of options that are not read.
    """

    def __init__(self, datamodule: L.LightningDataModule, chosen: Iterable[str]) -> None:
        self.datamodule = datamodule
        self._chosen = frozenset(chosen)
        #: The loaders of each split.
        self._trees: dict[str, LoaderTree] = {}
        #: The stages that the process that builds the stores has set up in advance.
        self._stages_ready: set[str] = set()
        #: The options that were read last.
        self._read_options: dict[str, Any] = {}

    def choosing(self, names: Iterable[str]) -> "LoaderSource":
        """Return a source of the same data module that does not read some more options."""
        return LoaderSource(self.datamodule, self._chosen.union(names))

    def choose(self, name: str) -> None:
        """Do not read an option any more that was set before the loaders were read."""
        if name not in self._read_options:
            self._chosen |= {name}

    def adopt_hooks(self, owner: L.LightningDataModule) -> None:
        """Copy the hooks and attributes that Lightning looks up to another data module."""
        attributes = vars(self.datamodule)
        vars(owner).update({name: attributes[name] for name in _ATTRIBUTES if name in attributes})
        copy_hyperparameters(self.datamodule, owner)
        for name in filter(self._is_overridden, TRANSFER_HOOKS):
            if getattr(type(owner), name) is not getattr(L.LightningDataModule, name):
                raise TypeError(
                    f"{name}: both {type(owner).__name__} and {type(self.datamodule).__name__}"
                    " define it, and Lightning would call only one: remove one of them"
                )
            vars(owner)[name] = getattr(self.datamodule, name)

    @property
    def is_read(self) -> bool:
        """Whether any loaders were read."""
        return bool(self._trees)

    def has(self, role: str) -> bool:
        """Return whether the data module that reads these loaders has a split itself.

        Each of several training loaders has its own data module.
        """
        is_separate = role == "train" and self.training_sets is not None
        return self._has_loader(role) and not is_separate

    def _has_loader(self, role: str) -> bool:
        """Return whether a split has a loader, or a dataset that replaces its loaders."""
        is_chosen = f"{role}_dataset" in self._chosen
        return is_chosen or bool(self._trees.get(role, LoaderTree()).facts)

    @property
    def training_sets(self) -> LoaderTree | None:
        """The training loaders if there are several, or None."""
        tree = self._trees.get("train")
        return tree if tree is not None and tree.has_several else None

    def options_of_sets(self) -> dict[Any, dict[str, Any]]:
        """Return the options of a data module for each of several training sets."""
        by_key = dict[Any, dict[str, Any]]()
        tree = self.training_sets or LoaderTree()
        for key, facts in tree.facts.items():
            options = {"train_dataset": facts.dataset, "num_workers": facts.num_workers}
            options |= _training_options(facts)
            options["subset"] = None if facts.subset is None else {"train": facts.subset}
            by_key[key] = {name: options[name] for name in options.keys() - self._chosen}
        return by_key

    def combine_like_source(self, role: str, loaders: Any) -> Any:
        """Return evaluation loaders, combined like the loaders of the source."""
        tree = self._trees.get(role)
        if tree is None or tree.combined is None:
            return loaders
        several = [*loaders.values()] if isinstance(loaders, dict) else loaders
        by_key = zip(tree.loaders, several if tree.has_several else [loaders], strict=True)
        return tree.combine(dict(by_key))

    def read(
        self,
        options: DataOptions,
        stage: str | None,
        trainer: L.Trainer | None,
        *,
        in_advance: bool = False,
    ) -> DataOptions:
        """Set up the data module for a stage, and read its loaders.

        Args:
            options: The options so far.
            stage: The stage, or None for all.
            trainer: The Trainer, or None.
            in_advance: Whether `setup` of the same stage follows in this process. It will then
                not read the loaders a second time.

        Returns:
            The options, updated by those that were read.

        Raises:
            TypeError: A method returned something that is not a `DataLoader`.
            ValueError: A loader cannot be carried over, or this stage has no loader.
        """
        self.datamodule.trainer = trainer
        for name in self._stages(stage):
            if name in self._stages_ready:
                self._stages_ready.discard(name)
                continue
            self.datamodule.setup(name)
            for role in ROLES_OF_STAGE[name]:
                self._read_split(role)
            if stage is not None and not self._has_loader(role := ROLES_OF_STAGE[stage][0]):
                raise ValueError(
                    f"stage={getattr(stage, 'value', stage)!r}: {type(self.datamodule).__name__}"
                    f" defines no {role}_dataloader, or it returned no loader: define it, or run"
                    " another stage"
                )
            if in_advance:
                self._stages_ready.add(name)
        return self._apply(options)

    def read_again(self, options: DataOptions, role: str) -> DataOptions:
        """Read the loaders of a split again, for ``reload_dataloaders_every_n_epochs``.

        Raises:
            ValueError: Their rows differ from the rows that are set up.
        """
        before = self._trees.get(role, LoaderTree()).facts
        self._read_split(role)
        after = self._trees.get(role, LoaderTree()).facts
        if before.keys() != after.keys() or not all(
            before[key].has_rows_of(after[key]) for key in after
        ):
            raise ValueError(
                f"reload_dataloaders_every_n_epochs: {role}_dataloader returned loaders whose rows"
                " differ from those that are set up: create datasets and subsets in setup(). Batch"
                " sizes, drop_last and samplers of all rows may change"
            )
        return self._apply(options)

    def _apply(self, options: DataOptions) -> DataOptions:
        """Return options, updated by those that differ from what was read before."""
        before = self._read_options
        self._read_options = self._options()
        changed = {
            name: value
            for name, value in self._read_options.items()
            if name not in self._chosen and not _is_same(value, before.get(name, self))
        }
        return replace(options, **changed)

    def _stages(self, stage: str | None) -> list[str]:
        if stage is not None:
            return [stage]
        defined = [
            name
            for name, role in _STAGES.items()
            if f"{role}_dataset" not in self._chosen and self._is_overridden(f"{role}_dataloader")
        ]
        return defined or ["fit"]

    def _is_overridden(self, method: str) -> bool:
        return is_overridden(method, self.datamodule, L.LightningDataModule)

    def _read_split(self, role: str) -> None:
        if f"{role}_dataset" in self._chosen:
            return
        method = f"{role}_dataloader"
        loaders = getattr(self.datamodule, method)() if self._is_overridden(method) else None
        self._trees[role] = LoaderTree.read(method, loaders, role == "train", self._chosen)

    def _options(self) -> dict[str, Any]:
        """Return the options that all loaders read so far stand for."""
        options = dict[str, Any]()
        eval_batch_sizes = dict[str, int]()
        subsets = dict[str, Subset]()
        for role, tree in self._trees.items():
            is_separate = role == "train" and tree.has_several
            options[f"{role}_dataset"] = tree.datasets if tree.facts and not is_separate else None
            for key, loader in tree.facts.items():
                split = f"{role}/{key}" if tree.has_several else role
                if role != "train":
                    eval_batch_sizes[split] = loader.batch_size
                elif not is_separate:
                    options |= _training_options(loader)
                if loader.subset is not None and not is_separate:
                    subsets[split] = loader.subset
        options["eval_batch_size"] = eval_batch_sizes or None
        options["subset"] = subsets or None
        facts = [facts for tree in self._trees.values() for facts in tree.facts.values()]
        # The option applies to all splits, and one process reads a stream.
        is_stream = any(isinstance(loader.dataset, IterableDataset) for loader in facts)
        num_workers = max((loader.num_workers for loader in facts), default=0)
        options["num_workers"] = 0 if is_stream else num_workers
        return options

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without anything that was read from loaders."""
        datamodule = copy(self.datamodule)
        datamodule.trainer = None
        copied = LoaderSource(datamodule, self._chosen)
        return vars(copied)


def _training_options(facts: LoaderFacts) -> dict[str, Any]:
    """Return the options that a training loader stands for, except its dataset and subset."""
    names = "batch_size", "shuffle", "drop_last", "sampler"
    return {name: getattr(facts, name) for name in names}


def chosen_options(options: DataOptions, defaults: Mapping[str, Any]) -> list[str]:
    """Return the names of options that differ from their defaults."""
    return [
        name for name, default in defaults.items() if not _is_same(getattr(options, name), default)
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    is_plain = isinstance(one, (int, float, str)) and type(one) is type(other)
    return one is other or (is_plain and bool(one == other))


def check_source(datamodule: Any, kind: type) -> None:
    """Check that loaders can be read from something."""
    if not isinstance(datamodule, L.LightningDataModule):
        raise TypeError(
            f"datamodule={datamodule!r}: is {with_article(type(datamodule).__name__)}: pass a"
            " LightningDataModule, or pass loaders to from_loaders"
        )
    if isinstance(datamodule, kind):
        raise TypeError(
            f"datamodule={type(datamodule).__name__}: is a MemmapDataModule already: pass it to the"
            " Trainer as it is"
        )


class LoadersModule(L.LightningDataModule):
    """A data module that returns existing loaders."""

    def __init__(self, **by_split: Any) -> None:
        super().__init__()
        for split, loaders in by_split.items():
            setattr(self, f"{split}_dataloader", partial(_existing, loaders))


def _existing(loaders: Any) -> Any:
    return loaders


def make_training_sets(
    owner: Any, options_of_sets: Mapping[Any, Mapping[str, Any]], made: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Make the data modules of several training loaders, each with its own store directory.

    Args:
        owner: The data module that reads the loaders, whose other options they share.
        options_of_sets: The options of each by key; see `LoaderSource.options_of_sets`.
        made: The data modules that were made before, whose options are updated.
    """
    modules = dict[Any, Any]()
    for key, options in options_of_sets.items():
        if (module := made.get(key)) is None:
            module = owner.with_options(
                store_dir=owner.options.store_dir / f"train-{key}",
                val_dataset=None,
                test_dataset=None,
                predict_dataset=None,
                eval_batch_size=None,
            )
            module._source = None
        module.options = replace(module.options, **options)
        module.trainer = owner.trainer
        module._fabric = owner._fabric
        modules[key] = module
    return modules
