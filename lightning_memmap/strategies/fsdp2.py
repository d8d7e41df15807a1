"""``memmap_fsdp2``: FSDP2 without a ``configure_model`` to write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.checkpoints import METADATA
from lightning_memmap._compat.fsdp2 import (
    can_keep_gradients,
    drop_kept_gradients,
    forget_interrupted_step,
    reduce_kept_gradients,
)
from lightning_memmap._compat.modules import set_device_attribute
from lightning_memmap.errors import check_integer
from lightning_memmap.ranks import run_on_rank_zero
from lightning_memmap.strategies.common.checkpoints import replaced
from lightning_memmap.strategies.common.split_module import SplitModule
from lightning_memmap.strategies.sharding.shard import (
    compile_forward,
    recompute_activations,
    reshard_if_thawed,
    shard_module,
    sharded_units,
)
from lightning_memmap.strategies.sharding.states import (
    gather_state,
    load_sharded_optimizers,
    load_sharded_weights,
    shard_like,
    shard_optimizer_state,
)
from lightning_memmap.strategies.sharding.units import choose_units


@dataclass(frozen=True)
class _Sharding:
    """How a module was sharded."""

    #: The default process group, which the mesh is made of.
    world: Any
    mesh: DeviceMesh
    #: By name, the arguments of the strategy and the Trainer that can't be changed afterwards.
    options: Mapping[str, Any]


#: Modules stay sharded after their Trainer ends, and another Trainer may continue with them.
_SHARDED: WeakKeyDictionary[nn.Module, _Sharding] = WeakKeyDictionary()
#: By the Trainer's precision, the dtype of computations; None for the dtype of the parameters.
_COMPUTE: dict[str, torch.dtype | None] = {
    **dict.fromkeys(("32-true", "bf16-true", "16-true", "64-true")),
    "bf16-mixed": torch.bfloat16,
}


class FSDP2Strategy(SplitModule, ModelParallelStrategy):
    """Trains with FSDP2: each process holds shards of parameters, gradients and optimizer states.

    The module needs no ``configure_model``: its blocks are sharded as units, and then the module
    itself with all other parameters. A unit's parameters are gathered before it runs and freed
    afterwards. All processes are data parallel, and their losses are weighted by rows, so training
    equals training in one process even if the last step does not divide evenly.

    Every process starts from the values of rank 0. Modules on the meta device are initialised unit
    by unit, by ``reset_parameters`` and the ``_init_weights(module)`` of the model around them.

    With ``Trainer(precision="bf16-mixed")`` units compute in bfloat16 from float32 shards,
    gradients are reduced in float32, and autocast keeps losses in float32. Batches are cast too.

    Args:
        wrap_classes: Classes of the units, or their names. By default units are the items of the
            largest ``ModuleList`` or ``Sequential``, such as the blocks of a transformer, and all
            other modules of their classes.
        min_unit_parameters: Without ``wrap_classes``: modules with fewer parameters are not units,
            because each unit issues its own collectives.
        replicate_size: Number of replicas (HSDP); it must divide the number of processes. Each
            replica is sharded over a group of processes.
        reshard_after_forward: Whether units free their gathered parameters between the forward and
            the backward pass; a number is the size of the groups over which they stay sharded
            instead. By default all units except the root free them.
        cpu_offload: Keep shards, gradients and optimizer states in host memory. Requires GPUs.
        reduce_dtype: Reduce gradients in this dtype. By default float32 in mixed precision, and
            otherwise the dtype of the parameters.
        activation_checkpointing: Recompute the forward pass of units in the backward pass instead
            of keeping activations: of all units, or with a number ``n`` of every ``n``-th.
        compile_units: Compile the forward pass of each unit by ``torch.compile``. Units of one
            class share their code.
        sync_each_micro_batch: With ``accumulate_grad_batches``, reduce gradients in each
            micro-batch, so no process keeps more than its shards of them. By default they are
            reduced once per step, and until then each process keeps whole gradients: 4 bytes per
            parameter, or the size of ``reduce_dtype``.
        save_distributed_checkpoint: Each process saves its shards to files in one folder. By
            default rank 0 saves one file, which the plain module can load.
        exclude_frozen_parameters: Omit parameters with ``requires_grad=False`` from checkpoints,
            such as all but the adapters of LoRA. When one is loaded, those that are frozen keep
            the values that the module was built with.
        process_group_backend: As for Lightning's ``ModelParallelStrategy``.
        timeout: As for Lightning's ``ModelParallelStrategy``.

    Raises:
        ValueError: An option is out of range, does not match the number of processes, or excludes
            another one or the Trainer's precision; at set-up, a class of ``wrap_classes`` is not
            in the module, or the module cannot be sharded as it is.
        TypeError: ``wrap_classes`` is not a list of names or classes.
        UnsuitableModuleError: At set-up, a module on the meta device cannot be initialised.
    """

    strategy_name = "memmap_fsdp2"
    # `setup` checks how the module was sharded.
    continues_split = "FSDP2"
    # From a file. From a folder, `load_checkpoint` restores them.
    lightning_restore_optimizer = True

    def __init__(
        self,
        wrap_classes: Sequence[str | type[nn.Module]] | None = None,
        min_unit_parameters: int = 1_000_000,
        replicate_size: int = 1,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        reduce_dtype: str | torch.dtype | None = None,
        activation_checkpointing: bool | int = False,
        compile_units: bool = False,
        sync_each_micro_batch: bool = False,
        save_distributed_checkpoint: bool = False,
        exclude_frozen_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_integer("min_unit_parameters", min_unit_parameters, 1)
        check_integer("replicate_size", replicate_size, 1)
        if not isinstance(activation_checkpointing, bool):
            check_integer("activation_checkpointing", activation_checkpointing, 1)
        if wrap_classes is not None and not _are_classes(wrap_classes):
            raise TypeError(
                f"wrap_classes={wrap_classes!r}: pass a list of module classes, or of their names,"
                " such as ['Block']"
            )
        self._wrap_classes = wrap_classes
        self._min_unit_parameters = min_unit_parameters
        self._replicate_size = replicate_size
        self._reshard_after_forward = reshard_after_forward
        self._cpu_offload = cpu_offload
        dtype = getattr(torch, str(reduce_dtype).removeprefix("torch."), None)
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if reduce_dtype is not None and not is_float:
            raise ValueError(
                f"reduce_dtype={reduce_dtype!r}: pass a floating-point dtype, such as 'bfloat16'"
            )
        self._reduce_dtype: torch.dtype | None = dtype
        self._activation_checkpointing = activation_checkpointing
        self._compile_units = compile_units
        self._sync_each_micro_batch = sync_each_micro_batch
        self._is_save_sharded = save_distributed_checkpoint
        self._exclude_frozen = exclude_frozen_parameters
        # The module's units, once it is sharded.
        self._units: list[FSDPModule] = []
        # Whether whole gradients are kept until the last micro-batch of a step.
        self._keeps_gradients = False
        if cpu_offload and process_group_backend is None:
            # Norms of gradients in host memory are reduced there.
            process_group_backend = "cpu:gloo,cuda:nccl"
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        kind = self.root_device.type
        if self._cpu_offload and kind != "cuda":
            raise ValueError(
                f"cpu_offload=True with accelerator={kind!r}: the shards are in host memory anyway;"
                " use GPUs, or omit it"
            )
        num = self.num_nodes * self.num_processes
        if num % self._replicate_size:
            raise ValueError(
                f"replicate_size={self._replicate_size}: it does not divide the {num} processes;"
                " choose a divisor"
            )
        if (precision := self.precision_plugin.precision) not in _COMPUTE:
            raise ValueError(
                f"Trainer(precision={precision!r}): memmap_fsdp2 does not support it; choose one of"
                f" {', '.join(_COMPUTE)}"
            )

    @override
    def setup_environment(self) -> None:
        # All processes are data parallel. The parent has other sizes, and no public setter.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
        if (replicas := self._replicate_size) == 1:
            self._mesh = self.device_mesh["data_parallel"]
        else:
            self._mesh = init_device_mesh(
                self.root_device.type,
                (replicas, self.world_size // replicas),
                mesh_dim_names=("replicate", "shard"),
            )

    @override
    def setup(self, trainer: L.Trainer) -> None:
        # The parent's method requires a configure_model that shards.
        module = self.module
        trainer.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.check_callbacks(trainer)
            self.check_dense_gradients()
        if (sharding := _SHARDED.get(module)) is None:
            self._shard(module)
        else:
            self._take_over(module, sharding)
        self._units = sharded_units(module)
        self.model = module
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: L.LightningModule) -> None:
        # Set by the Trainer for sync_batchnorm=True.
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        units = choose_units(module, self._wrap_classes, self._min_unit_parameters)
        options = self._options(module, units)
        if self._activation_checkpointing:
            recompute_activations(module, units, every=int(self._activation_checkpointing))
        if self._compile_units:
            compile_forward(module, units)
        dtype = _COMPUTE[self.precision_plugin.precision]
        shard_module(
            module,
            units,
            self.root_device,
            MixedPrecisionPolicy(dtype, self._reduce_dtype or (dtype and torch.float32)),
            not_loaded=self._frozen_names(),
            mesh=self._mesh,
            reshard_after_forward=self._reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if self._cpu_offload else OffloadPolicy(),
        )
        _SHARDED[module] = _Sharding(dist.group.WORLD, self._mesh, options)

    def _options(self, module: L.LightningModule, units: Sequence[nn.Module]) -> dict[str, Any]:
        """Return the options that can't be changed once a module is sharded."""
        names = {child: name for name, child in module.named_modules()}
        chosen_by = "min_unit_parameters" if self._wrap_classes is None else "wrap_classes"
        return {
            "precision": self.precision_plugin.precision,
            "automatic_optimization": module.automatic_optimization,
            "reshard_after_forward": self._reshard_after_forward,
            "cpu_offload": self._cpu_offload,
            "reduce_dtype": self._reduce_dtype,
            "activation_checkpointing": self._activation_checkpointing,
            "compile_units": self._compile_units,
            # Not the argument itself: other arguments may choose the same units.
            f"the units that {chosen_by} chooses": sorted(names[unit] for unit in units),
        }

    def _take_over(self, module: L.LightningModule, sharding: _Sharding) -> None:
        """Continue with a module that another Trainer has sharded."""
        kind = type(module).__name__
        advice = "load a checkpoint of it into a new module"
        if sharding.world is not dist.group.WORLD:
            raise ValueError(
                f"the {kind} was sharded by another Trainer over a process group that has been"
                f" destroyed since: {advice}"
            )
        if sharding.mesh != self._mesh:
            raise ValueError(
                f"the {kind} was sharded over {sharding.mesh} by another Trainer, and this one has"
                f" {self._mesh}: {advice}"
            )
        sharded = sharded_units(module)
        for unit in sharded:
            unit.reshard()
        units = choose_units(module, self._wrap_classes, self._min_unit_parameters)
        options = self._options(module, units)
        for (name, value), old in zip(options.items(), sharding.options.values(), strict=True):
            if value != old:
                raise ValueError(
                    f"{name}={value!r}: the {kind} was sharded by another Trainer with {old!r},"
                    f" which cannot be changed: pass the same, or {advice}"
                )
        forget_interrupted_step(sharded)
        drop_kept_gradients(sharded)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.overrides.set(optimizer, "zero_grad", self._zero_grad_of(optimizer))
        # The setter wraps them again: Lightning's wrappers copy the attributes.
        self.optimizers = [*self.optimizers]

    def _zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        zero_grad = optimizer.zero_grad

        def zero_all(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            if self._keeps_gradients:
                groups = optimizer.param_groups
                params = {param for group in groups for param in group["params"]}
                drop_kept_gradients(self._units, params)

        return zero_all

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        reshard_if_thawed(self._units)
        return super().training_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Keep whole gradients within the context, instead of reducing them."""
        if self._sync_each_micro_batch or not self._may_keep_gradients():
            yield
            return
        self._keeps_gradients = True
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def _may_keep_gradients(self) -> bool:
        # Kept gradients are accumulated in the dtype in which they are reduced.
        dtype = self._reduce_dtype
        is_narrow = dtype is not None and any(
            param.itemsize > dtype.itemsize for param in self.module.parameters()
        )
        return not is_narrow and can_keep_gradients(self._units)

    def _set_gradient_sync(self, value: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(value, recurse=False)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # Roots that are still gathered, as after a forward pass without gradients, are outdated.
        self._reshard()
        return output

    @override
    def complete_gradients(self, optimizer: Optimizer) -> None:
        if self._keeps_gradients:
            # Needed if the last micro-batch had no loss. Otherwise this does nothing.
            reduce_kept_gradients(self._units)
            self._keeps_gradients = False
        super().complete_gradients(optimizer)

    @override
    def model_to_device(self) -> None:
        if not self._cpu_offload:
            super().model_to_device()
            return
        set_device_attribute(self.module, self.root_device)
        for child in self.module.modules():
            if isinstance(child, torchmetrics.Metric):
                child.to(self.root_device)

    def _reshard(self) -> None:
        """Free the parameters of roots, which stay gathered if no backward pass follows."""
        for unit in self._units:
            unit.reshard()

    on_validation_end = on_test_end = on_predict_end = _reshard

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of a plain optimizer on rank 0, or shards. All ranks must call it."""
        if self._is_save_sharded:
            is_new = not optimizer.state
            keeps = self._keeps_gradients
            self._keeps_gradients = False
            state = super().optimizer_state(optimizer)
            self._keeps_gradients = keeps
            if is_new:
                # torch took a step of length zero to create the state, and Adam counts it.
                optimizer.state.clear()
                state["state"] = {}
            return state
        # The parent would number them in the order of the module, which may not be theirs.
        return gather_state(optimizer.state_dict(), self.is_global_zero)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Any process may write them to a folder.
        self.share_buffers()
        if self._is_save_sharded:
            state = super().lightning_module_state_dict()
        else:
            state = self.module.state_dict()
        for name in self._frozen_names():
            state.pop(name, None)
        return state if self._is_save_sharded else gather_state(state, self.is_global_zero)

    def _frozen_names(self) -> list[str]:
        """List the parameters that checkpoints don't contain."""
        named = self.module.named_parameters(remove_duplicate=False)
        return [name for name, p in named if self._exclude_frozen and not p.requires_grad]

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save a file or a folder, which replaces an older one as a whole. All ranks must call."""
        if not self._is_save_sharded:
            # The parent would first delete a folder of that name.
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            return
        target = Path(self.broadcast(filepath))
        # By the end of the parent's method, rank 0 has written everything that isn't sharded.
        with replaced(target, run_on_rank_zero) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint in a file or in a folder. All ranks must call it."""
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            # The parent needs a state for every parameter. Some may be frozen, and some may never
            # have had a gradient.
            strict = self.module.strict_loading
            load_sharded_weights(path, self.module, self._frozen_names(), strict)
            load_sharded_optimizers(path, self.module, self.optimizers)
            metadata = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
            # Everything is loaded.
            return {**metadata, "state_dict": {}, "optimizer_states": []}
        # Each rank reads its own shards from the memory-mapped file.
        return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if weights := checkpoint["state_dict"]:
            state = self.module.state_dict()
            sharded = {name: shard_like(state.get(name), value) for name, value in weights.items()}
            kept = {name: state[name] for name in self._frozen_names()}
            self.module.load_state_dict({**kept, **sharded}, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            optimizer.load_state_dict(shard_optimizer_state(state, optimizer))


def _are_classes(classes: Any) -> bool:
    """Return whether an argument is a sequence of module classes or their names."""
    return (
        isinstance(classes, Sequence)
        and not isinstance(classes, str)
        and all(
            isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))
            for item in classes
        )
    )
