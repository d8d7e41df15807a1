"""``memmap_superbatch_ddp``: super-batches inside each process, DDP between the processes."""

import gc
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.ddp import (
    IGNORED_BY_DDP,
    begin_static_graph,
    ddp_option,
    ddp_options,
)
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.device_streams import has_streams, stream_module
from lightning_memmap.process_group import broadcast, broadcast_all, must_send_bytes
from lightning_memmap.strategies.common.processes import SeveralProcesses
from lightning_memmap.strategies.common.weighted_loss import WeightedLoss

#: Part of DDP's message about a step that has not used all parameters.
_UNUSED = "Expected to have finished reduction in the prior iteration"


class SuperBatchDDPStrategy(WeightedLoss, SeveralProcesses, DDPStrategy):
    """Trains with DDP from data that all devices hold: each process owns several data devices.

    By default every device has a process that trains. With ``data_devices_per_process`` the devices
    of each node are divided into groups, one per process: the first device of a group is the
    process's root device, which trains, and in each step the batches of the group are assembled
    there. Gradients are averaged over the processes of all nodes as under ``ddp``. The global batch
    has ``batch_size`` rows for each data device of all processes, in the same order as under
    ``memmap_superbatch``.

    The loss of a process is weighted by its rows, so training equals training in one process even
    if the last step does not divide evenly.

    Args:
        data_devices_per_process: Devices in a group, which must divide ``Trainer(devices=...)``.
        root_holds_data: Whether root devices hold shards too.
        **kwargs: As for Lightning's ``DDPStrategy``.

    Raises:
        ValueError: ``data_devices_per_process`` is below 1, does not divide the devices, or leaves
            no device to hold data.
    """

    strategy_name = "memmap_superbatch_ddp"

    def __init__(
        self,
        data_devices_per_process: int = 1,
        root_holds_data: bool = True,
        **kwargs: Any,
    ) -> None:
        check_integer("data_devices_per_process", data_devices_per_process, 1)
        self._devices_per_process = data_devices_per_process
        self._root_holds_data = root_holds_data
        # The parameters that were trainable when the module was wrapped, and the frozen ones.
        self._trained: list[nn.Parameter] = []
        self._frozen: dict[str, nn.Parameter] = {}
        super().__init__(**kwargs)

    @override
    def set_world_ranks(self) -> None:
        num_devices = len(self.parallel_devices or [])
        size = self._devices_per_process
        if num_devices % size:
            raise ValueError(
                f"data_devices_per_process={size}: it does not divide"
                f" Trainer(devices={num_devices}); choose a divisor"
            )
        if size == 1 and not self._root_holds_data:
            raise ValueError(
                "root_holds_data=False with data_devices_per_process=1: no device would hold data;"
                " use at least data_devices_per_process=2"
            )
        super().set_world_ranks()

    @property
    @override
    def num_processes(self) -> int:
        """Processes on this node."""
        devices = self.parallel_devices
        return len(devices) // self._devices_per_process if devices else 0

    @property
    def process_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process, the first of which trains.

        They are a group of `parallel_devices`. A subclass returns all of them if the launcher shows
        each process its own devices only, as Ray Train does.

        Raises:
            ValueError: More processes were started on this node than there are groups.
        """
        devices = self.parallel_devices
        assert devices is not None
        size = self._devices_per_process
        group = tuple(devices[self.local_rank * size : (self.local_rank + 1) * size])
        if not group:
            raise ValueError(
                f"Trainer(devices={len(devices)}) with data_devices_per_process={size} has"
                f" {self.num_processes} processes per node, and this process has local rank"
                f" {self.local_rank}: start {self.num_processes} processes on each node, or choose"
                " a smaller data_devices_per_process"
            )
        return group

    @property
    @override
    def root_device(self) -> torch.device:
        return self.process_devices[0]

    @property
    @override
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process that hold shards and serve batches."""
        devices = self.process_devices
        return devices if self._root_holds_data else devices[1:]

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        # Before the states are synchronised, which Lightning does without DDP for evaluation, too.
        module: Any = self.module
        named = chain(module.named_parameters(), module.named_buffers())
        ignored = {name: tensor for name, tensor in named if must_send_bytes(tensor)}
        if ignored:
            names = {*getattr(module, IGNORED_BY_DDP, ()), *ignored}
            self.overrides.set(module, IGNORED_BY_DDP, names)
            for tensor in ignored.values():
                tensor.data = tensor.data.contiguous()
                broadcast(tensor, 0)

    @override
    def configure_ddp(self) -> None:
        """Wrap the module in DDP for the parameters that are trainable now."""
        module: Any = self.module
        super().configure_ddp()
        wrapper: Any = self.model
        names = [name for name, buffer in module.named_buffers() if must_send_bytes(buffer)]
        if names and ddp_option(self, "broadcast_buffers", True):
            # DDP does so with all other buffers.
            wrapper.register_forward_pre_hook(
                lambda *_: broadcast_all(map(module.get_buffer, names))
            )
        if has_streams(self.root_device):
            # Lightning wraps the module on a side stream and doesn't wait for the broadcast of
            # weights there.
            stream_module(self.root_device).synchronize(self.root_device)
        ignored = wrapper.parameters_to_ignore
        named_parameters = {n: p for n, p in module.named_parameters() if n not in ignored}
        self._trained = [p for p in named_parameters.values() if p.requires_grad]
        self._frozen = {n: p for n, p in named_parameters.items() if not p.requires_grad}

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # All ranks freeze and thaw the same parameters.
        if self._has_thawed() or self._has_frozen():
            self._wrap_again()
        return super().training_step(*args, **kwargs)

    def _has_thawed(self) -> bool:
        """Return whether a parameter is trainable now that was frozen when DDP was created."""
        return any(parameter.requires_grad for parameter in self._frozen.values())

    def _has_frozen(self) -> bool:
        """Return whether DDP would wait for the gradient of a parameter that is frozen now."""
        wrapper: Any = self.model
        if not self._trained or wrapper.find_unused_parameters:
            return False
        num_trained = sum(parameter.requires_grad for parameter in self._trained)
        return 0 < num_trained < len(self._trained)

    def _wrap_again(self) -> None:
        self.model = self.module
        # The old wrapper has reference cycles, and keeps its hooks on parameters until it is freed.
        gc.collect()
        # Parameters are equal on all processes, and buffers may differ: broadcast nothing.
        with ddp_options(self, init_sync=False):
            self.configure_ddp()
        begin_static_graph(self)

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        wrapper: Any = self.model
        if self._has_thawed() and wrapper.require_backward_grad_sync:
            names = [name for name, param in self._frozen.items() if param.requires_grad]
            raise ValueError(
                f"{', '.join(names)}: requires_grad was set to True inside training_step, too late"
                " for DDP to average the gradients; set it in on_train_batch_start"
            )
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        # The advice of the parent, which recognizes the message too, names its own class.
        advice = (
            "find_unused_parameters=False: the loss of a step did not use all parameters, and DDP"
            " waits for their gradients; pass"
            " strategy=SuperBatchDDPStrategy(find_unused_parameters=True) to the Trainer"
        )
        exception.args = tuple(
            advice if isinstance(arg, str) and _UNUSED in arg else arg for arg in exception.args
        )
        super().on_exception(exception)
