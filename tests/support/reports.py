"""What the processes of a run reported, put together over data-parallel ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.support.models import weights
from tests.support.processes import sorted_steps
from tests.support.versions import weights_only


@dataclass(frozen=True)
class Reports:
    """What the processes of a run reported, and where their files are.

    Args:
        out: Directory of the checkpoints.
        ranks: By rank, the report of each case.
        kind: The class of the module.
    """

    out: Path
    ranks: list[dict[str, Any]]
    kind: type[L.LightningModule]

    def of(self, case: str) -> list[dict[str, Any]]:
        """The reports of a case by data-parallel rank, equal for processes that share a rank."""
        by_rank: dict[int, dict[str, Any]] = {}
        for report in self.ranks:
            first = by_rank.setdefault(report[case]["sharding"]["rank"], report[case])
            assert first["seen"] == report[case]["seen"]
        return [by_rank[rank] for rank in range(self.ranks[0][case]["sharding"]["num_replicas"])]

    def batches(self, case: str) -> dict[str, list[list[int]]]:
        """By stage, the rows of each step over all data-parallel ranks, sorted."""
        seen = [report["seen"] for report in self.of(case)]
        return {stage: sorted_steps([own[stage] for own in seen]) for stage in seen[0]}

    def weights(self, case: str) -> torch.Tensor:
        """The weights at the end of a case, loaded from its checkpoint into the plain module."""
        path = self.out / f"{case}.ckpt"
        return weights(
            self.kind.load_from_checkpoint(path, map_location="cpu", **weights_only(True))
        )
