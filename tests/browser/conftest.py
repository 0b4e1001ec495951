"""Debian's chromium, driven by Playwright. Without either the tests are skipped, and say why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The browser on this machine."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for all pages, and gone before other tests of the session begin."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = program()
    if path is None:
        pytest.skip("no chromium: apt-get install chromium (scripts/test.sh does, as root)")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@dataclass
class Watched:
    """A page, and whatever it asked for or complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, where: Path | str) -> Any:
        """Load a file or an address."""
        self.page.goto(where if isinstance(where, str) else where.as_uri())
        return self.page


@pytest.fixture
def watched(browser: Any, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A fresh page; ``@pytest.mark.parametrize("watched", [{...}], indirect=True)`` sets it up."""
    told = {"viewport": {"width": 1200, "height": 900}} | getattr(request, "param", {})
    context = browser.new_context(**told)
    made = Watched(context.new_page())
    made.page.set_default_timeout(30_000)
    made.page.on("request", lambda one: made.requests.append(one.url))
    made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.page.on("console", lambda one: made.complaints.append(f"{one.type}: {one.text}"))
    yield made
    context.close()
