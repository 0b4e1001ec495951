"""What becomes of samples that cannot be read."""

from __future__ import annotations

import pytest

from runner.policy.decision.history import History, Incident
from runner.policy.decision.skip_ledger import GiveUp, PassOver, Unreadable, decide_unreadable


def bad(
    position: int, *, rank: int = 0, index: int | None = None, refused: bool = False
) -> Unreadable:
    return Unreadable(
        rank=rank,
        position=position,
        index=position + 1000 if index is None else index,
        name=f"file {position}",
        error="OSError: gone" if refused else "DataError: torn",
        refused=refused,
    )


REFUSED = [bad(position, rank=1, refused=True) for position in (1, 3, 5, 7)]


@pytest.mark.parametrize(
    ("found", "shares", "known", "most", "expected"),
    [
        ([bad(5)], (4, 4), (), 1, (5,)),
        ([bad(9), bad(5, rank=1)], (4, 4), (), 2, (5, 9)),
        ([bad(5)], (4, 4), (), 0, "end"),
        ([bad(5), bad(9)], (4, 4), (), 1, "end"),
        ([bad(5)], (4, 4), (1, 2), 2, "end"),
        ([bad(5)], (4, 4), (1, 2), 3, (5,)),
        # The same sample in another epoch is not one more.
        ([bad(5, index=2)], (4, 4), (1, 2), 2, (5,)),
        ([bad(5, index=2), bad(50, index=2)], (4, 4), (1,), 2, (5, 50)),
        # A rank to which the system refuses all of its share has lost its storage.
        (REFUSED, (4, 4), (), 100, "again"),
        (REFUSED, (4, 4), (), 0, "again"),
        (REFUSED, (4, 5), (), 100, (1, 3, 5, 7)),
        (REFUSED[:3], (4, 4), (), 100, (1, 3, 5)),
        ([bad(p, rank=1) for p in (1, 3, 5, 7)], (4, 4), (), 100, (1, 3, 5, 7)),
        # Of a share of three one cannot tell.
        (REFUSED[:3], (3, 3), (), 100, (1, 3, 5)),
        ([bad(1, refused=True)], (1,), (), 100, (1,)),
    ],
)
def test_the_table(
    found: list[Unreadable],
    shares: tuple[int, ...],
    known: tuple[int, ...],
    most: int,
    expected: object,
) -> None:
    decision = decide_unreadable(found, shares=shares, known=known, most=most)
    if isinstance(decision, PassOver):
        assert decision.positions == expected
    else:
        assert expected == ("again" if decision.may_pass else "end")
    assert "file " in decision.reason and "on rank" in decision.reason


def test_the_reason_names_the_first_few() -> None:
    decision = decide_unreadable([bad(p) for p in (9, 7, 5, 3)], shares=(8,), known=(), most=3)
    assert isinstance(decision, GiveUp)
    assert "4 different samples" in decision.reason and "data.max_unreadable=3" in decision.reason
    assert "position 3 (file 3) on rank 0: DataError: torn; position 5" in decision.reason
    assert decision.reason.count("position") == 3 and "and 1 more" in decision.reason


def test_the_journal_keeps_what_was_passed_over() -> None:
    history = History([(4, 5)])
    history.add(
        Incident(
            kind="unreadable",
            step=3,
            decision="skip",
            reason="",
            samples=(5, 21),
            detail={"positions": [5, 20], "indices": [77, 78], "errors": ["", ""]},
        )
    )
    assert list(history.ledger) == [(4, 6), (20, 21)]
    assert history.unreadable == {77, 78} and history.num_discarded == 0
