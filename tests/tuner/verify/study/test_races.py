"""Several verifications of one plan at once: nothing is launched twice, nothing is lost."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

RACING = Path(__file__).with_name("racing.py")


class Server(NamedTuple):
    url: str
    password: str


def _raced(
    plan: Path, out: Path, *options: str, server: Server | None = None
) -> list[dict[str, Any]]:
    storage = [] if server is None else ["--storage", server.url]
    password = {} if server is None else {"PGPASSWORD": server.password}
    done = subprocess.run(
        [sys.executable, "-P", RACING, plan, out, *storage, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=1700.0,
        env={**os.environ, **password, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(race: dict[str, Any], *, workers: int, trials: int) -> None:
    """Hold one race to what was promised of all."""
    killed = set(race["killed"])
    assert not race["failed"]
    assert len(race["records"]) == workers - len(killed)
    first = race["records"][0]
    assert all(saw == first for saw in race["records"])
    assert [status for _, status, _ in first] == ["ok"] * trials
    recorded = [decision for _, _, decision in first]
    assert len(set(recorded)) == trials
    assert len({number for number, _, _ in first}) == trials
    launches: dict[str, list[int]] = {}
    for decision, pid in race["launched"]:
        launches.setdefault(decision, []).append(pid)
    assert launches.keys() >= set(recorded)
    for decision, pids in launches.items():
        # Only what a killed worker began may begin again.
        assert set(pids[:-1]) <= killed, (decision, pids, killed)
        assert decision in recorded or pids[-1] in killed
    if not killed:
        assert Counter(decision for decision, _ in race["launched"]) == Counter(recorded)


@pytest.mark.slow
def test_two_workers_on_a_file_share_the_trials_and_one_is_stood_in_for(
    bound_plan: Path, tmp_path: Path
) -> None:
    options = ("--races=4", "--peaceful=1", "--workers=2", "--trials=5", "--kill=1")
    races = _raced(bound_plan, tmp_path, *options)
    assert not races[0]["killed"]
    for race in races:
        _check(race, workers=2, trials=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("storage", ["file", "postgresql"])
@pytest.mark.parametrize(("races", "kill"), [(100, 0), (40, 2)])
def test_races_with_and_without_kills_at_random_moments(
    bound_plan: Path,
    tmp_path: Path,
    storage: str,
    races: int,
    kill: int,
    request: pytest.FixtureRequest,
) -> None:
    server = request.getfixturevalue("postgres") if storage == "postgresql" else None
    options = (f"--races={races}", "--workers=4", "--trials=8", f"--kill={kill}")
    raced = _raced(bound_plan, tmp_path, *options, server=server)
    assert len(raced) == races
    for race in raced:
        _check(race, workers=4, trials=8)
    # Not all kills come too late.
    assert sum(bool(race["killed"]) for race in raced) > 10 or not kill
