"""Several Trainers in one program: what the first one leaves to the second one."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_memmap import MemmapDataModule
from tests.support.distributed.harness import free_port
from tests.support.distributed.scenarios.fsdp2 import fit
from tests.support.models import Points, Regression, make_trainer
from tests.support.traces import changed_by_fit


def errors(out: Path) -> dict[str, Any]:
    """Continue with a sharded module in ways that differ from the first one's. The errors."""
    module = fit(out, "first", wrap_classes=["Block"])
    by_class = {"wrap_classes": ["Block"]}

    def by_ddp() -> None:
        trainer = make_trainer(out, strategy="memmap_superbatch_ddp", devices=2)
        data = MemmapDataModule(Points(24), store_dir=out / "stores", batch_size=6)
        trainer.fit(module, data)

    def by_hand() -> None:
        module.automatic_optimization = False
        try:
            fit(out, "second", lambda: module, **by_class)
        finally:
            module.automatic_optimization = True

    def in_another_group() -> None:
        dist.barrier()
        ports = [free_port()]
        dist.broadcast_object_list(ports)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(ports[0])
        fit(out, "second", lambda: module, **by_class)

    def with_options(trainer_options: Any = None, **options: Any) -> Callable[[], Any]:
        chosen = {**by_class, **options}
        return lambda: fit(out, "second", lambda: module, trainer_options=trainer_options, **chosen)

    cases: dict[str, Callable[[], Any]] = {
        "precision": with_options({"precision": "bf16-mixed"}),
        "no such class": with_options(wrap_classes=["NoSuchClass"]),
        "other class": with_options(wrap_classes=["LayerNorm"]),
        "by size": with_options(wrap_classes=None),
        "reshard": with_options(reshard_after_forward=True),
        "recompute": with_options(activation_checkpointing=True),
        "reduce": with_options(reduce_dtype="bfloat16"),
        "by hand": by_hand,
        "ddp": by_ddp,
        # The same units, chosen otherwise.
        "same": with_options(wrap_classes=None, min_unit_parameters=4000),
        "same class": with_options(wrap_classes=[type(module.blocks[0]).__mro__[2]]),
        "group": in_another_group,
    }
    found = {}
    for name, run in cases.items():
        try:
            run()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def plugins(out: Path, strategy: str) -> dict[str, Any]:
    """What is left on a precision plugin, which rank 0 then uses alone."""
    plugin = Precision()

    def train_step_context() -> Any:
        entered.append(True)
        return Precision.train_step_context(plugin)

    entered: list[bool] = []
    plugin.train_step_context = train_step_context  # type: ignore[method-assign]
    data = MemmapDataModule(
        Points(26), Points(12), store_dir=out / "stores", batch_size=6, num_shards=4
    )
    reference = make_trainer(out, strategy="ddp", devices=2, plugins=[Precision()])
    expected = changed_by_fit(reference, Regression(), data)
    entered.clear()
    trainer = make_trainer(out, strategy=strategy, devices=2, plugins=[plugin])
    left = changed_by_fit(trainer, Regression(), data) - expected
    found: dict[str, Any] = {"left": sorted(left), "entered": len(entered)}
    found["inference"] = trainer.test_loop.inference_mode
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        for name in ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "RANK"):
            os.environ.pop(name, None)
        trainer = make_trainer(out, strategy="memmap_superbatch", devices=2, plugins=[plugin])
        trainer.fit(Regression(), data)
        found["steps"] = trainer.global_step
    # Without a process group, nobody else knows the rank any more.
    torch.save(found, out / f"plugin{rank}.pt")
    return {}


def unasked(out: Path) -> dict[str, Any]:
    """Train with an uneven last step under Lightning's ddp, then with even steps. The warnings."""
    data = MemmapDataModule(Points(27), store_dir=out / "stores", batch_size=6, num_shards=4)
    make_trainer(out, strategy="ddp", devices=2).fit(Regression(), data)
    wrapped = MemmapDataModule(Points(24), store_dir=out / "others", batch_size=6, num_shards=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(out, strategy="memmap_superbatch_ddp", devices=2).fit(Regression(), wrapped)
    return {"warnings": [str(each.message) for each in caught if "drop_last" in str(each.message)]}
