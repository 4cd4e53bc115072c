"""The control loop of the replay decides as a HorizontalPodAutoscaler does."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.autoscaler_replay import ControlLoop, main


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


def test_a_short_day_is_served_by_fewer_instances_than_its_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates, lengths = tmp_path / "rates.json", tmp_path / "lengths.csv"
    # A day that begins at its peak, and ends in a slope that starting takes part in.
    rates.write_text(json.dumps({"m": {"rate": [8.0, 6.0, 4.0, 3.0, *[2.0] * 4, 2.5, 3.0]}}))
    rows = [f"2023-11-16 18:15:{second:02},{600 + 10 * second},64" for second in range(60)]
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    options = ["--service", "m", "--day", "0", "--scale", "3", "--windows", "10"]
    main([str(rates), str(lengths), *options])
    printed = capsys.readouterr().out
    peak, scaled = re.findall(r"([0-9.]+) instance-hours", printed)
    assert float(scaled) < 0.8 * float(peak), printed
    assert printed.count("0 of 10 windows missed") == 2, printed
    assert "aim 99.0 %, reached" in printed
