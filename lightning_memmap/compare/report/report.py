"""The report of a comparison: what is written as ``report.json``, and read back."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec

from lightning_memmap.compare.report.figures import SPEED
from lightning_memmap.compare.report.footprint import Footprint
from lightning_memmap.compare.report.parity import Parity
from lightning_memmap.compare.report.records import Count, DevicePeak, Size, Value

#: Goes up when a field changes its meaning or goes away. See docs/compare.md.
SCHEMA_VERSION = 3
_SCHEMA = "lightning_memmap.compare"
#: The largest report that is read. Most have some ten kilobytes beside their memory traces.
_MAX_BYTES = 2**26

Values = Annotated[tuple[Annotated[float, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
#: The loss of each step; None where it is not known or not finite.
Losses = tuple[float | None, ...]
Status = Literal["ok", "unavailable", "refused", "failed", "pending"]
Verdict = Literal["better", "same", "worse", "unclear"]


class Device(Value, frozen=True):
    """A CUDA device.

    Args:
        name: Its model.
        memory_bytes: Its memory.
    """

    name: str
    memory_bytes: Count


class Environment(Value, frozen=True):
    """Where a comparison ran.

    Args:
        python: Version of Python.
        platform: Operating system and architecture.
        packages: Version by name of the package; None for one that is not installed.
        processor: Model of the processor.
        cores: Cores that this process may use.
        memory_bytes: Memory of the machine.
        load_before: Average load of the last minute before the runs.
        omp_num_threads: The environment variable of that name; None where it is not set.
        cuda: Version of CUDA that torch was built with, if any.
        devices: The CUDA devices.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    processor: str
    cores: Count
    memory_bytes: Count
    load_before: float
    omp_num_threads: str | None
    cuda: str | None
    devices: tuple[Device, ...]


class Settings(Value, frozen=True):
    """The options of the comparison as they were used, and what followed from them.

    The options are those of `lightning_memmap.compare.run.plan.ComparisonOptions`, with the
    accelerator and the tolerance that were used in place of a default.

    Args:
        global_batch: Rows of a step.
        precision: The Trainer's precision, from the config.
        seed: The seed, from the config.
    """

    config: str
    variants: str
    devices: Count
    repeats: Count
    steps: Count
    warmup_steps: Count
    check_steps: Count
    scaling: str
    accelerator: str
    tolerance: float
    timeout_s: float
    out: str
    global_batch: Count
    precision: str
    seed: int


class Data(Value, frozen=True):
    """The training store, and how it is used.

    Args:
        data_class: Class of the data module, with its module.
        store_path: Directory of the store.
        num_rows: Rows of the store.
        num_shards: Shards of the store.
        row_bytes: Bytes of a row over all fields.
        num_bytes: Bytes of all rows.
        fields: Dtype and shape by name of the field.
        store_s: Seconds that it took to build the store; None where it was there already.
        check_store_s: Seconds that it took to recognise the store; None where it was built.
        steps_per_epoch: Steps of an epoch, without an incomplete last one.
        batch_size: Rows of a step per device.
        has_transform: Whether there is a training transform.
        transform_is_random: Whether it gives different results for the same rows.
        has_eval_transform: Whether there is an evaluation transform.
    """

    data_class: str
    store_path: str
    num_rows: Count
    num_shards: Count
    row_bytes: Size
    num_bytes: Size
    fields: dict[str, str]
    store_s: float | None
    check_store_s: float | None
    steps_per_epoch: Count
    batch_size: Count
    has_transform: bool
    transform_is_random: bool
    has_eval_transform: bool


class Model(Value, frozen=True):
    """The model.

    Args:
        model_class: Its class, with its module.
        configures_itself: Whether it overrides ``configure_model``.
        automatic_optimization: Whether the Trainer does the backward pass and the optimizer's step.
        num_parameters: Number of parameters, before any strategy wraps or shards the model.
        parameter_bytes: Bytes of these parameters.
        dropouts: Names of the classes of its dropout layers.
        batch_norms: Names of the classes of its batch norm layers.
    """

    model_class: str
    configures_itself: bool
    automatic_optimization: bool
    num_parameters: Size
    parameter_bytes: Size
    dropouts: tuple[str, ...]
    batch_norms: tuple[str, ...]


class Process(Value, frozen=True):
    """Memory of a process after a timed run, in bytes.

    Args:
        process: Its rank, or whose worker it is.
        rss: Bytes of all its pages.
        own: Bytes of pages that no other process has; None where that is not known.
        shared: Bytes of its other pages; None where that is not known.
    """

    process: str
    rss: Size
    own: Size | None
    shared: Size | None


class VariantResult(Value, frozen=True):
    """All that is known of a variant.

    Args:
        variant: Its name.
        strategy: Its strategy.
        loader: What supplied its rows: ``memmap``, ``workersN`` or ``ideal``.
        description: What it is, in one line.
        status: ``ok``; ``unavailable``: it cannot run on this machine; ``refused``: the strategy
            or the data said that it cannot do this; ``failed``; ``pending``: not finished.
        reason: Why it is not ``ok``.
        parity: None for a variant that is not compared, or did not get so far.
        footprint: From its check run.
        figures: Its known figures by key, with a value for each run; see `FIGURES`.
        processes: Its processes after the last timed run.
        device_peaks: By CUDA device, the highest peak of the timed runs.
        check_losses: The loss of each global batch of the check run.
        timed_losses: Those of the first timed run, with transform and dropout as configured.
        trace: Bytes by kind over time, on rank 0; see `lightning_memmap.callbacks.MemoryTrace`.
        logs: The logs of its runs, relative to the report.
    """

    variant: str
    strategy: str
    loader: str
    description: str
    status: Status
    reason: str = ""
    parity: Parity | None = None
    footprint: Footprint | None = None
    figures: dict[str, Values] = msgspec.field(default_factory=dict)
    processes: tuple[Process, ...] = ()
    device_peaks: dict[str, DevicePeak] = msgspec.field(default_factory=dict)
    check_losses: Losses = ()
    timed_losses: Losses = ()
    trace: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    logs: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Rows per second, the median of the runs; 0 where there were none."""
        return median(self.figures.get(SPEED, (0.0,)))


class ScalingPoint(Value, frozen=True):
    """Speed of a variant on one number of devices, with the same rows per device.

    Args:
        variant: Its name.
        devices: Devices that it used.
        global_batch: Rows of a step.
        samples_per_s: Rows per second in each run, over all devices.
        reason: Why there is no figure.
    """

    variant: str
    devices: Count
    global_batch: Count
    samples_per_s: tuple[float, ...] = ()
    reason: str = ""


class Change(Value, frozen=True):
    """How one figure of one variant changed.

    Args:
        variant: The variant.
        figure: Key of the figure.
        old: The median in the baseline.
        new: The median now.
        verdict: See `lightning_memmap.compare.report.regression.verdict_on`.
    """

    variant: str
    figure: str
    old: float
    new: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf")


class Regression(Value, frozen=True):
    """What changed since a baseline.

    Args:
        baseline: Path of the old report.
        changes: Of the variants that both reports have.
        only_baseline: Variants that only the baseline has figures of.
        only_new: Variants that only the new report has figures of.
        warnings: What else differs, so that figures may not be comparable.
    """

    baseline: str
    changes: tuple[Change, ...]
    only_baseline: tuple[str, ...]
    only_new: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_slower(self) -> bool:
        """Whether the speed of a variant became worse."""
        return any(each.figure == SPEED and each.verdict == "worse" for each in self.changes)


class Report(msgspec.Struct, frozen=True):
    """A comparison.

    Args:
        created: When it began, ISO 8601.
        command: The command line.
        environment: Machine and versions.
        settings: The options.
        data: The store.
        model: The model.
        reference: Name of the variant that the others are compared with; empty where none finished.
        variants: In the order in which they were asked for.
        scaling: Speed on several numbers of devices.
        left_out: Parts of the config that a comparison does not use.
        interrupted: Whether the user stopped it.
        regression: What changed since a baseline; None where none was given.
    """

    created: str
    command: str
    environment: Environment
    settings: Settings
    data: Data
    model: Model
    reference: str
    variants: tuple[VariantResult, ...]
    scaling: tuple[ScalingPoint, ...] = ()
    left_out: tuple[str, ...] = ()
    interrupted: bool = False
    regression: Regression | None = None

    @property
    def measured(self) -> list[VariantResult]:
        """The variants with figures, the fastest first."""
        return sorted((each for each in self.variants if each.figures), key=lambda each: -each.rate)

    @property
    def parity_holds(self) -> bool:
        """Whether no variant was found to differ."""
        return not any(each.parity and each.parity.holds is False for each in self.variants)

    @property
    def exit_code(self) -> int:
        """The exit code of the command.

        - 0: every variant that ran agrees.
        - 1: a variant differs.
        - 3: a variant failed or could not be compared, or nothing ran.
        - 4: all is well, but a variant is slower than in the baseline.
        - 130: the user interrupted.
        """
        if self.interrupted:
            return 130
        if not self.parity_holds:
            return 1
        ran = [each for each in self.variants if each.status == "ok"]
        is_open = any(each.parity and each.parity.holds is None for each in ran)
        if is_open or not ran or any(v.status in ("failed", "pending") for v in self.variants):
            return 3
        return 4 if self.regression is not None and self.regression.is_slower else 0

    def write(self, path: Path) -> None:
        """Write the report as JSON. The file is replaced as a whole.

        Args:
            path: The file.

        Raises:
            OSError: It cannot be written.
        """
        values: dict[str, Any] = {
            "schema": _SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "parity_holds": self.parity_holds,
            "exit_code": self.exit_code,
            **msgspec.structs.asdict(self),
        }
        partial = path.with_suffix(".partial")
        # JSON has no NaN and no infinity: msgspec writes null.
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1))
        partial.replace(path)


class _Header(msgspec.Struct):
    schema: Any = None
    schema_version: Any = None


def read_report(path: str | Path) -> Report:
    """Read a ``report.json``, which may come from anyone.

    Args:
        path: The file.

    Returns:
        The report, with the types and ranges of its values checked.

    Raises:
        ValueError: The file is not a report, is one of another version, or has a value that no
            comparison would have written.
        OSError: It cannot be read.
    """
    path = Path(path)
    # Reading a pipe could wait forever.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: name the report.json of a comparison")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is larger than any report of a comparison")
    text = path.read_bytes()
    try:
        header = msgspec.json.decode(text, type=_Header)
    except msgspec.ValidationError:
        header = _Header()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if header.schema != _SCHEMA:
        raise ValueError(f"{path} is not the report of a comparison")
    if header.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {header.schema_version!r:.50}, and this version of the"
            f" package reads {SCHEMA_VERSION}: run the comparison again"
        )
    try:
        return msgspec.json.decode(text, type=Report)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path} is not a whole report, run the comparison again: {error!s:.300}"
        ) from None
