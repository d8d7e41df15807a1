"""Random numbers for each row: their share of the time of a batch transform.

    python tests/programs/benchmarks/row_random.py

Crops and flips the images of case A of ``loader.py``, 512 rows of 3x32x32 bytes, with numbers for
each row and with those of a ``torch.Generator``; and draws the numbers of the rows alone. Printed
are milliseconds of a batch, and the ratio to the first, round by round.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loader import CASES, RandomRows
from timing import in_turn, machine, pairwise_ratios, spread

from lightning_memmap.augmentations import Compose, RandomCrop, RandomFlip
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.transform import DeviceTransform

PADDING = 4
BATCHES, ROUNDS = 20, 15


def crop_and_flip(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Do the same with the numbers of a generator."""
    image = batch["image"]
    num, _, height, width = image.shape
    top, left = torch.randint(2 * PADDING + 1, (2, num), generator=generator)
    crops = F.pad(image, (PADDING,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    cropped = crops[torch.arange(num), :, top, left]
    chosen = torch.rand(num, generator=generator) < 0.5
    return {"image": torch.where(chosen[:, None, None, None], cropped.flip(-1), cropped)}


def draw(random: RowRandom) -> None:
    """Draw what the transform draws."""
    for high in (2 * PADDING + 1,) * 2:
        random.randint(high=high)
    random.bernoulli()


def repeated(run: Callable[[], Any]) -> Callable[[], None]:
    """Run some batches."""

    def run_all() -> None:
        for _ in range(BATCHES):
            run()

    return run_all


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    case, cpu = CASES["A"], torch.device("cpu")
    image = RandomRows(case).rows[: case.batch]
    random = RowRandom(range(case.batch))
    for_rows = DeviceTransform(Compose([RandomCrop(padding=PADDING), RandomFlip()]), cpu)
    for_batch = DeviceTransform(crop_and_flip, cpu)
    seconds = in_turn(
        {
            "numbers for each row": repeated(lambda: for_rows({"image": image}, 1, random)),
            "numbers of a generator": repeated(lambda: for_batch({"image": image}, 1)),
            "draws for each row alone": repeated(lambda: draw(random.restarted())),
        },
        ROUNDS,
    )
    print(f"crop and flip of {case.batch} rows of {case.shape}, one thread; {machine()}")
    whole = seconds["numbers for each row"]
    for name, took in seconds.items():
        times = spread([1000 * each / BATCHES for each in took], "{:.2f}")
        print(f"{name:<26}{times:>24} ms{spread(pairwise_ratios(took, whole)):>24}")


if __name__ == "__main__":
    main()
