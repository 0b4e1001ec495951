"""The page of a report in a browser: what a person sees of it, and what it never does."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runner.__main__ import main
from tests.browser.conftest import Watched
from tests.made_run import Made

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"
TROUBLED = Made(
    steps=400,
    spike_at=200,
    bad_at=(100, 150, 151, 152),
    back_at=152,
    names=("book.txt bytes 0-64", HOSTILE),
    reason=f"loss nan {HOSTILE}",
    warnings=(f"rank 1 is slow {HOSTILE}",),
)


LAYERS = ("embedding", *(f"blocks.{number}" for number in range(12)), HOSTILE)
INSIDE = Made(
    steps=400,
    redo_at=(150,),
    layers=LAYERS,
    hot=("blocks.7", 220),
    sources=("web", HOSTILE),
    slow_rank=5,
    world_size=8,
    reading=f"a longer warm-up {HOSTILE}",
    excerpt=f"once upon a time {HOSTILE}",
)


def report(folder: Path, *made: Made) -> Path:
    """The page of made runs."""
    outs = [one.write(folder / f"run-{place}") for place, one in enumerate(made)]
    target = folder / "page.html"
    assert main(["report", *map(str, outs), "-o", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("report"), TROUBLED)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("inside"), INSIDE)


def picture(page: Any, curve: str) -> np.ndarray:
    """A chart's plot as pixels, its axes left out."""
    return pixels_of(page, f"figure[data-curve={curve}] .u-over")


def pixels_of(page: Any, what: str) -> np.ndarray:
    inner = page.locator(what)
    inner.scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    return np.asarray(Image.open(io.BytesIO(inner.screenshot())).convert("RGB")).astype(int)


def column_of(page: Any, curve: str, step: int) -> int:
    """Where a step that was tried once lies, in pixels from the plot's left."""
    return int(
        page.evaluate(
            """([curve, step]) => {
                const chart = document.querySelector(`figure[data-curve=${curve}]`).chart;
                const data = JSON.parse(document.getElementById('data').textContent).runs[0].rows;
                let at = 0, seen = 0;
                data.step.some((one, place) => {
                    at += one; seen += data.attempt[place]; return at === step; });
                return chart.valToPos(seen, 'x');
            }""",
            [curve, step],
        )
    )


def bluish(pixels: np.ndarray) -> np.ndarray:
    """Pixels of the curve's own colour, in either scheme."""
    red, _, blue = (pixels[..., at] for at in range(3))
    return blue - red > 60


def test_it_asks_nobody_and_complains_of_nothing(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    page.locator("figure.chart canvas").first.wait_for()
    page.locator("text=All 5 settings").click()
    assert watched.requests == [troubled.as_uri()]
    assert watched.complaints == []
    assert page.locator("figure.chart.drawn").count() == 4


def test_a_spike_of_one_step_is_seen_at_its_place(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    upper = bluish(picture(page, "loss"))[:40]
    at = column_of(page, "loss", 200)
    assert upper[:, at - 4 : at + 5].any(), "the line goes up to the edge"
    calm = np.delete(upper, np.s_[max(0, at - 12) : at + 13], axis=1)[:, 120:]
    assert not calm.any(), "and nowhere else behind the beginning"


def test_signs_of_one_trouble_are_one_from_afar(watched: Watched, tmp_path: Path) -> None:
    made = Made(steps=4000, redo_at=range(2000, 2008), bad_at=(1000, 1001, 3000))
    page = watched.open(report(tmp_path, made))
    count = """async ([from, to]) => {
        const pen = CanvasRenderingContext2D.prototype, { arc, stroke, clearRect } = pen;
        const chart = document.querySelector('figure[data-curve=loss]').chart;
        let arrows = 0, crosses = 0, draws = 0;
        pen.clearRect = function (...told) {
            draws += this === chart.ctx;
            return clearRect.apply(this, told);
        };
        pen.arc = function (...told) {
            arrows += this === chart.ctx && told[4] < 6; // dots are whole
            return arc.apply(this, told);
        };
        pen.stroke = function (...told) {
            crosses += this === chart.ctx && this.lineWidth === 2 && this.strokeStyle === '#b3261e';
            return stroke.apply(this, told);
        };
        chart.setScale('x', { min: from, max: to });
        await new Promise((done) => setTimeout(done, 100));
        Object.assign(pen, { arc, stroke, clearRect });
        return [arrows / draws, crosses / 2 / draws];
    }"""
    assert page.evaluate(count, [0, 4010]) == [1, 2]
    assert page.evaluate(count, [1990, 2030]) == [8, 0]
    assert page.evaluate(count, [990, 1010]) == [0, 2]


def test_pointing_at_it_tells_its_numbers(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    at = column_of(page, "loss", 200)
    page.hover("figure[data-curve=loss] .u-over", position={"x": at, "y": 60})
    words = page.locator(".readout").inner_text()
    assert words.startswith("step 200 ·"), words
    assert "loss 21." in words or "loss 20." in words, words
    assert "held-out 2.1 (step 200)" in words


def test_a_click_on_an_incident_zooms_to_it(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    whole = page.evaluate("document.querySelector('figure.chart').chart.scales.x.max")
    page.locator("#incident-2 summary").first.click()
    page.locator("#incident-2 button.zoom").click()
    low, high = page.evaluate(
        "(({min, max}) => [min, max])(document.querySelector('figure.chart').chart.scales.x)"
    )
    assert high - low < whole / 3 and low < 151 < high
    ranges = page.evaluate(
        "[...document.querySelectorAll('figure.chart')].map((f) => f.chart.scales.x.min)"
    )
    assert len(set(ranges)) == 1, "all charts show the same steps"
    page.locator(".readout", has_text="step 150 ·").wait_for()
    labels = "({axes}) => axes[1]._values.filter((one) => one !== null)"
    for factor in (1, 0.02):
        page.evaluate(
            "([at, half]) => document.querySelector('figure.chart').chart.setScale("
            "'x', {min: at - half, max: at + half})",
            [(low + high) / 2, factor * (high - low) / 2],
        )
        page.wait_for_timeout(50)
        for curve in ("loss", "grad_norm", "lr", "tokens_per_second"):
            drawn = f"document.querySelector('figure[data-curve={curve}]').chart"
            told = page.evaluate(f"({labels})({drawn})")
            assert len(told) == len(set(told)) > 1, (curve, told)
            widths = page.evaluate(
                "(words) => { const pen = document.createElement('canvas').getContext('2d');"
                "pen.font = '12px system-ui, sans-serif';"
                "return words.map((one) => pen.measureText(one).width); }",
                told,
            )
            assert max(widths) < 58, (curve, told)
    page.keyboard.press("0")
    assert page.evaluate("document.querySelector('figure.chart').chart.scales.x.max") == whole


@pytest.mark.parametrize(
    "watched",
    [{"viewport": {"width": 1440, "height": 900}}, {"viewport": {"width": 360, "height": 740}}],
    indirect=True,
)
def test_one_screen_says_how_it_is_what_happened_and_what_to_do(
    watched: Watched, tmp_path: Path
) -> None:
    made = Made(steps=400, bad_at=(100, 200), status="halted", redo_at=(399,))
    page = watched.open(report(tmp_path, made))
    page.locator("figure.chart.drawn canvas").last.wait_for()
    words = page.locator(".state").inner_text()
    assert words.upper().startswith("■ HALTED AS OF 20")
    assert "Incident 3: Bad data at step 399, rank 1 on node-1: 1 sample stands out" in words
    assert "Done: step computed again. Recovered: clean since step 399" in words
    assert "To do: The run has ended. Remove the cause" in words
    assert "holdfast launch --nproc 2 steps=400 'data.path=a b'" in words
    height = page.viewport_size["height"]
    assert page.locator("figure[data-curve=loss] .uplot").bounding_box()["y"] < height - 150
    for what in (".status", ".command button", ".pin >> nth=0"):
        box = page.locator(what).bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] <= height, what
    page.locator(".command button").click()
    page.locator(".command button", has_text=re.compile("copied|Ctrl-C")).wait_for()
    chosen = page.evaluate("getSelection().toString()")
    assert chosen == page.locator(".command code").inner_text()
    assert watched.complaints == []


def test_incidents_are_lines_newest_first_that_open(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    lines = page.locator(".incident .line")
    told = [text.split() for text in lines.all_inner_texts()]
    assert [words[0] for words in told] == ["2", "1"]
    assert "3 steps discarded, rollback" in lines.first.inner_text()
    assert lines.first.inner_text().endswith("since step 143")
    heights = lines.evaluate_all("(all) => all.map((one) => one.clientHeight)")
    assert max(heights) < 30, "one line each"
    card = page.locator("#incident-2 dl")
    assert not card.is_visible()
    lines.first.click()
    assert card.is_visible() and "loss nan <img" in card.inner_text()
    page.locator(".filter select").select_option("rollback")
    assert page.locator("#incident-2").is_visible() and not page.locator("#incident-1").is_visible()
    page.locator(".pin", has_text="1").hover()
    assert "1: A bad step at step 100, rank 1: loss nan" in page.locator(
        ".pin >> nth=0"
    ).get_attribute("title")


def test_an_address_opens_an_incident_or_a_step(watched: Watched, troubled: Path) -> None:
    span = "(({min, max}) => [min, max])(document.querySelector('figure.chart').chart.scales.x)"
    page = watched.open(f"{troubled.as_uri()}#incident=2")
    page.locator("#incident-2 dl").wait_for()
    box, height = page.locator("#incident-2").bounding_box(), page.viewport_size["height"]
    assert box["y"] >= 0 and box["y"] + box["height"] <= height, "it is in view"
    low, high = page.evaluate(span)
    assert 100 < low < 151 < high < 200
    page.locator(".readout", has_text="step 150 ·").wait_for()
    page.locator(".state a").click()
    page.locator(".readout", has_text="step 150 ·").wait_for()
    page.evaluate("location.hash = '#step=300'")
    page.locator(".readout", has_text="step 300 ·").wait_for()
    assert page.locator("#incident-1 dl").is_hidden()
    assert watched.complaints == []


@pytest.mark.parametrize("watched", [{"viewport": {"width": 1440, "height": 900}}], indirect=True)
def test_many_incidents_are_a_page_of_six_screens(watched: Watched, tmp_path: Path) -> None:
    bad = tuple(range(40, 12_001, 40))
    page = watched.open(report(tmp_path, replace(INSIDE, steps=12_000, bad_at=bad, redo_at=())))
    assert page.locator(".incident").count() == 300
    screens = page.evaluate("document.documentElement.scrollHeight") / 900
    assert screens <= 6
    page.locator(".older summary", has_text="288 older").click()
    assert page.locator("#incident-3").is_visible()


def test_the_keyboard_moves_the_cursor_and_zooms(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    page.locator("figure[data-curve=loss]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    first = page.locator(".readout").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".readout").inner_text() != first and first.startswith("step ")
    before = page.evaluate("document.querySelector('figure.chart').chart.scales.x.max")
    page.keyboard.press("+")
    assert page.evaluate("document.querySelector('figure.chart').chart.scales.x.max") < before


@pytest.mark.parametrize(
    "watched", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True
)
def test_axe_finds_nothing_serious(watched: Watched, inside: Path, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="not installed")
    compared = report(tmp_path / "both", Made(steps=60), Made(steps=80))
    halted = report(tmp_path / "halted", replace(TROUBLED, status="halted"))
    for path in (inside, compared, halted):
        page = watched.open(path)
        page.locator("canvas").first.wait_for()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        found = axe.Axe().run(page).response["violations"]
        grave = [(one["id"], one["nodes"][0]["html"][:200]) for one in found]
        assert not [one for one in found if one["impact"] in ("serious", "critical")], grave
        assert page.locator(".readout[aria-live]").count() > 0


def test_hostile_names_stay_text(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    page.locator("#incident-2 summary").first.click()
    page.locator("#incident-2 summary", has_text="suspected").click()
    assert page.locator("#incident-2 details li", has_text="onerror").inner_text() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3, "data, the library, the page's own"
    assert watched.complaints == []


@pytest.mark.parametrize(
    "watched", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True
)
def test_both_colour_schemes_can_be_read(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    for what in (".state", ".incident dt", ".note", ".readout", "td", ".tiles dt"):
        ink, paper = page.evaluate(
            """(what) => {
                const one = document.querySelector(what);
                const numbers = (c) => c.match(/[0-9.]+/g).map(Number);
                let under = one, paper = [0, 0, 0, 0];
                while (under && paper[3] === 0) {
                    const found = numbers(getComputedStyle(under).backgroundColor);
                    paper = found.length === 3 ? [...found, 1] : found;
                    under = under.parentElement;
                }
                return [numbers(getComputedStyle(one).color), paper];
            }""",
            what,
        )
        assert contrast(ink, paper) >= 4.5, (what, ink, paper)
    assert bluish(picture(page, "loss")).sum() > 300


def contrast(one: list[float], other: list[float]) -> float:
    """As WCAG 2 defines it; 4.5 is enough for text."""
    lights = sorted(luminance(colour[:3]) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: list[float]) -> float:
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("watched", [{"viewport": {"width": 360, "height": 740}}], indirect=True)
def test_a_narrow_screen_needs_no_sideways_scrolling(
    watched: Watched, troubled: Path, inside: Path
) -> None:
    page = watched.open(inside)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    box = page.locator("figure.heat .cells").first.bounding_box()
    assert box["height"] > 150 and box["width"] > 200
    page = watched.open(troubled)
    page.locator("figure.chart canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    charts = page.locator("figure.chart .uplot").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect().right)"
    )
    assert max(charts) <= 360


@pytest.mark.parametrize("watched", [{"java_script_enabled": False}], indirect=True)
def test_without_its_script_it_still_tells_all(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    assert page.locator("svg.still").count() == 4 and page.locator("svg.still").first.is_visible()
    assert page.locator("li.incident").count() == 2
    assert not page.locator("button.zoom").first.is_visible()
    assert not page.locator(".readout").is_visible()


# -- what is inside ------------------------------------------------------------------------------


def cell(page: Any, row: str, step: int) -> tuple[float, float]:
    """Where a layer's look lies in the first heat map, in pixels from the plane's corner."""
    box = page.locator("figure.heat .cells").first.bounding_box()
    steps = list(range(INSIDE.look_every, INSIDE.steps + 1, INSIDE.look_every))
    across = (steps.index(step) + 0.5) / len(steps) * box["width"]
    return across, (LAYERS.index(row) + 0.5) / len(LAYERS) * box["height"]


def magenta(pixels: np.ndarray) -> np.ndarray:
    """Pixels of what is far above a scale."""
    red, green, blue = (pixels[..., at] for at in range(3))
    return (red > 200) & (green < 60) & (blue > 80)


def test_one_look_of_one_layer_is_seen_at_its_place(watched: Watched, inside: Path) -> None:
    page = watched.open(inside)
    x, y = (round(at) for at in cell(page, "blocks.7", 220))
    found = magenta(pixels_of(page, "figure.heat .plane >> nth=0"))
    assert found[y - 4 : y + 5, x - 4 : x + 5].any()
    found[y - 12 : y + 13, x - 14 : x + 15] = False
    assert not found.any(), "and nowhere else"
    page.hover("figure.heat .plane >> nth=0", position={"x": x, "y": y})
    words = page.locator("figure.heat .told").first.inner_text()
    assert words.startswith("blocks.7 · step 220 · far above"), words
    page.locator("figure.heat").first.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    words = page.locator("figure.heat .told").first.inner_text()
    assert words.startswith("blocks.6 · step 225 · about 0."), words
    assert page.locator("text=Point at a cell").count() == 0, "it stood at the first alone"
    assert watched.complaints == []


@pytest.mark.parametrize(
    "watched", [{"has_touch": True, "viewport": {"width": 360, "height": 740}}], indirect=True
)
def test_a_tap_reads_a_cell(watched: Watched, inside: Path) -> None:
    page = watched.open(inside)
    x, y = cell(page, "blocks.7", 220)
    page.tap("figure.heat .plane >> nth=0", position={"x": x, "y": y})
    page.locator("figure.heat .told", has_text="blocks.7 · step 220").wait_for()


def test_the_slow_rank_is_the_bright_row(watched: Watched, inside: Path) -> None:
    page = watched.open(inside)
    box = page.locator("section.ranks .cells").first.bounding_box()
    shown = pixels_of(page, "section.ranks .plane >> nth=0")[: int(box["height"])]
    rows = [part.mean() for part in np.array_split(shown, INSIDE.world_size)]
    assert int(np.argmax(rows)) == INSIDE.slow_rank
    assert max(rows) > 1.5 * sorted(rows)[-2]
    assert page.locator("text=Slowest: rank 5").count() == 1


def test_an_incident_tells_its_verdict_and_the_samples(watched: Watched, inside: Path) -> None:
    page = watched.open(inside)
    found = page.locator("#incident-1")
    found.locator("summary").first.click()
    assert found.locator(".verdict").inner_text() == "data"
    assert "still bad without it (tested: not so)" in found.inner_text()
    assert "rank 1 on node-1" in found.inner_text()
    assert " --incident 1" in found.locator("code").inner_text()
    found.locator("summary", has_text="Text of the samples").click()
    assert HOSTILE in found.locator("pre").inner_text()
    found.locator("summary", has_text="The same step, computed again").click()
    assert found.locator("td", has_text="E without it").is_visible()
    signature = page.locator("li.signature").inner_text()
    assert "plateau" in signature and HOSTILE in signature
    assert page.locator("section.source td", has_text="onerror").count() == 1
    assert page.locator("img").count() == 0 and page.locator("script").count() == 3
    assert watched.complaints == []


@pytest.mark.parametrize("watched", [{"java_script_enabled": False}], indirect=True)
def test_what_is_inside_is_there_without_its_script(watched: Watched, inside: Path) -> None:
    page = watched.open(inside)
    for what in ("layers", "position", "source", "stream", "ranks", "ring"):
        shown = page.locator(f"section.{what} svg").first
        assert shown.is_visible() and shown.bounding_box()["width"] > 20, what
    titles = page.locator("h3").all_inner_texts()
    assert [title.split(" (")[0] for title in titles] == [
        "Curves",
        "Incidents",
        "Where the time went",
        "Signatures and warnings",
        "Layers over time",
        "Loss by position",
        "Loss by source",
        "The stream",
        "Ranks over time",
        "The ring",
        "Settings and their changes",
    ]
    page.locator("summary", has_text="Histograms at step 400").click()
    shown = page.locator("section.layers figure", has_text="Gradients").locator("svg.plane")
    assert shown.bounding_box()["height"] > 150 and shown.locator("path.half").count() == 1
    assert page.locator("svg.still.loss .marked").count() == 1
    assert page.locator("svg.still.loss text", has_text=re.compile("^1$")).count() >= 1


def test_it_prints(watched: Watched, troubled: Path) -> None:
    page = watched.open(troubled)
    data = page.pdf(print_background=True)
    assert data.startswith(b"%PDF") and len(data) > 20_000
    page.emulate_media(media="print")
    assert page.locator("svg.still").first.is_visible()
    assert not page.locator("figure.chart .uplot").first.is_visible()


def test_several_runs_come_side_by_side(watched: Watched, tmp_path: Path) -> None:
    other = Made(steps=300, base=2.4)
    page = watched.open(report(tmp_path, TROUBLED, other))
    assert page.locator("section.compare tbody tr").count() >= 2
    assert page.locator("article").count() == 2
    page.hover("figure.compare .u-over", position={"x": 300, "y": 60})
    words = page.locator("section.compare .readout").inner_text()
    assert "run-0 2." in words and "run-1 2." in words
    assert bluish(pixels_of(page, "figure.compare .u-over")).sum() > 200, "its own line is there"
    controls = page.locator("section.compare .controls")
    readings = {}
    for metric in ("loss", "held-out loss", "gradient norm", "tokens (or samples) per second"):
        for along in ("steps", "samples", "hours"):
            controls.locator("select").first.select_option(metric)
            controls.locator("select").last.select_option(along)
            page.mouse.move(0, 0)
            page.hover("figure.compare .u-over", position={"x": 500, "y": 60})
            readings[metric, along] = page.locator("section.compare .readout").inner_text()
    assert len(set(readings.values())) == 12, readings
    assert readings["held-out loss", "steps"].endswith("run-0 2.1 · run-1 2.5")
    assert readings["loss", "samples"].startswith("sample ")
    controls.locator("select").first.select_option("held-out loss")
    controls.locator("select").last.select_option("steps")
    controls.locator("input[type=checkbox]").check()
    page.hover("figure.compare .u-over", position={"x": 300, "y": 60})
    difference = page.locator("section.compare .readout").inner_text()
    assert difference.endswith("run-0 0 · run-1 0.4"), difference
    assert watched.complaints == []


def test_a_long_run_loses_no_spike(watched: Watched, tmp_path: Path) -> None:
    page = watched.open(report(tmp_path, Made(steps=12_000, spike_at=7_654)))
    page.locator("figure.chart canvas").first.wait_for()
    at = column_of(page, "loss", 7_654)
    assert bluish(picture(page, "loss"))[:40, at - 3 : at + 4].any()


def test_a_curve_can_be_smoothed_and_has_its_mean_a_log_scale_and_wheels(
    watched: Watched, tmp_path: Path
) -> None:
    chart = "document.querySelector('figure[data-curve=loss]').chart"
    page = watched.open(report(tmp_path, Made(steps=12_000)))
    mean = f"{chart}.data[2].filter((one) => one !== null && one !== undefined)"
    settled = page.evaluate(mean)[200:]
    assert len(settled) > 500 and max(settled) < 2.02 and min(settled) > 1.98
    assert page.evaluate(f"{chart}.scales.y.max") < 2.5, "the beginning does not set the scale"
    page.locator(".controls", has_text="smoothing").get_by_role("slider").fill("0.9")
    smoother = page.evaluate(mean)[200:]
    assert max(smoother) - min(smoother) < 0.5 * (max(settled) - min(settled))
    page.get_by_label("log scale").check()
    assert page.evaluate(f"{chart}.scales.y.distr") == 3
    whole = page.evaluate(f"{chart}.scales.x.max - {chart}.scales.x.min")
    page.hover("figure[data-curve=loss] .u-over")
    page.mouse.wheel(0, -300)
    assert page.evaluate(f"{chart}.scales.x.max - {chart}.scales.x.min") == whole, "it scrolls"
    page.locator("figure[data-curve=loss]").focus()
    page.hover("figure[data-curve=loss] .u-over")
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(200)
    assert page.evaluate(f"{chart}.scales.x.max - {chart}.scales.x.min") < 0.9 * whole
    assert watched.complaints == []


@pytest.mark.full
def test_a_million_steps_are_a_small_page_that_is_there_at_once(
    watched: Watched, tmp_path: Path
) -> None:
    bad = tuple(range(3_000, 1_000_000, 3_000))
    made = replace(
        INSIDE,
        steps=1_000_000,
        spike_at=765_432,
        bad_at=bad,
        layers=tuple(f"blocks.{number}" for number in range(96)),
        hot=("blocks.41", 654_200),
        look_every=200,
        world_size=128,
    )
    path = report(tmp_path, made)
    assert path.stat().st_size <= 1.6e6
    meter = watched.page.context.new_cdp_session(watched.page)
    meter.send("Performance.enable")
    page = watched.open(path)
    page.locator("figure.chart.drawn canvas").last.wait_for()
    told = {one["name"]: one["value"] for one in meter.send("Performance.getMetrics")["metrics"]}
    print(f"{path.stat().st_size} bytes, {told['ScriptDuration']:.2f} s in its script")
    at = column_of(page, "loss", 765_432)
    assert bluish(picture(page, "loss"))[:40, at - 3 : at + 4].any()
    found = magenta(pixels_of(page, "figure.heat .plane >> nth=0"))
    rows, columns = np.nonzero(found)
    share = (columns.mean() / found.shape[1], rows.mean() / found.shape[0])
    assert abs(share[0] - 0.654) < 0.02 and abs(share[1] - 0.41) < 0.06, share
    page.mouse.wheel(0, 3000)
    assert page.evaluate("window.scrollY") > 0
    first, shares, whole = live_processor_time(path.parent / "run-0")
    print(f"live: {first:.2f} s of processor time to the first byte, {whole:.1f} s to the page")
    assert first < 2 and len(shares) > 5 and shares == sorted(shares), (first, shares)


def live_processor_time(out: Path) -> tuple[float, list[int], float]:
    """Of ``holdfast live``: seconds to its first byte, what it then says is read, to the page."""
    command = [sys.executable, "-m", "runner", "live", str(out), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]

            def answer() -> tuple[str, float]:
                with urllib.request.urlopen(address) as got:
                    first = got.read(1)
                    times = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
                    ticks = sum(map(int, times[11:13]))
                    return (first + got.read()).decode(), ticks / os.sysconf("SC_CLK_TCK")

            text, first = answer()
            whole, shares = first, []
            while said := re.search(r"<title>reading (\d+)%", text):
                shares.append(int(said[1]))
                time.sleep(1)
                text, whole = answer()
            return first, list(dict.fromkeys(shares)), whole
        finally:
            server.kill()


@pytest.mark.parametrize("status", [None, "done"])
def test_an_old_page_of_an_unfinished_run_says_so_by_itself(
    watched: Watched, tmp_path: Path, status: str | None
) -> None:
    target = report(tmp_path, Made(steps=100, status=status))
    old = re.sub(r'"made":[0-9.]+', f'"made":{time.time() - 3.5 * 3600}', target.read_text())
    target.write_text(old)
    page = watched.open(target)
    box = page.locator(".state")
    box.wait_for()
    is_stale = status is None
    assert page.locator(".state.stale").count() == is_stale
    assert ("This page is 3 h old" in box.inner_text()) == is_stale
    assert page.title().startswith("silent - " if is_stale else "done - ")
    assert not watched.complaints
