"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from lightning_memmap.compare import plots
from lightning_memmap.compare.against import MEASURES, Difference
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.report import Report
from lightning_memmap.compare.results import ArmResult
from lightning_memmap.placement import format_bytes

_CSS = """
:root { --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #fff; --tint: #f6f8fa;
  --good: #116329; --bad: #b4231a; --unsure: #7d4e00; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0 .6rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
.verdict { border-left: 6px solid; padding: .6rem .9rem; background: var(--tint);
  font-weight: 600; margin: .8rem 0; }
.good { color: var(--good); } .bad { color: var(--bad); } .unsure { color: var(--unsure); }
.verdict.good, .verdict.bad, .verdict.unsure { border-color: currentColor; }
ul.problems { margin: .4rem 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .55rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
.plots { display: grid; gap: 1.2rem; margin-top: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; max-width: 34rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .85rem; }
code { overflow-wrap: anywhere; background: var(--tint); padding: .1rem .3rem; }
dl { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: .2rem .9rem;
  font-size: .9rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  h2 { break-after: avoid; } table, figure { break-inside: avoid; }
  .scroll { overflow: visible; } .plots { grid-template-columns: 1fr 1fr; }
  th, td { padding: .15rem .3rem; }
}
"""


def render_html(report: Report) -> str:
    """The page. Needs matplotlib."""
    return "\n".join(_page(report))


def _page(report: Report) -> Iterator[str]:
    settings = report.settings
    title = f"Comparison of {', '.join(arm.arm for arm in report.arms)}"
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>"
    yield "<h1>Which strategy, and what does it cost?</h1>"
    yield (
        f"<p>{escape(str(report.model.get('model_class')))} on"
        f" {report.data.get('num_rows') or 0:,} rows,"
        f" {settings['global_batch']} rows a step, {settings['devices']}"
        f" {escape(settings['accelerator'])} devices. {settings['repeats']} timed runs of each"
        f" arm, {settings['steps']} steps each after {settings['warmup_steps']} of warm-up.</p>"
    )
    yield f'<p class="soft">{escape(report.created)}</p>'
    yield from _verdict(report)
    yield "<h2>Parity</h2>"
    yield from _parity(report)
    yield from _figures(
        (
            plots.draw_check_losses(report),
            "Dropout off, and the transform of evaluation in place of a random one.",
        ),
        (plots.draw_timed_losses(report), "As configured: what is random differs between arms."),
    )
    yield "<h2>Speed</h2>"
    yield from _speed(report)
    yield from _figures(
        (plots.draw_throughput(report), "Bar: median. Dots: runs. Line: lowest to highest."),
        (plots.draw_parts(report), "Means over steps, processes and runs."),
        (plots.draw_scaling(report), "Rows per device are the same at every number of devices."),
    )
    yield "<h2>Memory and movement</h2>"
    yield from _memory(report)
    yield from _figures(
        (plots.draw_state(report), "From the check runs, at the optimizer's second step."),
        (
            plots.draw_memory(report),
            "After the last step. Solid: pages of one process alone (orange: workers). Hatched: the"
            " shared pages of the process that has most of them. Of devices: the peak in the timed"
            " steps, allocated (blue) and reserved (grey).",
        ),
        (
            plots.draw_traces(report),
            "Two steps of the check runs on rank 0, from one allocation or release to the next."
            " Activations: all that operators return and that is none of the others.",
        ),
        (
            plots.draw_movement(report),
            "Solid: between devices or processes, the least a ring needs. Dashed: within one"
            " memory, between logical devices.",
        ),
    )
    yield from _missing(report)
    if report.against is not None:
        yield from _against(report.against)
    yield "<h2>Where and how</h2>"
    yield from _circumstances(report)
    yield "</main>\n</body>\n</html>"


def _verdict(report: Report) -> Iterator[str]:
    compared = [arm for arm in report.arms if arm.parity is not None]
    if not report.parity_held:
        wrong = [a.arm for a in compared if a.parity is not None and a.parity.held is False]
        yield _banner("bad", f"Parity does not hold: {', '.join(wrong)} differ from the reference.")
    elif report.exit_code in (0, 4) and len(compared) > 1:
        yield _banner("good", f"Parity holds: {len(compared)} arms train the same.")
    elif report.exit_code in (0, 4):
        yield _banner("unsure", "Only one arm could be checked.")
    else:
        yield _banner("unsure", "No difference was found, but not every arm could be judged.")
    problems = [(arm.arm, text) for arm in compared if arm.parity for text in arm.parity.problems]
    notes = [(arm.arm, text) for arm in compared if arm.parity for text in arm.parity.notes]
    if problems or notes:
        yield '<ul class="problems">'
        for name, text in problems:
            yield f'<li class="bad">{escape(name)}: {escape(text)}</li>'
        for name, text in notes:
            yield f'<li class="unsure">{escape(name)}: {escape(text)}</li>'
        yield "</ul>"
    if report.interrupted:
        yield _banner("unsure", "Interrupted: what was not finished is missing.")


def _banner(kind: str, text: str) -> str:
    return f'<p class="verdict {kind}" role="status">{escape(text)}</p>'


def _parity(report: Report) -> Iterator[str]:
    rows = []
    for arm in report.arms:
        parity = arm.parity
        if parity is None:
            continue
        words = {True: ("good", "equal"), False: ("bad", "differs"), None: ("unsure", "?")}
        kind, word = words[parity.held]
        rows.append(
            (
                _cell(arm.arm),
                f'<td class="{kind}"><strong>{word}</strong></td>',
                _cell(f"{parity.rows[0]} of {parity.rows[1]}", parity.rows[0] != parity.rows[1]),
                _cell("same bytes" if parity.same_content else "other bytes"),
                _difference(parity.loss_difference, parity.tolerance),
                _difference(parity.weight_difference, parity.tolerance),
                _cell(f"{parity.tolerance:.0e}"),
            )
        )
    names = ("arm", "", "rows", "batches", "losses", "weights", "within")
    yield from _table(names, rows)
    if report.reference:
        yield (
            f'<p class="soft">Reference: {escape(report.reference)}. Rows: steps that had the rows'
            " of their global batch, as the store has them. Losses: largest difference, relative to"
            " the largest loss. Weights: distance after the last step, relative to how far training"
            " moved them.</p>"
        )


def _difference(value: float | None, tolerance: float) -> str:
    if value is None:
        return _cell("-")
    return _cell("0" if value == 0 else f"{value:.1e}", not value <= tolerance)


def _speed(report: Report) -> Iterator[str]:
    rows, parts = [], []
    for arm in _costed(report):
        cost = arm.cost
        assert cost is not None
        rate = cost.samples_per_s
        rows.append(
            (
                _cell(arm.arm),
                _cell(f"{rate.median:,.0f}"),
                _cell(f"{rate.low:,.0f} to {rate.high:,.0f}"),
                _cell("-" if cost.ideal_share is None else f"{cost.ideal_share:.0%}"),
                _cell(f"{cost.step_s.median * 1e3:.2f}"),
                _cell(f"{cost.data_share.median:.0%}"),
                _cell(f"{cost.first_batch_s.median:.2f}"),
            )
        )
        parts.append(
            (_cell(arm.arm), *(_cell(f"{cost.parts_s[part] * 1e3:.2f}") for part in PARTS))
        )
    names = ("arm", "samples/s", "range", "of ideal", "step ms", "waits for data", "first batch s")
    yield from _table(names, rows)
    yield "<h3>Where a step goes: means in ms</h3>"
    yield from _table(("arm", *PARTS), parts)


def _memory(report: Report) -> Iterator[str]:
    arms = _costed(report)
    on_gpu = any(arm.cost is not None and arm.cost.device_peaks for arm in arms)
    has_energy = any(arm.cost is not None and arm.cost.joules_per_sample for arm in arms)
    rows = []
    for arm in arms:
        cost, holding = arm.cost, arm.holding
        assert cost is not None
        cells = [
            _cell(arm.arm),
            _cell(str(len(cost.processes))),
            _cell(format_bytes(int(cost.own_bytes.median))),
            _cell(format_bytes(int(cost.max_shared_bytes.median))),
            _cell(format_bytes(holding.state_bytes_per_device) if holding else "-"),
            _cell(format_bytes(holding.moved_bytes) if holding else "-"),
        ]
        peaks = cost.device_peaks.values()
        cells += [
            _cell(format_bytes(max(p[name] for p in peaks)) if peaks else "-")
            for name in (("allocated", "reserved") if on_gpu else ())
        ]
        if has_energy:
            joules = cost.joules_per_sample
            cells.append(_cell(f"{joules.median * 1e3:.2f}" if joules else "-"))
        rows.append(cells)
    names = ["arm", "processes", "own pages", "shared pages", "model state per device"]
    names += ["moved per step"] + (["device peak", "reserved"] if on_gpu else [])
    yield from _table([*names, "mJ per sample"] if has_energy else names, rows)


def _missing(report: Report) -> Iterator[str]:
    missing = [arm for arm in report.arms if arm.status != "ok"]
    if missing:
        words = {
            "unavailable": ("unsure", "cannot run here"),
            "refused": ("unsure", "refused"),
            "failed": ("bad", "failed"),
            "pending": ("unsure", "not finished"),
        }
        yield "<h2>Arms without a result</h2>"
        rows = []
        for arm in missing:
            kind, word = words[arm.status]
            reason = f'<td class="text">{escape(arm.reason)}</td>'
            rows.append((_cell(arm.arm), f'<td class="{kind}">{word}</td>', reason))
        yield from _table(("arm", "", "reason"), rows)


def _against(difference: Difference) -> Iterator[str]:
    titles = {measure.name: measure.title for measure in MEASURES}
    kinds = {"better": "good", "worse": "bad", "same": "", "unclear": "unsure"}
    yield f"<h2>Against {escape(difference.old)}</h2>"
    rows = [
        (
            _cell(change.arm),
            _cell(titles[change.measure]),
            f'<td class="{kinds[change.verdict]}"><strong>{change.verdict}</strong></td>',
            _cell(f"{change.ratio - 1:+.1%}"),
        )
        for change in difference.changes
    ]
    yield from _table(("arm", "figure", "", "change"), rows)
    if difference.warnings:
        text = "; ".join(difference.warnings)
        yield f'<p class="unsure">Not the same: {escape(text)}</p>'


def _circumstances(report: Report) -> Iterator[str]:
    environment = report.environment
    packages = environment.get("packages", {})
    devices = environment.get("devices", [])
    store_s = report.data.get("store_s")
    facts: Mapping[str, Any] = {
        "command": f"<code>{escape(report.command)}</code>",
        "processor": escape(
            f"{environment.get('processor')}, {environment.get('cores')} cores,"
            f" {format_bytes(environment.get('memory_bytes') or 0)}"
        ),
        "load before": escape(f"{environment.get('load_before', 0):.2f}"),
        "devices": escape(", ".join(d["name"] for d in devices) or "no GPU"),
        "system": escape(f"{environment.get('platform')}, Python {environment.get('python')}"),
        "packages": escape(", ".join(f"{k} {v}" for k, v in packages.items())),
        "store": escape(
            f"{report.data.get('store_path')}: {report.data.get('num_rows') or 0:,} rows,"
            f" {format_bytes(report.data.get('num_bytes') or 0)},"
            + (f" stored in {store_s:.2f} s" if store_s is not None else " was stored before")
        ),
        "model": escape(
            f"{report.model.get('num_parameters') or 0:,} parameters, precision"
            f" {report.settings['precision']}, seed {report.settings['seed']}"
        ),
        "not used of the config": escape(", ".join(report.left_out) or "-"),
    }
    yield "<dl>"
    for name, value in facts.items():
        yield f"<dt>{name}</dt><dd>{value}</dd>"
    yield "</dl>"
    rows = [(_cell(arm.arm), f'<td class="text">{escape(arm.description)}</td>')
            for arm in report.arms]  # fmt: skip
    yield "<h2>The arms</h2>"
    yield from _table(("arm", ""), rows)


def _costed(report: Report) -> list[ArmResult]:
    found = [arm for arm in report.arms if arm.cost is not None]
    return sorted(found, key=lambda arm: -(arm.cost.samples_per_s.median if arm.cost else 0.0))


def _cell(text: str, is_bad: bool = False) -> str:
    return f'<td class="bad">{escape(text)}</td>' if is_bad else f"<td>{escape(text)}</td>"


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{escape(name)}</th>" for name in names)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(row)}</tr>"
    yield "</tbody></table></div>"


def _figures(*drawn: tuple[str | None, str]) -> Iterator[str]:
    yield '<div class="plots">'
    for svg, caption in drawn:
        if svg is not None:
            yield f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
    yield "</div>"
