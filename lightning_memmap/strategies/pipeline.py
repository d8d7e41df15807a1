"""``memmap_pipeline``: stages of a module on several processes, and several such pipelines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_memmap._compat.modules import is_compiled
from lightning_memmap._compat.processes import syncs_batch_norm
from lightning_memmap.costs import Cluster, Costs, Workload
from lightning_memmap.strategies._assembly import RowWeighting
from lightning_memmap.strategies._whole_module import (
    check_callbacks,
    check_embeddings,
    check_loss,
    check_optimizers,
)
from lightning_memmap.strategies.pipelining.groups import (
    Groups,
    Layout,
    average_gradients,
    broadcast_tensors,
    clip_by_norm,
    groups_of,
)
from lightning_memmap.strategies.pipelining.microbatches import MicroBatches, take_rows
from lightning_memmap.strategies.pipelining.schedules import (
    Pipeline,
    PipelineOptions,
    check_schedule,
    without_gradients,
)
from lightning_memmap.strategies.pipelining.stages import Stages, has_meta_parameters


class PipelineStrategy(RowWeighting, DDPStrategy):
    """Pipeline parallelism, with data parallelism as a second axis.

    Each process holds some stages of the module and nothing of the others. Batches go through the
    stages in micro-batches, in a schedule of ``torch.distributed.pipelining``. The gradients of
    ``data_parallel_size`` pipelines are averaged, each weighed by its rows.

    The LightningModule has two methods more: ``stages()``, the consecutive modules whose
    composition is its ``forward``; and ``loss(output, batch)``, the mean loss over the rows of a
    batch. Its ``training_step`` returns ``self.loss(self(inputs), batch)`` as on one device, and
    may log it. In ``validation_step``, ``test_step`` and ``predict_step``, ``self(inputs)`` is the
    whole output, on every process.

    Args:
        data_parallel_size: Pipelines. ``auto``: what ``pipeline_parallel_size`` leaves, or 1.
        pipeline_parallel_size: Processes of a pipeline. ``auto``: what ``data_parallel_size``
            leaves.
        schedule: ``gpipe``, ``1f1b``, or ``interleaved`` (1F1B with several stages a process,
            dealt in turn).
        num_microbatches: Micro-batches of each process's batch. By default twice as many as
            processes of a pipeline.
        step_timeout_s: After how many seconds a process that waits for another one of its
            pipeline, or for its like in another pipeline, gives up.
        prefetch: As for ``memmap_superbatch``.
        timeout: As for Lightning's ``DDPStrategy``: for all that is not part of a step, such as
            waiting for rank 0 to build a store.
        process_group_backend: As for Lightning's ``DDPStrategy``.
        accelerator: As for every Lightning strategy.
        parallel_devices: As for Lightning's parallel strategies.
        cluster_environment: As for Lightning's parallel strategies.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: A size or schedule that does not exist; on set-up, sizes that do not fit the
            processes, stages that do not fit the sizes, and what is not supported.
        UnsuitableModuleError: On set-up, a module without ``stages`` or ``loss``.
    """

    strategy_name = "memmap_pipeline"

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        pipeline_parallel_size: Literal["auto"] | int = "auto",
        schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b",
        num_microbatches: int | None = None,
        step_timeout_s: float = 300.0,
        prefetch: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        for name, size in (
            ("data_parallel_size", data_parallel_size),
            ("pipeline_parallel_size", pipeline_parallel_size),
        ):
            if size != "auto" and (not isinstance(size, int) or size < 1):
                raise ValueError(f"{name}={size!r}: 'auto', or at least 1")
        if step_timeout_s <= 0:
            raise ValueError(f"step_timeout_s={step_timeout_s}: more than 0 seconds")
        check_schedule(schedule)
        self._sizes = (data_parallel_size, pipeline_parallel_size)
        self._schedule = schedule
        self._num_microbatches = num_microbatches
        self._step_timeout_s = step_timeout_s
        self._layout: Layout | None = None
        self._groups: Groups | None = None
        self._stages: Stages | None = None
        self._pipeline: Pipeline | None = None
        self._own_metrics: list[Metric] = []
        self._unaveraged: dict[nn.Parameter, None] = {}
        self._is_in_step = False
        self._averages = True
        self._restores_late: bool | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            prefetch=prefetch,
        )

    # Processes

    @property
    def layout(self) -> Layout:
        """Which process is where. Known once the Trainer knows its devices."""
        if self._layout is None:
            self._layout = Layout.of(
                self.num_nodes * self.num_processes, self.global_rank, *self._sizes
            )
        return self._layout

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data-parallel rank and size: the processes of one pipeline have the same batches."""
        layout = self.layout
        return {"num_replicas": layout.data_parallel_size, "rank": layout.data_parallel_rank}

    @override
    def setup_environment(self) -> None:
        # Another rank than the one that the main process had before it started the others.
        self._layout = None
        self._restores_late = None
        self.set_world_ranks()
        options = self._options()
        super().setup_environment()
        self._groups = groups_of(self.layout, self._step_timeout_s)
        assert options.num_processes == dist.get_world_size(self._groups.pipeline)

    def _options(self) -> PipelineOptions:
        size = self.layout.pipeline_size
        num = 2 * size if self._num_microbatches is None else self._num_microbatches
        return PipelineOptions(self._schedule, num, size)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the data-parallel processes unless a group is named.

        The processes of one pipeline have the same rows, which must be counted once.
        """
        if group is None and self._groups is not None:
            group = self._groups.data_parallel
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the data-parallel processes unless a group is named."""
        if group is None and self._groups is not None:
            group = self._groups.data_parallel
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = self.reduce(votes, group=dist.group.WORLD, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    # Set-up

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Weights are loaded before the module is cut, unless it has no memory for them yet.
        if self._restores_late is None:
            module = self.lightning_module
            assert module is not None
            self._restores_late = has_meta_parameters(module) and not hasattr(
                module, "pipeline_place"
            )
        return self._restores_late

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        assert self._groups is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(trainer, self.strategy_name)
            if self.layout.data_parallel_size > 1:
                check_embeddings(module, self.strategy_name)
        self._refuse(module)
        options = self._options()
        self._stages = Stages(module, options.num_processes, options.is_interleaved)
        self.precision_plugin.convert_module(module)
        self._stages.hold(self.layout.place, self.root_device)
        held = self._stages.held(self.layout.place)
        self._tensors = [
            tensor for part in held.values() for tensor in (*part.parameters(), *part.buffers())
        ]
        broadcast_tensors(self._tensors, self._groups.data_parallel)
        self._pipeline = Pipeline(
            held,
            len(self._stages.parts),
            options,
            self._groups.pipeline,
            self.root_device,
            self.precision_plugin.forward_context,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._redirect(module)

    def _refuse(self, module: L.LightningModule) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                "precision='16-mixed': memmap_pipeline runs the backward pass before the loss is"
                " scaled; use 'bf16-mixed', 'bf16-true', '16-true', or full precision"
            )
        if is_compiled(module):
            raise ValueError(
                "torch.compile of the whole module: memmap_pipeline runs its stages alone; compile"
                " those, in the module's __init__ or configure_model"
            )
        if syncs_batch_norm(self):
            raise ValueError(
                "sync_batchnorm=True: memmap_pipeline runs batch-norm on the rows of each"
                " micro-batch; leave it out, or use group or layer norm"
            )

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.strategy_name)

    @override
    def model_to_device(self) -> None:
        """Nothing: `setup` moves what this process holds."""

    def _redirect(self, module: L.LightningModule) -> None:
        """Let the module's own calls go through the pipeline, until teardown."""
        assert self._groups is not None
        self._own_loss: Any = module.loss
        module.forward = self._forward  # type: ignore[method-assign]
        module.loss = self._compute_loss  # type: ignore[assignment]
        # Clipping by norm is a matter of all stages, and precision plugins know one process.
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self._own_metrics = [
            each
            for each in module.modules()
            if isinstance(each, Metric) and each.process_group is None
        ]
        for metric in self._own_metrics:
            metric.process_group = self._groups.data_parallel

    def _restore(self) -> None:
        module = self.lightning_module
        for owner, name in (
            (module, "forward"),
            (module, "loss"),
            (self.precision_plugin, "clip_grad_by_norm"),
        ):
            if owner is not None:
                vars(owner).pop(name, None)
        for metric in self._own_metrics:
            metric.process_group = None
        self._own_metrics = []
        self._pipeline = None

    @override
    def teardown(self) -> None:
        self._restore()
        # Not the parent's: it moves the module to the CPU, and parts of it have no memory.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Steps

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        # Running statistics are those of each pipeline's own rows: all evaluate with the first's.
        module = self.lightning_module
        assert module is not None
        assert self._groups is not None
        buffers = [tensor for tensor in module.buffers() if not tensor.is_meta]
        broadcast_tensors(buffers, self._groups.data_parallel)
        super().on_validation_start()

    def _forward(self, *args: Any) -> Any:
        if not self._is_in_step:
            raise RuntimeError(
                "memmap_pipeline: the module was called outside of a step, where the other"
                " processes of its pipeline may not call it and would be waited for: call it in"
                " training_step, validation_step, test_step or predict_step"
            )
        num_rows = _num_rows(args)
        if torch.is_grad_enabled():
            return PendingOutput(args, num_rows)
        assert self._pipeline is not None
        return self._pipeline.forward(
            args, MicroBatches(num_rows, self._options().num_microbatches)
        )

    def _compute_loss(self, output: Any, batch: Any) -> Any:
        if not isinstance(output, PendingOutput):
            return self._own_loss(output, batch)
        rows = MicroBatches(output.num_rows, self._options().num_microbatches)

        def loss_of(index: int, part: Any) -> Tensor:
            own = rows.rows(index)
            part = take_rows(part, range(len(own)), rows.size)
            loss = self._own_loss(part, take_rows(batch, own, rows.num_rows))
            if not isinstance(loss, Tensor) or loss.ndim:
                raise TypeError(
                    f"loss(output, batch) returned {loss!r}: return a tensor without dimensions,"
                    " the mean loss over the rows of the batch"
                )
            return loss * rows.weight(index)

        module = self.lightning_module
        assert module is not None
        assert self._pipeline is not None
        every = list(module.parameters())
        held = [parameter for parameter in every if not parameter.is_meta]
        frozen = tuple(index for index, p in enumerate(every) if not p.requires_grad)
        with without_gradients(held) as grads:
            total = self._pipeline.train(output.args, rows, loss_of, frozen)
        found = {p: grad for p, grad in zip(held, grads, strict=True) if grad is not None}
        self._unaveraged.update(dict.fromkeys(p for p in held if p.requires_grad))
        loss = total.requires_grad_()
        loss.register_hook(_KnownGradients(found))  # type: ignore[no-untyped-call]
        # No leaf, so that the user may change it in place.
        return loss.clone()

    # Gradients

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        check_loss(closure_loss, self.strategy_name)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self._averages = False
        try:
            yield
        finally:
            self._averages = True

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._averages:
            assert self._groups is not None
            average_gradients(list(self._unaveraged), self._groups.data_parallel)
            self._unaveraged = {}

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._groups is not None
        parameters = list(self.precision_plugin.main_params(optimizer))
        clip_by_norm(parameters, clip_val, self._groups.pipeline, self.root_device)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the whole module on rank 0; nothing on other ranks. All must call it."""
        module = self.lightning_module
        assert module is not None
        assert self._groups is not None
        assert self._stages is not None
        if self.layout.data_parallel_rank != 0:
            return {}
        owners = self._stages.owners()
        place, group = self.layout.place, self._groups.pipeline
        tensors = module.state_dict(keep_vars=True)
        found = module.state_dict()
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not (owner := owners.get(id(tensor), 0)):
                continue
            if place == owner:
                dist.send(found[name].to(self.root_device).contiguous(), 0, group=group)
            elif place == 0:
                received = torch.empty_like(tensor, device=self.root_device, requires_grad=False)
                dist.recv(received, dist.get_global_rank(group, owner), group=group)
                found[name] = received.cpu()
        return found if place == 0 else {}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        elsewhere = {name for name, t in module.state_dict().items() if _is_meta(t)}
        state = {
            name: torch.empty_like(value, device="meta") if name in elsewhere else value
            for name, value in checkpoint["state_dict"].items()
        }
        module.load_state_dict(state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer over all stages on rank 0, in the format of one process.

        Other ranks have that of their own stages. All must call it.
        """
        assert self._groups is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        whole = optimizer.state_dict()
        parameters = _parameters_of(optimizer)
        own = {
            index: state for index, state in whole["state"].items() if not parameters[index].is_meta
        }
        whole["state"] = own
        if self.layout.data_parallel_rank == 0:
            is_zero = self.layout.place == 0
            parts: list[Any] | None = [None] * self.layout.pipeline_size if is_zero else None
            sent = None if is_zero else move_data_to_device(own, torch.device("cpu"))
            dist.gather_object(sent, parts, 0, self._groups.pipeline)
            for part in (parts or [])[1:]:
                own.update(part)
        return whole

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        held = []
        for optimizer, state in zip(self.optimizers, states, strict=False):
            parameters = _parameters_of(optimizer)
            own = {
                index: value
                for index, value in state["state"].items()
                if index < len(parameters) and not parameters[index].is_meta
            }
            held.append({**state, "state": own})
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": held})

    @classmethod
    def costs(cls, work: Workload, cluster: Cluster, num_rows: int) -> Costs:
        """One pipeline of all devices with the defaults: 1F1B, two micro-batches for each stage.

        Stages have equal size. Every stage is idle for ``stages - 1`` micro-batches, as in GPipe
        (Huang et al., 2019), and 1F1B keeps the activations of at most as many micro-batches as
        there are stages (Narayanan et al., 2021).
        """
        stages = cluster.size
        num_microbatches = 2 * stages
        compute_s = cluster.compute_s(work, num_rows, busy=cluster.devices) / stages
        return Costs.of(
            work,
            num_rows=num_rows,
            step_s=work.fixed_s + compute_s * (1 + (stages - 1) / num_microbatches),
            state_share=1 / stages,
            activation_share=1 / num_microbatches,
            num_row_devices=1,
            effort=3,
            # Few models have layers for more stages of equal cost.
            obstacle=f"{stages} stages" if stages > 16 else "",
            note=f"equal stages, {num_microbatches} micro-batches; activations between stages not"
            " counted",
        )


class PendingOutput:
    """What ``self(inputs)`` is in a ``training_step``: an output that is not computed yet.

    ``self.loss(output, batch)`` runs the pipeline; until then no process has the output.

    Args:
        args: The inputs.
        num_rows: Their rows.
    """

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


_PENDING = (
    "under memmap_pipeline the output of the module in training_step can only be given to"
    " self.loss(output, batch), which runs on the last stage: compute there what the loss needs"
)


class _KnownGradients:
    """Adds gradients that are known already when ``backward`` reaches the loss that they are of.

    Args:
        grads: By parameter, the gradient of the loss.
    """

    def __init__(self, grads: dict[nn.Parameter, Tensor]) -> None:
        self._grads: dict[nn.Parameter, Tensor] | None = grads

    def __call__(self, scale: Tensor) -> None:
        """Take the gradient of what ``backward`` was called of, by the loss."""
        if self._grads is None:
            raise RuntimeError(
                "the loss of memmap_pipeline was given to backward twice: compute it again"
            )
        for parameter, grad in self._grads.items():
            if scale.device.type != "cpu" or scale != 1:
                grad.mul_(scale.to(grad.dtype))
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        self._grads = None


def _num_rows(args: Sequence[Any]) -> int:
    for arg in args:
        if not isinstance(arg, Tensor) or not arg.ndim:
            raise TypeError(
                f"memmap_pipeline: the module was called with a {type(arg).__name__}; call it with"
                " tensors whose first dimension is the rows, as its first stage takes them"
            )
    rows = {len(arg) for arg in args}
    if len(rows) != 1 or not all(rows):
        raise ValueError(
            f"memmap_pipeline: the module was called with tensors of {sorted(rows)} rows: give it"
            " at least one tensor, all with the same rows"
        )
    return rows.pop()


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
