"""The page: one self-contained file that makes no requests.

Its Content-Security-Policy allows only its own two scripts and its style, by their digests. Without
scripts it shows static drawings, tables and all texts.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runner.system.error import ConfigError
from runner.system.version import __version__
from runner.tools.report import incident_section, sections
from runner.tools.report.drawing import data_of, script_json
from runner.tools.report.episode import episodes
from runner.tools.report.markup import Html, join, tag, text
from runner.tools.report.run_reader import RunReader, RunStatus

# uPlot 1.6.32, unmodified: https://github.com/leeoniya/uPlot, MIT.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
_ASSETS = Path(__file__).parent / "assets"
# Columns of all runs together, at least: up to twice as many are kept. A row takes about 60 bytes.
_COLUMNS = 768
_LEAST_COLUMNS = 128
MOST_RUNS = 16
_DRAWING_STEPS = 500
_AGES_SECONDS = 10
_LINKS = {"ring": "checkpoints", "position": "by position", "source": "by source"}


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


def read_runs(
    outs: Sequence[Path],
    *,
    on_progress: Callable[[Path, int, int], None] = lambda out, done, total: None,
) -> list[RunReader]:
    """Read runs to their current end.

    Args:
        on_progress: called now and then with a run, and its bytes: read, and in all.

    Raises:
        ConfigError: there is no run in one of them.
        OSError: a file cannot be read.
    """
    if len(outs) > MOST_RUNS:
        raise ConfigError(f"{len(outs)} runs: at most {MOST_RUNS} are shown side by side")
    readers = []
    for out in outs:
        columns = max(_LEAST_COLUMNS, _COLUMNS // len(outs))
        run = RunReader(out, columns=columns)
        for count, _ in enumerate(run.iter_update()):
            if count % 4096 == 0:
                on_progress(out, *run.read_bytes)
        readers.append(run)
    return readers


def page(runs: Sequence[RunReader], *, version: str = "", has_list: bool = False) -> str:
    """The whole document.

    Args:
        version: of a live page, what :meth:`runner.tools.report.live_state.Live.follow` takes.
        has_list: whether it is one page of those of a folder's runs.
    """
    names = [_name(run.run_dir.out, runs) for run in runs]
    by_name = dict(zip(names, runs, strict=True))
    minutes = [run.settings().get("track.report_minutes") for run in runs]
    data: dict[str, Any] = {
        "live": bool(version),
        "version": version,
        "made": runs[0].clock(),
        # A page that is written while its run goes on is older only if the run is dead.
        "stale": 120 * max([5, *(one for one in minutes if isinstance(one, int | float))]),
        "runs": [data_of(run) for run in runs],
    }
    parts = [tag("article", _article(run, place)) for place, run in enumerate(runs)]
    if len(runs) > 1:
        data["compare"] = sections.comparison_data(by_name)
        parts.insert(0, sections.comparison(by_name))
    return document(title_of(runs), parts, data, is_live=bool(version), has_list=has_list)


def document(
    title: str,
    parts: Sequence[Html],
    data: Mapping[str, Any],
    *,
    is_live: bool,
    has_list: bool = False,
) -> str:
    """A page of these parts, with what its script needs."""
    style = asset("uPlot.min.css") + asset("page.css")
    licence = asset("uPlot.LICENSE").strip()
    library = f"/* uPlot 1.6.32\n{licence}\n*/\n{asset('uPlot.iife.min.js')}"
    script = asset("page.js")
    made_at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime())
    footer = (
        f"Made {made_at} by holdfast {__version__} from the files of the run. Curves: uPlot (MIT)."
    )
    csp = policy(style, [library, script], is_live=is_live)
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{text(csp)}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<meta name="referrer" content="no-referrer">'),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", "holdfast", cls="brand"),
            tag("a", "all runs", href="/") if has_list else None,
            tag("p", cls="live", role="status", hidden=True),
        ),
        tag("main", *parts),
        tag("footer", footer),
        tag("script", Html(script_json(data)), type="application/json", id="data"),
        tag("script", Html(library)),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def waiting(words: str) -> str:
    """A page that says why there is none yet, and asks again by itself."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta http-equiv="refresh" content="1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"{words} - holdfast"),
    )
    body = tag("body", tag("main", tag("h1", "holdfast"), tag("p", words, role="status")))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def title_of(runs: Sequence[RunReader]) -> str:
    """The page's title: the status first, which is all that a narrow tab shows."""
    status = f"{runs[0].status()} - " if len(runs) == 1 else ""
    names = ", ".join(_name(run.run_dir.out, runs) for run in runs)
    return f"{status}{names} - holdfast"


def _name(out: Path, runs: Sequence[RunReader]) -> str:
    """The run's name: that of its directory, or the whole path where several have one name."""
    is_shared = sum(run.run_dir.out.name == out.name for run in runs) > 1
    return str(out) if is_shared else out.name or str(out.resolve())


def _article(run: RunReader, place: int) -> Html:
    """All sections of one run, and links to them."""
    made = {name: make() for name, (_, make) in parts_of(run, place).items()}
    ids = {name: f"{name}-{place}" if place else name for name in made}
    links = (
        tag("a", _LINKS.get(name, name), href=f"#{ids[name]}", hidden=not part, data_of=name)
        for name, part in made.items()
        if name != "head"
    )
    parts = [
        tag("div", part, cls="part", id=ids[name], data_part=name) for name, part in made.items()
    ]
    return join([parts[0], tag("nav", *links, aria_label="Sections", cls="contents"), *parts[1:]])


def parts_of(run: RunReader, place: int) -> dict[str, tuple[str, Callable[[], Html | str]]]:
    """The sections in order: a key that changes with the content, and a function to make it.

    A section without data is empty.
    """
    now, out = RunStatus(run), run.run_dir.out
    title = tag("h2", out.name or str(out.resolve()))
    # Drawings are large, so they are not updated at every step.
    key = f"{run.generation} {len(run.fold.attempts) // _DRAWING_STEPS}"
    side_key = f"{run.generation} {run.fold.num_side_lines}"
    found = episodes(run)
    sources_key = f"{key} {run.fold.sources.losses.num_inspections}"
    # Checkpoints, and at times their ages.
    states = ",".join(f"{one.serial}{one.state.value}" for one in run.checkpoints())
    ring_key = f"{side_key} {key} {states} {int(run.clock()) // _AGES_SECONDS} {run.is_alive()}"
    made: dict[str, tuple[str | None, Callable[[], Html | None]]] = {
        "head": (None, lambda: join([title, sections.head(run, now, found, place)])),
        "curves": (f"{key} {sections.legend_of(run)}", lambda: sections.curves(run, found, place)),
        "incidents": (None, lambda: incident_section.incidents(run, found, place)),
        "time": (None, lambda: sections.where_time_went(run, now)),
        "warnings": (None, lambda: incident_section.warnings(run)),
        "layers": (side_key, lambda: sections.layers(run)),
        "position": (side_key, lambda: sections.position(run)),
        "source": (sources_key, lambda: sections.source(run)),
        "metrics": (key, lambda: sections.own_metrics(run)),
        "stream": (None, lambda: sections.stream(run)),
        "ranks": (side_key, lambda: sections.ranks(run)),
        "ring": (ring_key, lambda: sections.ring(run)),
        "settings": (None, lambda: sections.settings(run)),
    }
    return {name: _part(key, make) for name, (key, make) in made.items()}


def _part(key: str | None, make: Callable[[], Html | None]) -> tuple[str, Callable[[], Html | str]]:
    """A part; one without a key is cheap, and its text is the key."""
    if key is not None:
        return key, lambda: make() or ""
    part = make() or ""
    return part, lambda: part


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
