"""The strategies of this pack, registered with Lightning's Trainer by name.

superbatch           memmap_superbatch
superbatch_ddp       memmap_superbatch_ddp
data_parallel        memmap_dp
  _replicas          where a replica gets its parameters, and where its gradients go
  _module_copy       the layers of one replica
  _replicable        modules that have no replicas
  _replica_batches   the batch of a step: one batch per replica
  _merge_outputs     what the replicas return
  _merge_logs        what they log
model_parallel       memmap_model_parallel
fsdp2                memmap_fsdp2
  _fsdp2_units       which modules are sharded
  _fsdp2_shard       how
  _fsdp2_states      whole and sharded states, for checkpoints
pipeline             memmap_pipeline
  _pipeline_cut      the stages of each process
  _pipeline_run      batches go through them (_scheduled_stage)
  _pipeline_exchange what processes exchange otherwise
  _known_gradients   losses whose gradients were computed before ``backward``
independent          memmap_independent
  _members           the processes of members
  _member_results    what they record

Bases of several strategies, each on the one above:

_checked             what every strategy checks when it starts (_checkpoints, _overrides)
_data_devices        which devices hold the data
_one_process         strategies of one process
_processes           strategies of several processes (_failures, _same_rows)
_weighted_loss       where the loss of an uneven step is weighted
_split_module        strategies under which no process has the whole module

And functions: _meta_device initialises modules there, _split_rows divides batches, _stages finds
the stages of a module.
"""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_memmap._compat.registry import name_our_strategies
from lightning_memmap.strategies._member_results import MemberResult, MemberResults, read_results
from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.independent import IndependentStrategy
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
    name_our_strategies(name for name, *_ in STRATEGIES)
