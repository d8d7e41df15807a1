"""A second Trainer in one program gets nothing of the first one's that it was not asked to."""

from pathlib import Path

import pytest
import torch

from tests.support.distributed.harness import launch, launch_any


def test_sharded_module_is_taken_over_as_it_was_sharded_or_not_at_all(tmp_path: Path) -> None:
    for found in launch("second_trainer.errors", tmp_path, processes=2):
        for case, *words in (
            ("precision", "precision='bf16-mixed'", "'32-true'"),
            ("no such class", "wrap_classes=['NoSuchClass']", "Block, LayerNorm"),
            ("other class", "wrap_classes", "blocks.0.norm", "blocks.0"),
            ("by size", "min_unit_parameters", "blocks.0"),
            ("reshard", "reshard_after_forward=True", "None"),
            ("recompute", "activation_checkpointing=True", "False"),
            ("reduce", "reduce_dtype=torch.bfloat16"),
            ("by hand", "automatic_optimization=False"),
            ("ddp", "memmap_superbatch_ddp", "FSDP2", "Deep"),
            ("group", "process group", "Deep"),
        ):
            for word in words:
                assert word in found[case], case
        assert found["same"] == found["same class"] == ""


#: What of a module stays as it was split.
SPLIT = {"memmap_fsdp2": "module.", "memmap_pipeline": "module..pipeline_split"}


@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2", "memmap_pipeline"])
def test_nothing_stays_on_the_objects_of_the_user(tmp_path: Path, strategy: str) -> None:
    outcome = launch_any("second_trainer.plugins", tmp_path, processes=2, strategy=strategy)
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


def test_row_counts_of_a_batch_are_those_of_its_trainer(tmp_path: Path) -> None:
    for found in launch("second_trainer.unasked", tmp_path, processes=2):
        assert found["warnings"] == []
