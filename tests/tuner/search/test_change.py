"""The least change with which something holds."""

from functools import partial
from operator import add

from tuner.search.change import Change, first_solution
from tuner.search.settings import Deadline


def test_the_first_change_with_a_solution_is_the_answer_and_no_later_one_is_tried() -> None:
    changes = [
        Change(limit="nodes", words=f"{more} more", apply=partial(add, more)) for more in range(5)
    ]
    tried: list[str] = []

    def solve(change: Change[int]) -> int | None:
        tried.append(change.words)
        nodes = change.apply(6)
        return nodes if nodes >= 8 else None

    assert first_solution(changes, solve) == 8
    assert tried == ["0 more", "1 more", "2 more"]
    assert first_solution(changes[:2], solve) is None
    # Zero is a solution, too.
    assert first_solution(changes, lambda change: change.apply(0)) == 0


def test_nothing_is_yielded_after_the_end() -> None:
    seconds = iter((0.0, 1.0, 2.0, 3.0))
    deadline = Deadline(begun_s=0.0, limit_s=2.0, clock=lambda: next(seconds))
    assert list(deadline.before_end("abcd")) == ["a", "b"]
