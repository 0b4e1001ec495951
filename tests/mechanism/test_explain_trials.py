"""The trials of unseen kinds: who is named wrongly, and what the page says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.explain_trials import PAGE, ROWS, Row, _wrong, read_rows, section, with_section
from tests.unseen_kinds import Incident, drawn, healthy

ROOT = Path(__file__).parents[2]


def cause(said: str, **named: Any) -> dict[str, Any]:
    return {"ranks": [], "positions": [], "module": "", "cause": said, **named}


def wrong(incident: Incident, skipped: list[list[int]], *causes: dict[str, Any]) -> list[str]:
    return _wrong(incident, SimpleNamespace(summary={"skipped": skipped}), causes)  # type: ignore


def test_what_was_not_hit_is_a_wrong_name() -> None:
    sick = Incident(name="a sick rank", causes=("hardware, sticky",), ranks=(1,))
    assert wrong(sick, [], cause("hardware, sticky", ranks=[1])) == []
    assert wrong(sick, [], cause("hardware, sticky", ranks=[0, 1])) == ["rank 0"]
    bad = Incident(name="two samples", positions=(4, 9), sites=("ffn",))
    named = cause("data", positions=[4, 5], module="blocks.0.ffn")
    assert wrong(bad, [[4, 6]], named) == ["sample 5", "skipped 5"]
    assert wrong(bad, [], cause("numerics", module="head")) == ["head"]


def test_the_page_has_the_counts_of_its_rows() -> None:
    page, rows = (ROOT / PAGE).read_text(), read_rows(ROOT / ROWS)
    assert with_section(page, rows) == page
    asked = {"group": "g", "causes": ("data",), "commit": "c", "moved": True}
    right = Row(key="0/a", said="data", **asked)
    accused = Row(key="0/b", said="numerics", wrong=["head"], **asked)
    text = section([right, accused])
    assert "| all | 2 | 1/2 (50.0 %) | 1 | 2/2 | 2/2 | 2/2 |" in text
    assert "* 0/b, data: numerics; named wrongly: head\n" in text


def test_a_seed_draws_the_same_incidents_with_names_of_their_own() -> None:
    names = [incident.name for incident in (*drawn(3), *healthy(3))]
    assert len(set(names)) == len(names) > 60
    assert list(drawn(3)) == list(drawn(3)) != list(drawn(4))
