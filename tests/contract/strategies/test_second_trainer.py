"""A second Trainer in one program gets nothing of the first one's that it was not asked to."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_memmap import MemmapDataModule
from tests.strategies.test_fsdp2 import fit
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import free_port, in_processes, launch_any
from tests.support.traces import changed_by_fit


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


@in_processes(2)
def test_sharded_module_is_taken_over_as_it_was_sharded_or_not_at_all(tmp_path: Path) -> None:
    module = fit(tmp_path, "first", wrap_classes=["Block"])
    by_class = {"wrap_classes": ["Block"]}

    def by_ddp() -> None:
        trainer = make_trainer(tmp_path, strategy="memmap_superbatch_ddp", devices=2)
        data = MemmapDataModule(Points(24), store_dir=tmp_path / "stores", batch_size=6)
        trainer.fit(module, data)

    def by_hand() -> None:
        module.automatic_optimization = False
        try:
            fit(tmp_path, "second", lambda: module, **by_class)
        finally:
            module.automatic_optimization = True

    def in_another_group() -> None:
        dist.barrier()
        ports = [free_port()]
        dist.broadcast_object_list(ports)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(ports[0])
        fit(tmp_path, "second", lambda: module, **by_class)

    def with_options(trainer_options: Any = None, **options: Any) -> Callable[[], Any]:
        chosen = {**by_class, **options}
        return lambda: fit(
            tmp_path, "second", lambda: module, trainer_options=trainer_options, **chosen
        )

    # What is run, and what the error names. Without names, training continues.
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (with_options({"precision": "bf16-mixed"}), ["precision='bf16-mixed'", "'32-true'"]),
        (with_options(wrap_classes=["NoSuchClass"]), ["['NoSuchClass']", "Block, LayerNorm"]),
        (with_options(wrap_classes=["LayerNorm"]), ["wrap_classes", "blocks.0.norm", "blocks.0"]),
        (with_options(wrap_classes=None), ["min_unit_parameters", "blocks.0"]),
        (with_options(reshard_after_forward=True), ["reshard_after_forward=True", "None"]),
        (with_options(activation_checkpointing=True), ["activation_checkpointing=True"]),
        (with_options(reduce_dtype="bfloat16"), ["reduce_dtype=torch.bfloat16"]),
        (by_hand, ["automatic_optimization=False"]),
        (by_ddp, ["memmap_superbatch_ddp", "FSDP2", "Deep"]),
        # The same units, chosen otherwise.
        (with_options(wrap_classes=None, min_unit_parameters=4000), []),
        (with_options(wrap_classes=[type(module.blocks[0]).__mro__[2]]), []),
        (in_another_group, ["process group", "Deep"]),
    ]
    for run, names in cases:
        if not names:
            run()
            continue
        with pytest.raises(ValueError, match=re.escape(names[0])) as raised:
            run()
        assert all(name in str(raised.value) for name in names), names


#: What of a module stays as it was split.
SPLIT = {
    "memmap_fsdp2": ("module.",),
    "memmap_pipeline": ("module..pipeline_split", "module.._apply"),
}


@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2", "memmap_pipeline"])
def test_nothing_stays_on_the_objects_of_the_user(tmp_path: Path, strategy: str) -> None:
    outcome = launch_any(plugins, tmp_path, processes=2, strategy=strategy)
    assert outcome.codes == [0], outcome.report
    by_rank = [torch.load(tmp_path / f"plugin{rank}.pt") for rank in range(2)]
    for found in by_rank:
        # A module stays split: another Trainer of the same strategy continues with it.
        left = {name for name in found["left"] if not name.startswith(SPLIT.get(strategy, ()))}
        assert not left
        # The user's own context is used.
        assert found["entered"] > 0
        assert found["inference"]
    assert by_rank[0]["steps"] > 0


@in_processes(2)
def test_row_counts_of_a_batch_are_those_of_its_trainer(tmp_path: Path) -> None:
    # An uneven last step under Lightning's ddp, then even steps.
    uneven, even = (
        MemmapDataModule(Points(rows), store_dir=tmp_path / str(rows), batch_size=6, num_shards=4)
        for rows in (27, 24)
    )
    make_trainer(tmp_path, strategy="ddp", devices=2).fit(Regression(), uneven)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, strategy="memmap_superbatch_ddp", devices=2).fit(Regression(), even)
    assert not [each for each in caught if "drop_last" in str(each.message)]
