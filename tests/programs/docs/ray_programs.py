"""What Ray runs, once it has started, which takes it longer than all of this.

Run as a program, with a folder: Ray starts threads and processes of its own. Tasks write the parts
of the store ``parts``; one of them is killed and run again. The guide to Ray Train runs with both
of its strategies, and each worker writes what it has seen to ``ddp`` or ``superbatch``.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_memmap import build_part, finish_store
from tests.support.datasets import Numbered
from tests.support.models import Points, Regression
from tests.support.store.build_server import Deadly

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
NUM_ROWS, BATCH_SIZE, EPOCHS = 50, 4, 2
PARTS_ROWS, NUM_PARTS = 600, 4


def write(path: str, index: int) -> int:
    dataset: Any = Numbered(PARTS_ROWS)
    killed = Path(f"{path}.killed")
    if index == 1 and not killed.exists():
        killed.touch()
        dataset = Deadly(dataset, 250)
    build_part(dataset, path, (index, NUM_PARTS), fingerprint="numbered", progress=False)
    return os.getpid()


def build_by_tasks(path: str) -> None:
    import ray

    task = ray.remote(max_retries=2)(write)
    pids = ray.get([task.remote(path, index) for index in range(NUM_PARTS)])
    assert os.getpid() not in pids
    assert Path(f"{path}.killed").exists()
    finish_store(path, progress=False)


class Observed(Regression):
    """Writes the rows of each step and the weights of this worker at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def on_train_end(self) -> None:
        weights = {name: value.cpu() for name, value in self.net.state_dict().items()}
        torch.save((self.seen["train"], weights), self._folder / f"{self.global_rank}.pt")


def train_as_the_guide_does(folder: Path) -> None:
    program, wiring = re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for old, new in (
        ("/shared/stores/mine", str(folder / "store")),
        ("batch_size=64", f"batch_size={BATCH_SIZE}"),
        ("max_epochs=10", f"max_epochs={EPOCHS}, logger=False, enable_checkpointing=False"),
    ):
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    function, start = program.split("workers = ")
    wired = function.replace(
        "RayDDPStrategy(),", "RaySuperBatchDDPStrategy(data_devices_per_process=2),"
    )
    wired = wiring + wired.replace('devices="auto"', "devices=2")
    functions = []
    for name, text in (("ddp", function), ("superbatch", wired)):
        (folder / name).mkdir()
        names: dict[str, Any] = {
            "MyDataset": lambda: Points(NUM_ROWS),
            "MyModel": lambda out=folder / name: Observed(out),
        }
        exec(compile(text, str(GUIDE), "exec"), names)
        functions.append(names["train"])

    def both(config: Any) -> None:
        # Ray takes much longer to start its workers than they do to train.
        for function in functions:
            function(config)

    exec(compile(f"workers = {start}", str(GUIDE), "exec"), {**names, "train": both})


def main(folder: Path) -> None:
    # Here alone: the tests need this module without it, and it takes long.
    import ray

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        build_by_tasks(str(folder / "parts"))
        train_as_the_guide_does(folder)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
