"""The page: one self-contained file that makes no requests.

Its Content-Security-Policy allows only its own two scripts and its style, by their digests. Without
scripts it shows static drawings, tables and all texts.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runner.system.error import ConfigError
from runner.system.version import __version__
from runner.tools.report import incident_section, internals, ring_section, section
from runner.tools.report.chart_data import data_of, script_json
from runner.tools.report.compare import comparison, comparison_data
from runner.tools.report.markup import Html, join, tag, void
from runner.tools.report.run_reader import RunReader
from runner.tools.report.run_status import run_status

# uPlot 1.6.32, unmodified: https://github.com/leeoniya/uPlot, MIT.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
_ASSETS = Path(__file__).parent / "assets"
# Columns of all runs together; a row takes about 60 bytes.
_COLUMNS = 1024
_LEAST_COLUMNS = 128
MOST_RUNS = 16
_DRAWING_STEPS = 500
_AGES_SECONDS = 10
_ORDER = (
    "head", "time", "curves", "warnings", "incidents", "layers", "position", "source", "stream",
    "ranks", "ring", "settings",
)  # fmt: skip


@cache
def asset(name: str) -> str:
    """The text of an asset of the page.

    Raises:
        ConfigError: a vendored file was modified.
    """
    data = (_ASSETS / name).read_bytes()
    wanted = VENDORED.get(name)
    if wanted is not None and hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(f"{_ASSETS / name}: is not the vendored file; reinstall the package")
    return data.decode()


def columns_for(num_runs: int) -> int:
    """How many columns each of several runs is drawn with."""
    return max(_LEAST_COLUMNS, _COLUMNS // max(1, num_runs))


def read_runs(
    outs: Sequence[Path],
    *,
    on_progress: Callable[[Path, int, int], None] = lambda out, done, total: None,
    clock: Callable[[], float] = time.time,
) -> list[RunReader]:
    """Read runs to their current end.

    Args:
        on_progress: called now and then with a run, and its bytes of metrics: read, and in all.

    Raises:
        ConfigError: there is no run in one of them.
        OSError: a file cannot be read.
    """
    if len(outs) > MOST_RUNS:
        raise ConfigError(f"{len(outs)} runs: at most {MOST_RUNS} are shown side by side")
    readers = []
    for out in outs:
        run = RunReader(out, columns=columns_for(len(outs)), clock=clock)
        for count, _ in enumerate(run.iter_update()):
            if count % 4096 == 0:
                on_progress(out, *run.read_bytes)
        readers.append(run)
    return readers


def page(runs: Sequence[RunReader], *, is_live: bool = False) -> str:
    """The whole document."""
    title = ", ".join(name_of(run) for run in runs)
    style = asset("uPlot.min.css") + asset("page.css")
    licence = asset("uPlot.LICENSE").strip()
    library = f"/* uPlot 1.6.32\n{licence}\n*/\n{asset('uPlot.iife.min.js')}"
    script = asset("page.js")
    data = script_json(_data(runs, is_live=is_live))
    made_at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(float(runs[0].clock())))
    footer = (
        f"Made {made_at} by holdfast {__version__} from the files of the run. Curves: uPlot (MIT)."
    )
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void(
            "meta",
            http_equiv="Content-Security-Policy",
            content=policy(style, [library, script], is_live=is_live),
        ),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        void("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} - holdfast"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("header", tag("p", "holdfast", cls="brand"), tag("p", cls="live", hidden=True)),
        tag("main", main(runs)),
        tag("footer", footer),
        tag("script", Html(data), type="application/json", id="data"),
        tag("script", Html(library)),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def main(runs: Sequence[RunReader]) -> Html:
    """The part of the page that depends on the data."""
    parts = [tag("article", run_sections(run, number)) for number, run in enumerate(runs)]
    if len(runs) > 1:
        parts.insert(0, comparison(runs))
    return join(parts)


def run_sections(run: RunReader, number: int) -> Html:
    """All sections of one run."""
    return join(
        tag("div", markup(), cls="part", data_part=name)
        for name, _, markup in parts_of(run, number)
    )


def parts_of(run: RunReader, number: int) -> list[tuple[str, str, Callable[[], Html]]]:
    """The sections in order: name, a key that changes with the content, and a function to make it.

    A section without data is empty.
    """
    now = run_status(run)
    eager: list[tuple[str, Html | None]] = [
        ("head", join([tag("h2", name_of(run)), section.head(run, now)])),
        ("time", section.where_time_went(run, now)),
        ("warnings", incident_section.warnings(run)),
        ("incidents", incident_section.incidents(run)),
        ("stream", section.stream(run)),
        ("settings", section.settings(run)),
    ]
    parts: dict[str, tuple[str, str, Callable[[], Html]]] = {
        name: (name, part or Html(""), _always(part or Html(""))) for name, part in eager
    }
    # Drawings are large, so they are not updated at every step.
    key = f"{run.generation} {len(run.fold.attempts) // _DRAWING_STEPS}"
    side_key = f"{run.generation} {run.sides.version}"
    lazy: list[tuple[str, str, Callable[[], Html | None]]] = [
        ("curves", f"{key} {section.legend_of(run)}", lambda: section.curves(run, number)),
        ("layers", side_key, lambda: internals.layers(run)),
        ("position", side_key, lambda: internals.position(run)),
        (
            "source",
            f"{key} {run.fold.sources.losses.num_inspections}",
            lambda: internals.source(run),
        ),
        ("ranks", side_key, lambda: internals.ranks(run)),
        ("ring", f"{side_key} {key} {_ring_key(run)}", lambda: ring_section.ring(run)),
    ]
    parts |= {name: (name, state, _or_empty(make)) for name, state, make in lazy}
    return [parts[name] for name in _ORDER]


def _always(part: Html) -> Callable[[], Html]:
    return lambda: part


def _or_empty(make: Callable[[], Html | None]) -> Callable[[], Html]:
    return lambda: make() or Html("")


def _ring_key(run: RunReader) -> str:
    """A key that changes with the checkpoints, and regularly because their ages are shown."""
    states = ",".join(f"{one.serial}{one.state.value}" for one in run.checkpoints())
    return f"{states} {int(run.clock()) // _AGES_SECONDS} {run.is_alive()}"


def name_of(run: RunReader) -> str:
    """The run's name: that of its directory."""
    out = run.run_dir.out
    return out.name or str(out.resolve())


def policy(style: str, scripts: Sequence[str], *, is_live: bool) -> str:
    """The Content-Security-Policy of a page with exactly this style and these scripts."""
    allowed = " ".join(f"'sha256-{_digest(one)}'" for one in scripts)
    parts = [
        "default-src 'none'",
        f"script-src {allowed}",
        f"style-src 'sha256-{_digest(style)}'",
        "img-src data:",  # browsers use such images to print or drag an element
        *(["connect-src 'self'"] if is_live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(parts)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(runs: Sequence[RunReader], *, is_live: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"live": is_live, "runs": [data_of(run) for run in runs]}
    if len(runs) > 1:
        data["compare"] = comparison_data(runs, [name_of(run) for run in runs])
    return data
