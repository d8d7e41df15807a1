"""What a GPU should give: a small model, by which a measurement can be judged.

A figure is bytes over a bandwidth, or launches times the time of a launch. Bandwidths are those of
the data sheets, of which copies reach a share; where a figure is an assumption, it says so.
"""

from dataclasses import dataclass

#: Share of a data sheet's bandwidth that a long copy reaches. An assumption.
COPY_SHARE = 0.85
#: Seconds in which the program starts a kernel by an operator of torch. An assumption.
LAUNCH_S = 5e-6
#: Bytes that a GPU reads together: rows that are no shorter are fetched at the rate of a copy.
SECTOR_BYTES = 128


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Args:
        name: Its name.
        memory: Bandwidth of its memory, in bytes per second.
        nvlink: To other GPUs, one way.
        pcie: To and from the host, one way.
        bf16: Dense operations of bfloat16 per second.
    """

    name: str
    memory: float
    nvlink: float
    pcie: float
    bf16: float


#: NVIDIA's data sheets of the Tensor Core GPUs H200, H100 and A100, as SXM with 141, 80 and 80 GB,
#: which give the bandwidth of links both ways.
GPUS = {
    "H200": Gpu("H200", 4.8e12, 450e9, 64e9, 989e12),
    "H100": Gpu("H100", 3.35e12, 450e9, 64e9, 989e12),
    "A100": Gpu("A100", 2.039e12, 300e9, 32e9, 312e12),
}


def fetch_rate(gpu: Gpu, row_bytes: int) -> float:
    """Bytes read and written per second where random rows are fetched on the device."""
    read = -(-row_bytes // SECTOR_BYTES) * SECTOR_BYTES
    return COPY_SHARE * gpu.memory * 2 * row_bytes / (read + row_bytes)


def load_rate(gpu: Gpu, read_rate: float) -> float:
    """Bytes per second of a store that is brought to the device: the slower part of the two.

    Args:
        gpu: The GPU.
        read_rate: Bytes per second at which the files are read.
    """
    return min(COPY_SHARE * gpu.pcie, read_rate)


def fetch_s(gpu: Gpu, num_bytes: int, num_kernels: int = 2) -> float:
    """Seconds in which the rows of a step are fetched from the device's own memory."""
    return num_kernels * LAUNCH_S + 2 * num_bytes / (COPY_SHARE * gpu.memory)


def send_s(gpu: Gpu, num_bytes: int, *, from_host: bool) -> float:
    """Seconds in which the rows of a step come from the host, or from another GPU."""
    return num_bytes / (COPY_SHARE * (gpu.pcie if from_host else gpu.nvlink))


def waiting_share(step_s: float, ready_s: float, prefetch: int) -> float:
    """Share of a step that is spent waiting for data.

    Args:
        step_s: Seconds of a step on data that is there.
        ready_s: Seconds in which the rows of a step are made ready.
        prefetch: Steps that are made ready ahead: with any, only what takes longer than the step.
    """
    waited = max(0.0, ready_s - step_s) if prefetch else ready_s
    return waited / (step_s + waited)


def markdown() -> str:
    """The predictions of the figures of `gpu.py` as a table."""
    image, batch = 3 * 32 * 32, 512
    gpus = list(GPUS.values())
    lines: list[tuple[str, list[str]]] = [
        (f"fetch of rows of {size:,} bytes, GB/s read and written", [
            f"{fetch_rate(gpu, size) / 1e9:,.0f}" for gpu in gpus
        ])
        for size in (256, 4096, 150_528)
    ]  # fmt: skip
    lines += [
        (
            "store in the page cache to the device, GB/s, if files are read at 10 GB/s",
            [f"{load_rate(gpu, 10e9) / 1e9:.0f}" for gpu in gpus],
        ),
        (
            "page-locked memory to the device, GB/s",
            [f"{COPY_SHARE * gpu.pcie / 1e9:.0f}" for gpu in gpus],
        ),
        (
            f"rows of a step of {batch} images of 3 KB: from the device itself, us",
            [f"{1e6 * fetch_s(gpu, batch * image):.0f}" for gpu in gpus],
        ),
        (
            "the same from another GPU, us more",
            [f"{1e6 * send_s(gpu, batch * image, from_host=False):.0f}" for gpu in gpus],
        ),
        (
            "the same from the host, us more",
            [f"{1e6 * send_s(gpu, batch * image, from_host=True):.0f}" for gpu in gpus],
        ),
        (
            "share of waiting, rows on the device, step of 1 ms, no prefetch",
            [f"{waiting_share(1e-3, fetch_s(gpu, batch * image), 0):.3f}" for gpu in gpus],
        ),
        (
            "the same with prefetch",
            [f"{waiting_share(1e-3, fetch_s(gpu, batch * image), 2):.3f}" for gpu in gpus],
        ),
    ]
    head = ["| | " + " | ".join(gpu.name for gpu in gpus) + " |", "|---|" + "---|" * len(gpus)]
    return "\n".join([*head, *(f"| {name} | {' | '.join(values)} |" for name, values in lines)])
