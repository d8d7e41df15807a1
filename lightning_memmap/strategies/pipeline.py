"""``memmap_pipeline``: stages of a module on several processes, and several such pipelines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_memmap._compat.dynamo import compiler_context
from lightning_memmap._compat.modules import is_called_in
from lightning_memmap._compat.tensors import after_backward
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies.common.base import STEPS
from lightning_memmap.strategies.common.split_module import SplitModule
from lightning_memmap.strategies.common.stages import module_tensors
from lightning_memmap.strategies.pipelining.cut import cut_module, keep_local
from lightning_memmap.strategies.pipelining.exchange import average_gradients, gather_entries
from lightning_memmap.strategies.pipelining.known_gradients import (
    loss_with_gradients,
    separate_gradients,
)
from lightning_memmap.strategies.pipelining.stage_pipeline import (
    SCHEDULES,
    StagePipeline,
    check_schedule,
)
from lightning_memmap.strategies.pipelining.states import (
    gather_module_state,
    local_state,
    local_weights,
)


class PipelineStrategy(SplitModule, DDPStrategy):
    """Pipeline parallelism, with data parallelism as a second axis.

    Each process holds some stages of the module and no memory of the others. Batches go through
    the stages in micro-batches, in a schedule of ``torch.distributed.pipelining``. The gradients
    of ``data_parallel_size`` pipelines are averaged, each weighted by its rows.

    The LightningModule needs two more methods: ``stages()`` returns the consecutive modules whose
    composition is its ``forward``, and ``loss(output, batch)`` returns the mean loss over the rows
    of a batch. Its ``training_step`` returns ``self.loss(self(inputs), batch)`` as on one device,
    and may log it. In ``validation_step``, ``test_step`` and ``predict_step``, ``self(inputs)`` is
    the whole output, on every process.

    Args:
        data_parallel_size: Number of pipelines, among which the processes are divided.
        schedule: ``gpipe``, ``1f1b``, or ``interleaved`` (1F1B where process ``p`` of ``P`` has
            runs the stages ``p``, ``p + P``, and so on).
        num_microbatches: Micro-batches of each process's batch. By default twice as many as
            processes per pipeline.
        timeout: As for Lightning's ``DDPStrategy``: how long a process waits for another one. Then
            gloo raises an error, and NCCL ends the process without an error that Python can catch.
        process_group_backend: As for Lightning's ``DDPStrategy``.

    Raises:
        ValueError: ``data_parallel_size``, ``num_microbatches`` or the schedule is out of range, or
            does not match the processes; at set-up, the stages do not match them, or an option of
            the Trainer is not supported.
        UnsuitableModuleError: At set-up, the module has no ``stages`` or no ``loss``.
    """

    strategy_name = "memmap_pipeline"
    continues_split = "memmap_pipeline"
    restore_checkpoint_after_setup = True
    # BaseFinetuning identifies parameters by their values.
    unsupported_callbacks = (*SplitModule.unsupported_callbacks, BaseFinetuning)

    def __init__(
        self,
        data_parallel_size: int = 1,
        schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b",
        num_microbatches: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
    ) -> None:
        check_integer("data_parallel_size", data_parallel_size, 1)
        if num_microbatches is not None:
            check_integer("num_microbatches", num_microbatches, 1)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}")
        self._data_parallel_size = data_parallel_size
        self._schedule = schedule
        self._num_microbatches = num_microbatches
        # Made with the default process group, before which collectives use that group.
        self._mesh: DeviceMesh | None = None
        # Made by the set-up.
        self._pipeline: StagePipeline | None = None
        self._module_loss: Any = None
        self._averages = True
        # The parameters whose gradients have not been averaged over pipelines yet.
        self._local_grads: dict[nn.Parameter, None] = {}
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    # Processes

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of pipelines, and of processes in each; known with the Trainer's devices."""
        num = self.num_nodes * self.num_processes
        pipelines = self._data_parallel_size
        if num % pipelines:
            raise ValueError(
                f"data_parallel_size={pipelines} does not divide the {num} processes (devices x"
                " num_nodes), and all pipelines have the same size: choose a divisor"
            )
        return pipelines, num // pipelines

    @property
    def _ranks(self) -> tuple[int, int]:
        """The number of this process's pipeline, and of the process in it."""
        return divmod(self.global_rank, self.sizes[1])

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data-parallel rank and size: the processes of one pipeline have the same batches."""
        return {"num_replicas": self.sizes[0], "rank": self._ranks[0]}

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        check_schedule(self._schedule, self.num_separate_batches, self.sizes[1])

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._mesh = _mesh(dist.group.WORLD, self.root_device.type, self.sizes)

    @property
    @override
    def random_rank(self) -> int:
        """The global rank: each process of a pipeline runs other layers."""
        return self.global_rank

    @property
    def num_separate_batches(self) -> int:
        """Micro-batches of a batch."""
        return self._num_microbatches or 2 * self.sizes[1]

    def _group_of(self, name: str) -> dist.ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group(name)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the data-parallel processes unless a group is named."""
        # The processes of one pipeline have the same rows, which must be counted once.
        return super().reduce(tensor, self._group(group), reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the data-parallel processes unless a group is named."""
        return super().all_gather(tensor, self._group(group), sync_grads)

    def _group(self, group: Any | None) -> Any | None:
        return self._group_of("dp") if group is None and self._mesh is not None else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = self.reduce(votes, group=dist.group.WORLD, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    # Set-up

    @override
    def setup(self, trainer: L.Trainer) -> None:
        trainer.accelerator.setup(trainer)
        module = self.module
        num_pipelines, size = self.sizes
        if trainer.state.fn == TrainerFn.FITTING:
            self.check_callbacks(trainer)
            if num_pipelines > 1:
                self.check_dense_gradients()
        self._check_options(module)
        interleaved = self._schedule == "interleaved"
        stages = cut_module(module, size, interleaved, self.precision_plugin.forward_context)
        self.precision_plugin.convert_module(module)
        local = keep_local(module, stages, self._ranks[1], size, self.root_device)
        self.data_parallel_group = self._group_of("dp")
        for tensor in chain.from_iterable(map(module_tensors, local.values())):
            broadcast(
                tensor, dist.get_global_rank(self.data_parallel_group, 0), self.data_parallel_group
            )
        self._pipeline = StagePipeline(
            module,
            local,
            len(stages),
            self._schedule,
            self.num_separate_batches,
            self._group_of("pp"),
            self.root_device,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._redirect()

    def _check_options(self, module: L.LightningModule) -> None:
        """Raise for options of the Trainer that pipelines do not support."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                "precision='16-mixed': memmap_pipeline runs the backward pass before the loss is"
                " scaled; use 'bf16-mixed', 'bf16-true', '16-true', or full precision"
            )
        # Set by torch.compile of a LightningModule.
        if compiler_context(module):
            raise ValueError(
                "torch.compile of the whole module: memmap_pipeline runs only its stages; compile"
                " these, in the module's __init__ or configure_model"
            )
        # Set by the Trainer for sync_batchnorm=True.
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: memmap_pipeline runs batch norm on the rows of each"
                " micro-batch; omit it, or use group or layer norm"
            )

    @override
    def model_to_device(self) -> None:
        """Do nothing: `setup` moves the stages of this process."""

    def _redirect(self) -> None:
        """Run ``self.forward`` and ``self.loss`` of the module through the pipeline.

        In ``training_step``, ``self(inputs)`` only records its inputs, in a `_PendingOutput`.
        ``self.loss(output, batch)`` then runs the whole forward and backward pass of the pipeline,
        because a schedule interleaves them, and returns a loss whose gradients are known.
        """
        self._module_loss = self.module.loss
        self.overrides.set(self.module, "forward", self._evaluate_or_record)
        self.overrides.set(self.module, "loss", self._train_pipeline)
        # The norm is over the gradients of all stages, and precision plugins see one process.
        self.overrides.set(self.precision_plugin, "clip_grad_by_norm", self._clip_grad_by_norm)
        for child in self.module.modules():
            if isinstance(child, Metric) and child.process_group is None:
                self.overrides.set(child, "process_group", self._group_of("dp"))

    @override
    def teardown(self) -> None:
        self._local_grads.clear()
        self.overrides.undo()
        self._pipeline = None
        # The parent would also move the module to the CPU, and some of it has no memory.
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            if part is not None:
                part.teardown()
        self.checkpoint_io.teardown()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if isinstance(loader, SuperBatchLoader) and self.module.trainer.training:
            assert self._pipeline is not None
            self._pipeline.largest_rows = loader.max_step_rows
        return loader

    # Steps

    def _evaluate_or_record(self, *args: Any) -> Any:
        """Run the pipeline for ``self(inputs)``, or in training record the inputs for the loss."""
        if not is_called_in(self.module, STEPS):
            raise RuntimeError(
                "memmap_pipeline: the module was called outside of a step, where it would wait for"
                f" other processes of its pipeline: call it in {', '.join(STEPS)}"
            )
        num_rows = _num_rows_of(args)
        if torch.is_grad_enabled():
            return _PendingOutput(args, num_rows)
        assert self._pipeline is not None
        return self._pipeline.evaluate(args, num_rows)

    def _train_pipeline(self, output: Any, batch: Any) -> Any:
        """Run the forward and backward pass of the pipeline for ``self.loss(output, batch)``."""
        if not isinstance(output, _PendingOutput):
            return self._module_loss(output, batch)
        assert self._pipeline is not None
        local = [parameter for parameter in self.module.parameters() if not parameter.is_meta]
        # Equal on every pipeline, even if a parameter has a gradient on some of them only.
        trained = dict.fromkeys(p for p in local if p.requires_grad)
        with separate_gradients(local) as grads:
            mean = self._pipeline.train(
                output.args, output.num_rows, batch, self._checked_loss, self.items_by_row
            )

        def note_backward() -> None:
            self._local_grads.update(trained)
            # Before hooks that may read gradients.
            after_backward(self._average)

        return loss_with_gradients(mean, grads, note_backward)

    def _checked_loss(self, output: Any, batch: Any) -> Tensor:
        with self.precision_plugin.forward_context():
            loss = self._module_loss(output, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise TypeError(
                f"loss(output, batch) returned {loss!r}: return a tensor without dimensions,"
                " the mean loss over the rows of the batch"
            )
        return loss

    # Gradients

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self._averages = False
        try:
            yield
        finally:
            self._averages = True

    def _average(self) -> None:
        """Average the gradients of all losses whose backward pass has run since the last time."""
        # Not during the backward pass of the stages, as DDP would, because the loss is scaled after
        # it, and the weight of a step may differ between pipelines.
        if self._averages:
            average_gradients(list(self._local_grads), self._group_of("dp"))
            self._local_grads.clear()

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = nn.utils.get_total_norm(grads).to(self.root_device, torch.float64).square()
        dist.all_reduce(squares, group=self._group_of("pp"))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, squares.sqrt())

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module on rank 0, {} on others. All ranks must call it."""
        if self._ranks[0] != 0:
            return {}
        return gather_module_state(self.module, self._group_of("pp"), self.root_device)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        weights = local_weights(self.module, checkpoint["state_dict"])
        self.module.load_state_dict(weights, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all stages on rank 0, of local ones elsewhere. All ranks call it."""
        state = optimizer.state_dict()
        local = local_state(optimizer, state["state"])
        state["state"] = local
        if self._ranks[0] == 0:
            local.update(gather_entries(local, self._group_of("pp"), self.root_device))
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        local = [
            {**state, "state": local_state(optimizer, state["state"])} for optimizer, state in pairs
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": local})


@cache
def _mesh(world: object, device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """Return the mesh of pipelines and their processes. All processes must call this."""
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "pp"))


_PENDING = (
    "under memmap_pipeline the output of the module in training_step can only be passed to"
    " self.loss(output, batch), which runs on the last stage: compute there what the loss needs"
)


class _PendingOutput:
    """The output of ``self(inputs)`` in a ``training_step``, which is not computed yet."""

    def __init__(self, args: Sequence[Tensor], num_rows: int) -> None:
        self.args = args
        self.num_rows = num_rows

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_PENDING)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_PENDING}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_PENDING)


def _num_rows_of(args: Sequence[Any]) -> int:
    """Return the rows of the inputs of the module."""
    rows = {len(arg) if isinstance(arg, Tensor) and arg.ndim else 0 for arg in args}
    if len(rows) != 1 or not all(rows):
        kinds = [tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__ for a in args]
        raise TypeError(
            f"memmap_pipeline: the module was called with {kinds}: call it with one or more"
            " tensors whose first dimension is the rows, as its first stage takes them"
        )
    return rows.pop()
