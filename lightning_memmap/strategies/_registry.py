"""The strategy names of this pack, registered with Lightning's Trainer."""

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.independent import IndependentStrategy
from lightning_memmap.strategies.model_parallel import LocalModelParallelStrategy
from lightning_memmap.strategies.pipeline import PipelineStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

#: Name in ``Trainer(strategy=...)``, class, and what the name stands for.
STRATEGIES: tuple[tuple[str, type[Strategy], str], ...] = (
    (
        "memmap_superbatch",
        SuperBatchStrategy,
        "one process: shards on all devices, super-batches on the root device, which trains",
    ),
    (
        "memmap_dp",
        DataParallelStrategy,
        "one process: a replica of the model on every data device, which trains on its own rows",
    ),
    (
        "memmap_model_parallel",
        LocalModelParallelStrategy,
        "one process: the layers of one model over all devices, super-batches to the first",
    ),
    (
        "memmap_superbatch_ddp",
        SuperBatchDDPStrategy,
        "super-batches inside each process, DDP between the processes, over several nodes too",
    ),
    (
        "memmap_fsdp2",
        FSDP2Strategy,
        "FSDP2 of any module: each process holds shards of parameters, gradients and states",
    ),
    (
        "memmap_independent",
        IndependentStrategy,
        "a model per device, trained on data of its own: ensembles, k-fold, one model per site",
    ),
    (
        "memmap_pipeline",
        PipelineStrategy,
        "stages of a module on several processes, and several such pipelines",
    ),
)


def register() -> None:
    """Register the strategies with the Trainer, by name. Doing it again changes nothing."""
    for name, strategy, description in STRATEGIES:
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=description)
