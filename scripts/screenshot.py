"""A picture of a report: python -m scripts.screenshot [--run DIR] [--scheme dark] [--picture FILE]

Trains a tiny model on two ranks with planted trouble (a NaN, a poisoned range, a killed rank, a
spike), and takes a picture of its page with chromium: docs/report.png, which README.md shows. With
``--run`` a run that is there is shown, and nothing is trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from runner.tools.report.page import page, read_runs

ROOT = Path(__file__).parent.parent
SETTINGS = f"""
model=tiny compute.precision=fp32 data=text data.path={sysconfig.get_path("stdlib")}/email
data.seq_len=64 data.workers=0 eval.every=25 eval.samples=16 steps=240 schedule.warmup=8
checkpoint.every=20 checkpoint.clean_after=8 guard.min_history=10 track.every=40
"""
FAULTS = (
    "nan_grad@step=40,rank=1",
    "poison@samples=2700-2790",
    "kill@step=150,rank=1",
    "spike@samples=6000-6031,scale=80",
)
_WIDTH, _HEIGHT = 1080, 960


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="show this run, train nothing")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "report.png")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-screenshot-") as folder:
        run = options.run or _train(Path(folder) / "a-run-with-trouble")
        document = Path(folder) / "page.html"
        document.write_text(page(read_runs([run])))
        _shoot(document, options.picture, options.scheme)
    return 0


def _train(out: Path) -> Path:
    command = ["-m", "runner", "launch", "--nproc", "2", "--restarts", "0"]
    command += ["--torchrun-restarts", "1"]
    settings = [*SETTINGS.split(), f"out={out}", f"faults=[{','.join(FAULTS)}]"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    subprocess.run([sys.executable, *command, *settings], env=environment, check=True)
    return out


def _shoot(document: Path, picture: Path, scheme: Any) -> None:
    """The state, and the curves of loss and gradient norm."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        view: Any = {"width": _WIDTH, "height": _HEIGHT}
        shown = browser.new_context(viewport=view, color_scheme=scheme).new_page()
        shown.goto(document.as_uri())
        shown.locator("figure.chart.drawn canvas").last.wait_for()
        hide = "(all) => all.forEach((one) => { one.hidden = true; })"
        shown.locator(".curves .controls, .readout, .curves .note").evaluate_all(hide)
        shown.screenshot(path=picture)
        browser.close()
    # A palette of its own colours is a third of the size, and looks the same.
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
