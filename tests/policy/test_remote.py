"""Which checkpoints go to an object store, and which stay there."""

from __future__ import annotations

import pytest

from runner.policy.retention.records import Record, State, next_upload
from runner.policy.retention.retire import kept_there


def records(*states: str) -> list[Record]:
    """One a letter: c clean, o committed, t tainted; serial n is of step 10 n."""
    names = {"c": State.clean, "o": State.committed, "t": State.tainted}
    return [
        Record(serial=serial, step=10 * serial, cursor=320 * serial, state=names[letter])
        for serial, letter in enumerate(states, start=1)
    ]


@pytest.mark.parametrize(
    ("ring", "stored", "tried", "chosen"),
    [
        ("", "", 0, None),
        ("oo", "", 0, None),  # nothing is proven
        ("tt", "", 0, None),
        ("co", "", 0, 1),
        ("cco", "", 0, 2),  # the newest, not one after another
        ("cco", "c", 0, 2),
        ("cco", "cc", 0, None),
        ("cco", "", 2, None),  # it failed: not until there is a newer one
        ("ccc", "", 2, 3),
        ("ct", "", 0, 1),
        ("cc", "ccc", 0, None),  # the store has a newer one
    ],
)
def test_what_is_sent_next(ring: str, stored: str, tried: int, chosen: int | None) -> None:
    found = next_upload(records(*ring), records(*stored), tried=tried)
    assert (found and found.serial) == chosen


def test_the_newest_stay_and_every_so_manyth_for_good() -> None:
    kept = kept_there(records(*"cccccc"), keep=2, keep_every=30)
    assert [record.step for record in kept] == [30, 50, 60]
    assert [r.step for r in kept_there(records(*"cccccc"), keep=1, keep_every=0)] == [60]
