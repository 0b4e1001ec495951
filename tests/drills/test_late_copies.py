"""Drills once more with a copier as late as CUDA's, whose sources are reused: P16.

Whatever they compare must be the same, and no snapshot may be found damaged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import late_copies, warm
from tests.drills import (
    test_audit,
    test_deepspeed_engine,
    test_frameworks,
    test_guard_crash,
    test_hf,
    test_keep_best,
    test_late,
    test_layouts,
    test_memory,
    test_redo,
    test_rollback,
    test_running_buffers,
    test_zero,
)
from tests.drills import test_guard_loop as test_guard_drills
from tests.mechanism import test_guard_late, test_guard_loop, test_ring_alone, test_strange_loops

TWINS = (
    *(test_guard_loop, test_guard_late, test_ring_alone, test_strange_loops),
    *(test_guard_drills, test_guard_crash, test_frameworks, test_hf, test_memory, test_late),
    *(test_deepspeed_engine, test_layouts),
    *(test_audit, test_keep_best, test_redo, test_rollback, test_running_buffers, test_zero),
)
# The others are run with --full, in the rows that are always run without a late copier: the other
# rows prove that an engine or a layout is right, not that it waits for a copy.
DEFAULT = {
    "test_bad_batches_leave_no_trace",
    "test_read_late_on_two_ranks_and_killed",
    "test_written_while_training_goes_on",
}
# What is told before anything is copied is told without a late copier.
COPIES_NOTHING = ("refused", "what_cannot_be", "ok_wants", "never_asks", "only_looks", "names_that")


def test_the_copier_is_late_and_sources_are_reused() -> None:
    copier, source = late_copies.LateCopier(), torch.zeros(2)
    views = [torch.ones(2), torch.ones(2)]
    copier.copy(0, views, [source, torch.zeros(2)])
    source.fill_(5.0)
    assert [view.tolist() for view in views] == [[1.0, 1.0], [1.0, 1.0]]
    copier.finish(0)
    assert [view.tolist() for view in views] == [[5.0, 5.0], [late_copies.GARBAGE] * 2]


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(warm.LATE_COPIES, "1")
    earlier = late_copies.install()
    yield
    late_copies.remove(earlier)


def _is_full(marked: Any) -> bool:
    return any(mark.name == "full" for mark in marked)


def _always(mark: Any) -> Any:
    """A parametrization without the rows of ``--full``."""
    if mark.name != "parametrize":
        return mark
    names, rows, *rest = mark.args
    kept = [row for row in rows if not _is_full(getattr(row, "marks", ()))]
    return pytest.mark.parametrize(names, kept, *rest, **mark.kwargs).mark


def _twin(test: Callable[..., Any]) -> Any:
    twin: Any = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    twin.__kwdefaults__ = test.__kwdefaults__
    # Not once more where nothing breaks.
    twin.pytestmark = [_always(m) for m in getattr(test, "pytestmark", []) if m.name != "twin"]
    return twin if test.__name__ in DEFAULT else pytest.mark.full(twin)


for _module in TWINS:
    for _name, _value in list(vars(_module).items()):
        if _name.startswith("test_") and isinstance(_value, types.FunctionType):
            full = _is_full(getattr(_value, "pytestmark", []))
            if full or any(words in _name for words in COPIES_NOTHING):
                continue
            globals()[f"{_name}_in_{_module.__name__.rpartition('.')[2]}"] = _twin(_value)
        elif type(_value).__name__ == "FixtureFunctionDefinition":
            globals()[_name] = _value
