"""What the strategies have in common: mixins, and the base of those of one process."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.loops import WEIGHT_AVERAGING
from lightning_memmap._compat.modules import log_anywhere, log_outside_of_graphs
from lightning_memmap._compat.required import check_strategy
from lightning_memmap.errors import UnsuitableModuleError, with_article
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.step_weight import DeliveredSteps
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.placement.topology import (
    DataTopology,
    check_device,
    data_parallel_rank,
    local_processes,
)
from lightning_memmap.process_group import broadcast_all
from lightning_memmap.schema.fields import RowList
from lightning_memmap.schema.structure import Masked
from lightning_memmap.strategies._checkpoints import ReplacesCheckpoints
from lightning_memmap.strategies._failures import first_failure
from lightning_memmap.strategies._overrides import Overrides
from lightning_memmap.strategies._same_rows import batch_digest, may_repeat_rows, warn_if_equal

#: The methods of a module in which it computes.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Checked(ReplacesCheckpoints):
    """A strategy that starts only where torch and Lightning have what it needs of them."""

    strategy_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_strategy(type(self))
        super().__init__(*args, **kwargs)

    @override
    def connect(self, model: LightningModule) -> None:
        self.check_module(model)
        super().connect(model)
        log_outside_of_graphs(model)

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
        if self.lightning_module is not None:
            log_anywhere(self.lightning_module)
        super().teardown()


class SuperBatchMixin(Checked):
    """Declares that super-batches are assembled on the root device before Lightning sees them."""

    strategy_name: str
    _has_transfer_hooks = True

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process that hold shards and serve batches."""
        return (self.root_device,)

    @property
    def module(self) -> LightningModule:
        """The module that is trained."""
        assert self.lightning_module is not None, "the Trainer has not set up this strategy"
        return self.lightning_module

    @property
    def data_topology(self) -> DataTopology:
        """Which devices hold the data; batches are assembled on the root device."""
        rank, size = data_parallel_rank(self)
        return DataTopology(
            self.data_devices,
            rank,
            size,
            assemble_on=self.root_device,
            num_local_processes=local_processes(self),
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        owners = self.module, getattr(self.module.trainer, "datamodule", None)
        names = "transfer_batch_to_device", "on_after_batch_transfer"
        self._has_transfer_hooks = any(is_overridden(n, owner) for owner in owners for n in names)
        # Loaders that were made without a data module, or without a Trainer.
        if isinstance(dataloader, BatchLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, SuperBatchLoader):
            topology = self.data_topology
            has, asked = dataloader.global_batch, dataloader.batch_size * topology.num_data_devices
            if has != asked:
                rank_zero_warn(
                    f"a loader that was made without the Trainer gives {has} rows a step, and with"
                    f" {topology.num_data_devices} data devices a step of {self.strategy_name} has"
                    f" {asked}: give the Trainer datamodule= instead of its loader"
                )
            if dataloader.device is None:
                dataloader = dataloader.placed(topology)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # A super-batch comes here from a loader that is not the data module's own.
        if isinstance(batch, SuperBatch):
            batch = batch.to(device or self.root_device)
        # Lightning takes about 20 us a step to find that nothing is to be moved.
        if not self._has_transfer_hooks and _is_on(batch, device or self.root_device):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)


def _is_on(batch: Any, device: torch.device) -> bool:
    """Whether a batch of plain containers has nothing but tensors on a device, and text."""
    if isinstance(batch, Tensor):
        return batch.device == device
    if type(batch) in (dict, list, tuple, Padded, Masked, RowList):
        children = batch.values() if type(batch) is dict else batch
        return all(_is_on(child, device) for child in children)
    return isinstance(batch, (str, bytes))


class RowWeighted(SuperBatchMixin, ParallelStrategy):
    """Weighs each process's loss by its rows, where gradients are averaged over processes."""

    # Process ``r`` of ``R`` computes the mean loss of its ``n_r`` rows of a step of ``n``. The
    # average over processes of ``loss_r * n_r * R / n`` is the mean over all rows. Only the last
    # steps of an epoch may not divide evenly; in all others nothing is multiplied.

    _loss_scale = 1.0
    _fetches_batches = False
    _may_repeat_rows = False
    # Runs of all strategies of this program: each process counts the same.
    _num_runs: ClassVar[int] = 0

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        RowWeighted._num_runs += 1

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add to an error that another process has caused what that process has noted."""
        super().on_exception(exception)
        if not isinstance(exception, Exception) or not dist.is_initialized():
            return
        cause = first_failure(self._num_runs, exception)
        if cause is not None and exception.args and isinstance(exception.args[0], str):
            exception.args = (f"{exception.args[0]}\n{cause}", *exception.args[1:])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: What is set on the precision plugin, the optimizers and the loops until teardown.
        self.overrides = Overrides()
        # What the loaders deliver that the data modules have made for this fit.
        self._announced: WeakSet[DeliveredSteps] = WeakSet()
        # What the loaders deliver that the Trainer trains from.
        self._delivered: WeakSet[DeliveredSteps] = WeakSet()

    @override
    def connect(self, model: LightningModule) -> None:
        self.overrides.undo()
        self._announced.clear()
        self._delivered.clear()
        super().connect(model)

    # The Trainer calls it when it has set everything else.
    @override
    def _configure_launcher(self) -> None:
        if dist.is_initialized() and dist.get_world_size() != self.world_size:
            raise ValueError(
                f"{self.world_size} processes (devices x num_nodes), and another Trainer of this"
                f" program has left a process group of {dist.get_world_size()}: give both as many;"
                " or call torch.distributed.destroy_process_group() between them, and let only"
                " rank 0 go on"
            )
        super()._configure_launcher()

    @override
    def teardown(self) -> None:
        self.overrides.undo()
        super().teardown()

    def add_training_loader(self, loader: SuperBatchLoader) -> None:
        """Announce a training loader, which the Trainer may get inside of another object."""
        self._announced.add(loader.delivered)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._may_repeat_rows |= may_repeat_rows(dataloader)
        loader = super().process_dataloader(dataloader)
        if self.module.trainer.training:
            if isinstance(loader, SuperBatchLoader):
                self._delivered.add(loader.delivered)
            else:
                self._delivered |= self._announced
        return loader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # Before transforms of the module, which may be random.
        if self._may_repeat_rows and self.module.trainer.training:
            self._compare_rows(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._loss_scale = 1.0
        self._update_loss_scale(batch)

    def _compare_rows(self, batch: Any) -> None:
        """Compare the first training batches of all processes. All ranks call it."""
        self._may_repeat_rows = False
        rank, size = data_parallel_rank(self)
        if size > 1:
            own = torch.stack([batch_digest(batch), torch.tensor(rank)]).to(self.root_device)
            digests, ranks = self.all_gather(own).cpu().view(-1, 2).unbind(1)
            warn_if_equal(digests, ranks)

    def _update_loss_scale(self, batch: Any) -> None:
        """Ask the training loaders for the weight of what they delivered since the last call."""
        _, size = data_parallel_rank(self)
        scales = set()
        for delivered in self._delivered:
            if (taken := delivered.take()) is None:
                continue
            step, is_ambiguous = taken
            if is_ambiguous and _num_rows(batch) != step.num_rows:
                raise ValueError(
                    "train_dataloader: between the MemmapDataModule and the Trainer something"
                    " fetches batches ahead, reorders or drops them, so the weight of this uneven"
                    f" step is unknown (its loader delivered {step.num_rows} rows next). Return the"
                    " loader of the data module itself, or pass drop_last=True"
                )
            scales.add(step.weight.scale(size))
        if len(scales) > 1:
            raise ValueError(
                "this step combines batches of several loaders that need different loss weights"
                f" ({', '.join(f'{scale:.4g}' for scale in sorted(scales))}), because their rows"
                f" divide unevenly over {size} processes. Pass drop_last=True to each"
                " MemmapDataModule"
            )
        if scales:
            self._loss_scale = scales.pop()

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over all processes unless a group is named. A mean of integers is a float."""
        # Lightning divides a sum over rows by a number of rows, and takes the mean over processes
        # of both. Its own mean of integers is rounded down.
        is_mean = reduce_op in ("mean", "avg") and isinstance(tensor, Tensor)
        if not is_mean or tensor.is_complex() or not dist.is_initialized():
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        wide = tensor.to(torch.float64, copy=True)
        total = super().reduce(wide, group, "sum")  # type: ignore[safe-super]
        mean: Tensor = total / dist.get_world_size(group)
        if tensor.is_floating_point():
            return mean.to(tensor.dtype)
        # What is logged is float32, and so is its quotient, unless the count has too many digits.
        short = mean.to(torch.get_default_dtype())
        return short if torch.equal(short, mean) else mean

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # A step with ``dataloader_iter`` fetches its batches itself.
        self._fetches_batches = hasattr(next(iter(args), None), "data_fetcher")
        return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._fetches_batches:
            self._update_loss_scale(None)
        if self._loss_scale != 1:
            closure_loss = closure_loss * self._loss_scale
        return super().backward(closure_loss, optimizer, *args, **kwargs)


def _num_rows(batch: Any) -> int | None:
    """Return the rows of a batch; None if its leaves have different lengths, or none."""
    leaves = [leaf for _, leaf in named_leaves(batch)]
    sized = (leaf for leaf in leaves if isinstance(leaf, (Tensor, RowList)))
    lengths = {len(leaf) for leaf in sized if not isinstance(leaf, Tensor) or leaf.ndim}
    return lengths.pop() if len(lengths) == 1 else None


class OneNode(Checked, SingleDeviceStrategy):
    """A strategy on one machine, one of whose devices is the root device of this process."""

    strategy_name: str
    #: What errors say of it, and what to do on several machines or in several processes.
    what_it_is: ClassVar[str]
    advice: ClassVar[str]
    # The Trainer sets these.
    cluster_environment: ClusterEnvironment | None = None
    parallel_devices: Sequence[torch.device] = ()
    num_nodes = 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def check_devices(self) -> None:
        """Check what devices were given, now that those of the Trainer are known."""

    # The Trainer calls it when it has set everything else; no hook with a public name comes then.
    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes != 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: {self.strategy_name} {self.what_it_is} on one"
                f" machine; {self.advice}"
            )
        if self._is_one_of_several():
            raise ValueError(
                f"strategy={self.strategy_name!r} {self.what_it_is}, and this program was started"
                " in several, by torchrun, srun or another Trainer: each would do the same. Start"
                f" it once; {self.advice}"
            )
        self.check_devices()
        super()._configure_launcher()

    def _is_one_of_several(self) -> bool:
        """Whether this process is one of several that were started to train together."""
        environment = self.cluster_environment
        assert environment is not None
        # An earlier Trainer has left its process group, where this process would wait for others.
        if dist.is_initialized() and dist.get_world_size() > 1:
            return True
        if not isinstance(environment, LightningEnvironment):
            # Lightning finds the environment: an interactive shell of Slurm is not Slurm's.
            return environment.world_size() > 1
        # This one counts only the processes that it starts itself; those that others started show
        # in its rank. A Trainer that has started processes removes their number at its end, but not
        # the rank.
        return environment.creates_processes_externally and (
            environment.local_rank() > 0 or int(os.environ.get("WORLD_SIZE", "1")) > 1
        )


class OneProcess(SuperBatchMixin, OneNode):
    """One process on one machine, with the Trainer's devices as data devices, or devices given."""

    what_it_is = "is one process"
    advice = (
        "use strategy='memmap_superbatch_ddp', or Lightning's ddp, which trains one model in all"
        " processes; or, after another Trainer, call torch.distributed.destroy_process_group() and"
        " go on with rank 0 alone"
    )

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if data_devices is not None and (isinstance(data_devices, str) or not data_devices):
            raise ValueError(
                f"data_devices={data_devices!r}: give a list of at least one device, or omit it"
            )
        self._explicit = None if data_devices is None else [_device(name) for name in data_devices]

    @override
    def check_devices(self) -> None:
        for device in self.data_devices:
            check_device(device)

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that hold shards and serve batches."""
        return tuple(self.parallel_devices if self._explicit is None else self._explicit)


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"data_devices: {name!r} is no device: {error}") from error
    # "cuda" and "cuda:0" are one device, and are compared.
    if device.type not in ("cpu", "meta") and device.index is None:
        device = torch.device(device.type, 0)
    return device


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module, those of submodules included."""
    yield from module.parameters()
    yield from module.buffers()


def stages_given_by(module: Any) -> list[nn.Module]:
    """The stages that a module names by its method ``stages``."""
    # It may be an nn.ModuleList or nn.Sequential instead of a list.
    stages = list(module.stages())
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise UnsuitableModuleError(
                f"{type(module).__name__}.stages() gave {with_article(type(stage).__name__)}:"
                " give modules"
            )
    return stages


def parameters_by_stage(
    module: nn.Module, stages: Sequence[nn.Module]
) -> list[tuple[int | None, str, nn.Parameter]]:
    """The stage, None outside of all, and the name of each parameter; two cannot share one."""
    names = {child: f"{name}." for name, child in module.named_modules()}
    staged = [(index, child) for index, stage in enumerate(stages) for child in stage.modules()]
    outside = names.keys() - {child for _, child in staged}
    found = [
        (place, (names.get(child, "(no attribute).") + name).lstrip("."), parameter)
        for place, child in (*staged, *((None, child) for child in names if child in outside))
        for name, parameter in child.named_parameters(recurse=False)
    ]
    first: dict[nn.Parameter, tuple[int | None, str]] = {}
    for place, name, parameter in found:
        other, other_name = first.setdefault(parameter, (place, name))
        if other != place:
            raise ValueError(
                f"{other_name} ({_called(other)}) and {name} ({_called(place)}) are one parameter,"
                " which can only be in one place: put the layers that share it into one item of"
                " stages(), or untie them"
            )
    return found


def _called(stage: int | None) -> str:
    return "outside the stages" if stage is None else f"stage {stage}"


_ELSEWHERE = "train with memmap_superbatch_ddp, memmap_superbatch or ddp"


class SplitModule(RowWeighted):
    """For strategies that split the module: raises for what needs the whole of it."""

    #: The processes with the same buffers as this one; None for all.
    copies: dist.ProcessGroup | None = None
    unsupported_callbacks: ClassVar[tuple[type[Callback], ...]] = (
        lightning_callbacks.StochasticWeightAveraging,
        lightning_callbacks.ModelPruning,
        *WEIGHT_AVERAGING,
    )

    def check_fit(self, trainer: Trainer, averages: bool = True) -> None:
        """Raise for callbacks that need the whole module, and gradients without an average."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, self.unsupported_callbacks):
                raise ValueError(
                    f"{type(callback).__name__} needs the weights of the whole module, and under"
                    f" {self.strategy_name} no process holds them; omit it, or {_ELSEWHERE}"
                )
        for name, child in self.module.named_modules():
            if averages and isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
                raise ValueError(
                    f"{name}: {type(child).__name__} with sparse=True, and {self.strategy_name}"
                    " cannot average sparse gradients over processes; make it with sparse=False"
                )

    def share_buffers(self) -> None:
        """Give all copies the buffers of the first, as DDP does before a step."""
        local = (buffer for buffer in self.module.buffers() if not buffer.is_meta)
        broadcast_all(local, self.copies)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        trainer: Any = self.module.trainer
        evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        for loop in (trainer.fit_loop.epoch_loop.val_loop, *evaluations):
            # What FSDP2 gathers, and the tensors that pipelines keep, are used in training too.
            self.overrides.set(loop, "inference_mode", False)
        for stage in ("train", "val", "test", "predict"):
            name = f"{stage}_step_context"
            self.overrides.set(plugin, name, self._sharing_buffers(getattr(plugin, name)))

    def _sharing_buffers(self, context: Callable[[], Any]) -> Callable[[], Any]:
        """Return a context of a step that shares buffers first."""

        @contextmanager
        def step() -> Iterator[None]:
            self.share_buffers()
            with context():
                yield

        return step

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up optimizers that update each parameter by itself."""
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS: it needs the gradients of the whole module on one process, and under"
                f" {self.strategy_name} no process has them all; use an optimizer that updates each"
                f" parameter by itself, such as AdamW or SGD, or {_ELSEWHERE}"
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """Run the backward pass of a loss over outputs."""
        if closure_loss.is_meta or isinstance(closure_loss, DTensor):
            raise ValueError(
                "the loss has a term computed from the parameters themselves, such as a penalty on"
                f" their norms, and under {self.strategy_name} no process holds all of them; use"
                f" the optimizer's weight_decay for an L2 penalty, or {_ELSEWHERE}"
            )
        return super().backward(closure_loss, optimizer, *args, **kwargs)
