"""What the pack is worth on a GPU: fetches, loading, waiting.

    python tests/programs/benchmarks/gpu.py --all        # everything, and the tests for GPUs
    python tests/programs/benchmarks/gpu.py --data-devices cuda:0,cuda:1 --only wait
    python tests/programs/benchmarks/gpu.py --device cpu --tiny

- fetch: the bandwidth at which random rows are fetched on the device, against a copy of as many
  bytes that lie together; both read and write each byte once.
- load: a store brought to the device, against copies from pinned memory, and against reading
  the files and nothing else, from the disk and from the page cache.
- wait: the share of a training step that is spent waiting for data, which is what the step takes
  longer than one that is given the same batch again and again; with and without steps made ready
  ahead, for rows on the device and for rows on the host.
- resnet: images/s of ResNet-50 in bf16, trained by Lightning from a resident store, from encoded
  JPEGs in a store, from a DataLoader with 8 and 16 workers, and on one batch again and again. It
  takes about 90 s; ``--only resnet --device cpu --tiny`` tries it out.

``--all`` first runs tests on GPUs: the loading of data and the contract of the strategies of one
process, which on a single GPU have it twice; from two GPUs on, those of several processes, too.
Then ``lightning-memmap compare`` trains the digits of the examples under ``--variants`` on at most
two GPUs. Everything goes to one JSON file, and the tables to docs/tested.md.

Without a GPU it says so and fails. On ``--device cpu``, and on the simulated devices of
``python -m tests.programs.simulated_gpu --program tests/programs/benchmarks/gpu.py --all --tiny``,
it shows that it runs; what it prints then says nothing about a GPU. The runs of a round take turns.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch
from gpu_figures import ROOT, Bench, Images, Row
from gpu_resnet import TINY, Sizes, make_network, resnet_rates
from timing import machine, spread

from lightning_memmap.store import Store, build_store

#: The tests for one GPU, and those that need two.
TESTS = ("tests/loading/test_gpu.py", "tests/contract/strategies/test_contract.py")
OF_TWO = (
    "tests/contract/strategies/test_contract_in_processes.py",
    "tests/contract/strategies/test_gpus.py",
)
IS_SIMULATED = "SIMULATED_GPU_LIBRARY" in os.environ
FIGURES = ("fetch", "load", "wait", "resnet")
TITLES = {
    "fetch": "Fetches of random rows",
    "load": "Loading a store",
    "wait": "Training steps",
    "resnet": "ResNet-50",
    "compare": "Strategies",
}


def measured(args: argparse.Namespace, bench: Bench, directory: Path) -> Iterator[tuple[str, Row]]:
    """The rows of all figures, as they are measured, each with the figure's name."""

    @cache
    def store() -> Store:
        num_rows = max(24, bench.num_bytes // Images(1).images.nbytes)
        return build_store(Images(num_rows), directory / "images", progress=False)

    figures: dict[str, Callable[[], Iterator[Row]]] = {
        "fetch": bench.fetches,
        "load": lambda: bench.loads(store()),
        "wait": lambda: bench.waits(store(), args.batch, args.width),
        "resnet": lambda: resnet(bench, TINY if args.tiny else Sizes(), directory),
    }
    for name in FIGURES:
        if name in args.only:
            for row in figures[name]():
                yield name, row


def resnet(bench: Bench, sizes: Sizes, directory: Path) -> Iterator[Row]:
    """A row for each loader."""
    best = None
    for name, rates in resnet_rates(bench.device, bench.wait, sizes, directory):
        best = best or median(rates)
        yield Row(name, {"images/s": rates, "of one batch": [rate / best for rate in rates]})


def text_of(row: Row) -> str:
    """A row as a line: of each column, the median and the range."""
    cells = (f"{column} {spread(values, form_of(values))}" for column, values in row.values.items())
    return f"{row.label:>36}  {'; '.join(cells)}"


def form_of(values: list[float]) -> str:
    return "{:.3f}" if max(values) < 10 else "{:,.0f}"


def markdown(report: dict[str, Any]) -> str:
    """The tables of a report."""
    parts = [f"{report['machine']}; {report['device']}; {report['rounds']} rounds."]
    if network := report.get("network"):
        parts.append(f"Network: {network}.")
    if tests := report.get("tests"):
        parts.append(f"Tests: {', '.join(f'{n} {k}' for k, n in tests.items())}.")
        found = (f"`{name}` {status}" for name, status in report["compare"].items())
        parts.append(f"`compare`: {', '.join(found)}.")
    for name, rows in report["figures"].items():
        columns = list(dict.fromkeys(column for values in rows.values() for column in values))
        lines = [
            f"| {TITLES[name]} | {' | '.join(columns)} |",
            "|---|" + "---|" * len(columns),
        ]
        for label, values in rows.items():
            cells = (
                spread(values[column], form_of(values[column])) if column in values else ""
                for column in columns
            )
            lines.append(f"| {label} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write_table(page: Path, table: str) -> None:
    """Replace what a page has between the comments ``measured`` and ``end of measured``."""
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- measured -->\n")
    _, end, after = rest.partition("<!-- end of measured -->")
    if not end:
        raise ValueError(f"{page} has no place for what is measured")
    page.write_text(f"{before}{start}{table}\n{end}{after}", encoding="utf-8")


def run_tests(chosen: list[str]) -> dict[str, int]:
    """Run tests on GPUs, and count them by outcome."""
    runner = ["tests.programs.simulated_gpu"] if IS_SIMULATED else ["pytest", "-p", "no:xdist"]
    files = chosen or [*TESTS, *(OF_TWO if torch.cuda.device_count() > 1 else ())]
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "tests.xml"
        command = [sys.executable, "-m", *runner, "-q", f"--junitxml={answer}", *files]
        variables = {**os.environ, "LIGHTNING_MEMMAP_TEST_ACCELERATOR": "gpu"}
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        (suite,) = ElementTree.parse(answer).getroot()
    counts = {key: int(suite.get(key, 0)) for key in ("failures", "errors", "skipped")}
    return {"passed": int(suite.get("tests", 0)) - sum(counts.values()), **counts}


def run_comparison(
    variants: str, repeats: int, directory: Path
) -> tuple[dict[str, str], list[Row]]:
    """Compare variants, and return what became of each, and the figures of those that ran."""
    config, devices = ROOT / "examples" / "configs" / "digits.yaml", torch.cuda.device_count()
    options = {
        "config": config, "variants": variants, "devices": min(2, devices), "repeats": repeats,
        "out": directory / "compare",
    }  # fmt: skip
    given = (f"--{name}={value}" for name, value in options.items())
    command = [sys.executable, "-m", "lightning_memmap", "compare", *given]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=directory, env=variables, check=False)
    found = json.loads((directory / "compare" / "report.json").read_text(encoding="utf-8"))
    outcomes, rows = {}, []
    for each in found["variants"]:
        differs = each["parity"] is not None and not each["parity"]["holds"]
        outcomes[each["variant"]] = "differs" if differs else each["status"]
        figures = each["figures"]
        if "samples_per_s" in figures:
            stall = [100 * share for share in figures["data_stall"]]
            values = {"samples/s": figures["samples_per_s"], "data stall, %": stall}
            rows.append(Row(each["variant"], values))
    return outcomes, rows


def report_of(args: argparse.Namespace, bench: Bench, directory: Path) -> dict[str, Any]:
    """Measure, print line by line, and return everything."""
    names = ", ".join(str(device) for device in bench.data_devices)
    report: dict[str, Any] = {
        "machine": machine(),
        "platform": platform.platform(),
        "device": f"{_name(bench.device)}, rows on {names}",
        "rounds": args.rounds,
        "mib": args.mib,
        "batch": args.batch,
        "width": args.width,
        "figures": {},
    }
    if "resnet" in args.only:
        sizes = TINY if args.tiny else Sizes()
        step = f"rounds of {sizes.steps} steps of {sizes.batch} images of {sizes.side} pixels"
        report["network"] = f"{make_network()[1]}; {sizes.rounds} {step}, {sizes.precision}"
        print(report["network"])
    print(f"{report['machine']}; {report['device']}; {args.rounds} rounds", flush=True)
    if bench.device.type == "cpu" or IS_SIMULATED:
        report["device"] += ": this shows that the program runs, and nothing of a GPU"
        print("This shows that the program runs, and nothing of a GPU.")
    if args.all:
        report["tests"] = run_tests(args.tests)
        print(f"tests: {report['tests']}", flush=True)
        report["compare"], rows = run_comparison(args.variants, args.rounds, directory)
        report["figures"]["compare"] = {row.label: row.values for row in rows}
    for name, row in measured(args, bench, directory):
        if name not in report["figures"]:
            print(f"{TITLES[name]}:")
        report["figures"].setdefault(name, {})[row.label] = row.values
        print(text_of(row), flush=True)
    return report


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    """Print the report, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="all figures, the tests, both files")
    parser.add_argument("--device", default="cuda:0", help="the root device")
    parser.add_argument("--data-devices", help="such as cuda:0,cuda:1; by default the root device")
    parser.add_argument("--only", default="fetch,load,wait", help="of these, some")
    parser.add_argument("--mib", type=int, default=2048, help="bytes of rows, in MiB")
    parser.add_argument("--batch", type=int, default=512, help="rows of a training step")
    parser.add_argument("--width", type=int, default=64, help="channels of the network")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tests", nargs="*", default=[], help="by default all for these GPUs")
    parser.add_argument("--variants", default="all", help="as compare takes them")
    parser.add_argument("--json", type=Path, help="with --all by default gpu.json")
    parser.add_argument("--write", type=Path, help="with --all by default docs/tested.md")
    parser.add_argument("--tiny", action="store_true", help="sizes that show that it runs")
    args = parser.parse_args()
    if args.all:
        args.only = ",".join(FIGURES)
        args.json = args.json or Path("gpu.json")
        args.write = args.write or ROOT / "docs" / "tested.md"
    if args.tiny:
        args.mib, args.rounds, args.batch, args.width = 1, 1, 64, 4
    device = torch.device(args.device)
    if args.all and device.type == "cpu":
        parser.error("--all is for GPUs: give no --device cpu with it")
    if device.type != "cpu" and not torch.accelerator.is_available():
        sys.exit(
            f"--device {args.device}: there is no GPU here, and this program measures one. With"
            " --device cpu it runs all the same, and measures nothing of a GPU"
        )
    names = (args.data_devices or args.device).split(",")
    bench = Bench(device, [torch.device(name) for name in names], args.mib, args.rounds)
    with tempfile.TemporaryDirectory() as directory:
        report = report_of(args, bench, Path(directory))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.write is not None:
        write_table(args.write, markdown(report))
    if args.all and (report["tests"]["failures"] or report["tests"]["errors"]):
        sys.exit(f"tests failed: {report['tests']}")
    if args.all and not {"ok", "refused"}.issuperset(report["compare"].values()):
        sys.exit(f"not all variants trained the same: {report['compare']}")


if __name__ == "__main__":
    main()
