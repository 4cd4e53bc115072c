"""The control loop of the replay decides as a HorizontalPodAutoscaler does."""

from tests.benchmarks.autoscaler_replay import ControlLoop


def _loop() -> ControlLoop:
    return ControlLoop(target=10.0, at_least=2, at_most=20)


def test_nothing_happens_within_the_tolerance() -> None:
    assert [_loop().count(0.0, load, 4) for load in (37.0, 40.0, 43.0)] == [4, 4, 4]
    assert _loop().count(0.0, 45.0, 4) == 5


def test_it_doubles_at_most_or_adds_four() -> None:
    assert _loop().count(0.0, 190.0, 2) == 6
    assert _loop().count(0.0, 190.0, 6) == 12
    assert _loop().count(0.0, 900.0, 12) == 20


def test_instances_go_after_the_highest_count_of_five_minutes() -> None:
    loop, current, counts = _loop(), 4, []
    for tick in range(30):
        # 3.5 instances' load for a minute, then one's.
        current = loop.count(15.0 * tick, 35.0 if tick < 4 else 10.0, current)
        counts.append(current)
    assert counts[:24] == [4] * 24
    assert counts[25:] == [2] * 5
