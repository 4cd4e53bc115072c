"""`moetune verify --faults` as it is typed."""

import json
import shutil
from pathlib import Path

import pytest

from tuner.cli import app as frame
from tuner.goals.train_folder import read_plan
from tuner.goals.verify_faults import REPORT_NAME
from tuner.plans.folder import FEWER_NODES
from tuner.verify.faults.comparison import FaultReport

Captured = pytest.CaptureFixture[str]


def written(folder: Path, *, nodes: int, steps: int = 30, **more: object) -> Path:
    scenario: dict[str, object] = {
        "steps": steps,
        "nodes": nodes,
        "mean_interval": "3s",
        "most": 1,
        "faults": {"kill": 1},
        "hang": "30s",
        "policies": [{"shared": 10}, {"shared": 20, "host": 5}],
    }
    scenario |= more
    folder.mkdir(exist_ok=True)
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(scenario), encoding="utf-8")
    return path


def ranks_of(planned: Path) -> int:
    decision = read_plan(planned).decision
    assert decision is not None
    return decision.num_devices


def test_what_cannot_be_run_is_refused_before_anything_starts(
    planned: Path, tmp_path: Path, capsys: Captured
) -> None:
    no_policy = tmp_path / "no policy.yaml"
    no_policy.write_text(
        "{steps: 9, nodes: 1, mean_interval: 3s, faults: {kill: 1}}", encoding="utf-8"
    )
    alone = written(tmp_path / "alone", nodes=1, repair="2s", without_spare="both")
    cases = {
        str(alone): "no layout of 0 nodes",
        str(no_policy): "no goal.reliability",
        str(tmp_path / "absent.yaml"): "absent.yaml",
        str(written(tmp_path, nodes=ranks_of(planned) + 1)): "do not divide",
    }
    for file, reason in cases.items():
        assert frame.run(["verify", str(planned), "--faults", file]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
    # Its layout of fewer nodes is none: it has as many ranks.
    shutil.copytree(planned, planned / FEWER_NODES)
    assert frame.run(["verify", str(planned), "--faults", str(alone)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"fewer-nodes/: {ranks_of(planned)} ranks do not fill 0 or fewer nodes" in line
    assert not (planned / REPORT_NAME).exists()


@pytest.mark.slow
def test_a_plan_goes_on_after_a_kill_as_if_there_had_been_none(
    planned: Path, tmp_path: Path, capsys: Captured
) -> None:
    scenario = written(tmp_path, nodes=ranks_of(planned))
    assert frame.run(["verify", str(planned), "--faults", str(scenario)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("every loss equals that of the run without faults") == 2
    assert "Chosen: " in printed
    report = FaultReport.model_validate_json((planned / REPORT_NAME).read_text(encoding="utf-8"))
    for result in report.results:
        assert result.faults == 1
        assert sum(result.restores.values()) == 1
        assert result.measured.wall_s > result.measured.overhead_s > 0.0


@pytest.mark.slow
def test_a_plan_waits_for_a_lost_node_or_goes_on_without_it(
    planned: Path, tmp_path: Path, capsys: Captured
) -> None:
    scenario = written(
        tmp_path,
        nodes=ranks_of(planned),
        steps=60,
        faults={"lose_node": 1},
        repair="4s",
        without_spare="both",
        policies=[{"shared": 5}],
    )
    assert frame.run(["verify", str(planned), "--faults", str(scenario)]) == 0
    printed = capsys.readouterr().out
    assert "every loss equals that of the run without faults" in printed
    report = FaultReport.model_validate_json((planned / REPORT_NAME).read_text(encoding="utf-8"))
    waited, continued = report.results
    assert 0.0 < waited.measured.waiting_s <= 4.0
    assert waited.fewer_steps == continued.measured.waiting_s == 0
    assert continued.fewer_steps > 0
    assert continued.curve is not None
    assert continued.curve.later_error > 0.0 or continued.curve.near_error > 0.0
    for result in report.results:
        assert (result.faults, sum(result.restores.values())) == (1, 1)
        assert result.replayed.waiting_s == pytest.approx(result.measured.waiting_s, rel=0.05)
