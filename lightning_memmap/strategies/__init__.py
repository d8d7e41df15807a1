"""The strategies of this pack, registered with Lightning's Trainer by name.

superbatch              memmap_superbatch
superbatch_ddp          memmap_superbatch_ddp
data_parallel           memmap_dp
  replicas/replicas       where a replica gets its parameters, and where its gradients go
  replicas/module_copy    the layers of one replica
  replicas/replicable     modules that have no replicas
  replicas/batches        the batch of a step: one batch per replica
  replicas/merge_outputs  what the replicas return
  replicas/merge_logs     what they log
model_parallel          memmap_model_parallel
fsdp2                   memmap_fsdp2
  sharding/units          which modules are sharded
  sharding/shard          how
  sharding/states         whole and sharded states, for checkpoints
pipeline                memmap_pipeline
  pipelining/cut          the stages of each process
  pipelining/stage_pipeline   batches go through them
  pipelining/exchange     what processes exchange otherwise
  pipelining/states       whole and local states, for checkpoints
  pipelining/known_gradients  losses whose gradients were computed before ``backward``
independent             memmap_independent
  members/processes       the processes of members
  members/results         what they record

The bases are in `common`. The data-parallel rank of a process, by which its rows are chosen, is in
`placement.topology`. Arrows lead to the class that derives from another one:

    base.MemmapStrategy -> seeded_steps.SeededSteps -> data_devices.DataDevices
      DataDevices -> weighted_loss.WeightedLoss       where the loss of an uneven step is weighted
      DataDevices -> processes.SeveralProcesses       several processes; errors name their cause
    base.MemmapStrategy -> one_process.OneNode        one process on one machine
      OneNode, WeightedLoss -> one_process.OneProcess
        -> superbatch, data_parallel, model_parallel
      OneNode, WeightedLoss -> independent
      WeightedLoss, SeveralProcesses -> superbatch_ddp
      WeightedLoss, SeveralProcesses -> split_module.SplitModule   no process has the whole module
        -> fsdp2, pipeline

And functions: checkpoints replaces files and folders at once, meta_device initialises modules
there, split_rows divides batches, stages finds the stages of a module, buckets joins tensors.
"""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.independent import IndependentStrategy
from lightning_memmap.strategies.members.results import MemberResult, MemberResults, read_results
from lightning_memmap.strategies.model_parallel import LocalModelParallelStrategy
from lightning_memmap.strategies.pipeline import PipelineStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

__all__ = [
    "STRATEGIES",
    "DataParallelStrategy",
    "FSDP2Strategy",
    "IndependentStrategy",
    "LocalModelParallelStrategy",
    "MemberResult",
    "MemberResults",
    "PipelineStrategy",
    "SuperBatchDDPStrategy",
    "SuperBatchStrategy",
    "read_results",
    "register",
]


def __dir__() -> list[str]:
    return __all__


_CLASSES: tuple[Any, ...] = (
    SuperBatchStrategy,
    DataParallelStrategy,
    LocalModelParallelStrategy,
    SuperBatchDDPStrategy,
    FSDP2Strategy,
    IndependentStrategy,
    PipelineStrategy,
)

#: Name in ``Trainer(strategy=...)``, class, and what it does.
STRATEGIES: tuple[tuple[str, type[Strategy], str], ...] = tuple(
    (cls.strategy_name, cls, (cls.__doc__ or "").partition("\n")[0].rstrip(".")) for cls in _CLASSES
)


def register() -> None:
    """Register the strategies with the Trainer, by name. Doing it again changes nothing."""
    for name, strategy, description in STRATEGIES:
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=description)
