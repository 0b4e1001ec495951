"""The dashboard, held against Grafana's own types: generated from its schema, by Grafana Labs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import TypeAdapter, ValidationError

DASHBOARD = Path(__file__).parents[2] / "launch" / "grafana.json"
register_default_plugins()  # options of each kind of panel, and Prometheus' queries


def wrong(text: str) -> list[str]:
    """Keys that Grafana does not know, and values of other types than its own."""
    read = Dashboard.from_json(json.loads(text))
    again = json.loads(JSONEncoder().encode(read))
    return [*_lost(json.loads(text), again, "dashboard"), *_mistyped(read, "dashboard")]


def _lost(told: Any, kept: Any, place: str) -> Iterator[str]:
    if isinstance(told, dict):
        for key, value in told.items():
            inside = f"{place}.{key}"
            yield from _lost(value, kept[key], inside) if key in kept else [f"{inside}: unknown"]
    elif isinstance(told, list):
        for number, (one, other) in enumerate(zip(told, kept, strict=True)):
            yield from _lost(one, other, f"{place}[{number}]")
    elif told != kept:
        yield f"{place}: read as {kept!r}"


def _mistyped(read: Any, place: str) -> Iterator[str]:
    if isinstance(read, list):
        for number, one in enumerate(read):
            yield from _mistyped(one, f"{place}[{number}]")
    elif hasattr(read, "to_json"):
        for name, hint in get_type_hints(type(read)).items():
            value, inside = getattr(read, name), f"{place}.{name}"
            yield from _mistyped(value, inside)
            if type(value) in (str, bool, int, float) or value is None:
                adapter = TypeAdapter[Any](hint, config={"arbitrary_types_allowed": True})
                try:
                    adapter.validate_json(json.dumps(value), strict=True)
                except ValidationError as error:
                    yield f"{inside}: {error.errors()[0]['msg']}"


def test_the_dashboard_is_one_by_grafanas_own_types() -> None:
    assert wrong(DASHBOARD.read_text()) == []


@pytest.mark.parametrize(
    ("panel", "named"),
    [
        ({"gridPosition": {"x": 0}}, "gridPosition"),
        ({"gridPos": {"x": "0", "y": 0, "w": 4, "h": 4}}, "grid_pos.x"),
        ({"options": {"textMode": "big"}}, "options.text_mode"),
        ({"targets": [{"exp": "holdfast_step"}]}, "targets[0].exp"),
    ],
)
def test_what_grafana_does_not_know_is_found(panel: dict[str, Any], named: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    dashboard["panels"][0] |= panel
    [found] = wrong(json.dumps(dashboard))
    assert found.startswith(f"dashboard.panels[0].{named}:")
