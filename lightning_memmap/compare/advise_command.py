"""``lightning-memmap advise``."""

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from lightning_memmap.arguments import (
    BriefParser,
    imports_for_pages,
    print_error,
    refuse_several_configs,
)
from lightning_memmap.compare.advise.predict import (
    USABLE_SHARE,
    Prediction,
    predict,
    recommend,
)
from lightning_memmap.compare.advise.question import Question
from lightning_memmap.compare.advise.show import (
    described,
    error_table,
    fastest_measured,
    prediction_table,
)
from lightning_memmap.compare.render.image_tables import image_tables
from lightning_memmap.compare.report.report import Report, read_report
from lightning_memmap.compare.run.comparison import Comparison
from lightning_memmap.compare.run.plan import ComparisonOptions
from lightning_memmap.costs import Cluster, Workload
from lightning_memmap.errors import MemmapError
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.recovery import is_store, stores_within
from lightning_memmap.tables import Cell, Table, print_table

_DESCRIPTION = """Predict which strategy is right for a model, its data and some devices: what fits,
what moves in a step, about how long a step takes. The model is measured: by the variant "auto" or
"memmap_superbatch" of a finished comparison (--report), or by running "auto" of a config now
(--config). Without --devices the answer is for this machine, and is compared with what was
measured."""


def advise_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(prog="lightning-memmap advise", description=_DESCRIPTION)
    parser.add_class_arguments(Question, as_group=False)
    return parser


def advise(args: list[str]) -> int:
    """Run the command with these arguments.

    Args:
        args: Arguments of the command line, after ``lightning-memmap advise``.

    Returns:
        The exit code: 0 where a strategy fits, 1 where none does, 2 for a wrong argument.

    Raises:
        SystemExit: An argument is unknown or has the wrong type (code 2), or help was asked for
            (0).
    """
    given = advise_parser().parse_args(args).as_dict()
    console = Console()
    try:
        refuse_several_configs(args)
        question = Question(**given)
        for option, path in (("json", question.json), ("html", question.html)):
            if path is not None:
                _check_writable(option, Path(path))
        report = _report(question, console)
        work, cluster = question.workload(report), question.cluster(report)
        rows = question.rows_per_device or report.data.batch_size
        try:
            predictions = predict(work, cluster, rows)
        except ArithmeticError as error:
            raise ValueError(f"the numbers are too large to predict anything: {error}") from error
    except (MemmapError, OSError, ValueError) as error:
        print_error(error)
        return 2
    chosen, reason = recommend(predictions)
    name = chosen.strategy if chosen is not None else None
    about = described(work, cluster)
    tables = [prediction_table(predictions, name, cluster)]
    measured = []
    if question.is_as_measured:
        tables.append(error_table(predictions, report))
        measured.append(fastest_measured(report))
    tables += _images(report, cluster)
    for line in about:
        console.print(line, highlight=False)
    for table in tables:
        print_table(table, console)
    console.print(f"\n[bold]{name or 'none'}[/]: {reason}", highlight=False)
    for line in measured:
        console.print(line, highlight=False)
    if question.html is not None:
        from lightning_memmap.pages import write_tables

        verdict = Cell(f"{name or 'none'}: {reason}", "good" if name else "bad")
        lines = [verdict, *map(Cell, measured), *(Cell(line, "soft") for line in about)]
        write_tables(Path(question.html), "Which strategy is right?", lines, tables)
    if question.json is not None:
        answer = _answer(work, cluster, predictions) | {"recommended": name, "reason": reason}
        Path(question.json).write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1))
    return 0 if chosen is not None else 1


def _answer(work: Workload, cluster: Cluster, predictions: list[Prediction]) -> dict[str, Any]:
    """What was predicted, as JSON values.

    JSON has no infinity: null says that any number of devices compute at full speed.
    """
    found = [asdict(each) | {"samples_per_s": each.samples_per_s} for each in predictions]
    return {"workload": asdict(work), "cluster": asdict(cluster), "predictions": found}


def _check_writable(option: str, path: Path) -> None:
    """Check that an answer can be written there, before minutes of measuring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={str(path)!r} cannot be written: name a file of your own")
    if option == "html":
        with imports_for_pages():
            import jinja2  # noqa: F401


def _report(question: Question, console: Console) -> Report:
    if (question.report is None) == (question.config is None):
        raise ValueError("give --report, the report.json of a comparison, or --config to measure")
    if question.report is not None:
        return read_report(question.report)
    options = ComparisonOptions(
        config=question.config or "", variants="auto", repeats=1, out=question.out,
        devices=question.devices or 2, steps=30, accelerator="auto",
    )  # fmt: skip
    report = Comparison(options, console).run()
    report.write(Path(question.out) / "report.json")
    return report


def _images(report: Report, cluster: Cluster) -> list[Table]:
    """Encoded images against decoded ones, where the comparison's stores are on this machine."""
    path, stores = Path(report.data.store_path), dict[str, Store]()
    # A comparison may be looked at long after its stores are gone, or were damaged.
    with suppress(MemmapError):
        names = [""] if is_store(path) else stores_within(path)
        stores = {name or path.name: open_store(path / name) for name in names}
    return image_tables(stores, int(cluster.memory_bytes * USABLE_SHARE))
