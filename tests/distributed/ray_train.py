"""Run the guide to Ray Train, with both of its strategies, and write what each worker has seen.

Run as a program, with a folder: Ray starts threads and processes of its own.
"""

import re
import sys
from pathlib import Path
from typing import Any

import ray
import torch

from tests.models import Points, Regression

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "ray.md"
NUM_ROWS, BATCH_SIZE, EPOCHS = 50, 4, 2


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


def main(folder: Path) -> None:
    program, wiring = re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for old, new in (
        ("/shared/stores/mine", str(folder / "store")),
        ("batch_size=64", f"batch_size={BATCH_SIZE}"),
        ("max_epochs=10", f"max_epochs={EPOCHS}, logger=False, enable_checkpointing=False"),
    ):
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    function, start = program.split("workers = ")
    wired = function.replace("RayDDPStrategy(),", "RaySuperBatchDDPStrategy(),")
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

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        exec(compile(f"workers = {start}", str(GUIDE), "exec"), {**names, "train": both})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
