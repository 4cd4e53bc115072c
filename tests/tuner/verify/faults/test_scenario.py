"""Scenarios: what is refused, and that faults depend on the seed alone."""

from pathlib import Path

import numpy as np
import pytest

from tuner.errors import SpecError
from tuner.verify.faults.scenario import FaultKind, StatedPolicy, draw_faults, read_scenario

FAULTS = "faults: {kill: 4, freeze: 1, lose_node: 3, lose_together: 1, fill_disk: 1}"
GOOD = f"""
steps: 100
nodes: 4
seed: 7
mean_interval: 9s
most: 10
{FAULTS}
policies:
  - {{shared: 20}}
  - {{shared: 40, host: 5, replicas: 1, asynchronous: true}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_scenario_that_cannot_be_run_is_refused_in_one_line(tmp_path: Path) -> None:
    cases = {
        "steps: 0": ("steps: 100", "steps"),
        "mean_interval: 9": ("mean_interval: 9s", "mean_interval"),
        "mean_interval: 0s": ("mean_interval: 9s", "mean_interval"),
        "nodes: 0": ("nodes: 4", "nodes"),
        "nodes: 1": ("nodes: 4", "2 nodes"),
        "most: 0": ("most: 10", "most"),
        "seed: -1": ("seed: 7", "seed"),
        "faults: {}": (FAULTS, "faults"),
        "faults: {fill_disk: 1}": (FAULTS, "end no launch"),
        "faults: {explode: 1}": (FAULTS, "faults"),
        "faults: {kill: 1, slow_link: 1}": (FAULTS, "link: 2Gbit/s"),
        "link: 2": ("seed: 7", "link"),
        "link_slow_ratio: 0%": ("seed: 7", "link_slow_ratio"),
        "repair: 0s": ("seed: 7", "repair"),
        "spares: 1": ("seed: 7", "repair: 20s"),
        "without_spare: both": ("seed: 7", "repair: 20s"),
        "repair: 20s\nwithout_spare: stop": ("seed: 7", "without_spare"),
        "{shared: 20, without_spare: wait}": ("{shared: 20}", "repair: 20s"),
        "start_limit: 0s": ("seed: 7", "start_limit"),
        "{shared: 0}": ("{shared: 20}", "policies[0].shared"),
        "{shared: 20, host: 3}": ("{shared: 20}", "no multiple"),
        "{shared: 20, replicas: 1}": ("{shared: 20}", "need checkpoints on hosts"),
        "{shared: 20, level: disk}": ("{shared: 20}", "level"),
    }
    failures = []
    for bad, (good, reason) in cases.items():
        assert good in GOOD
        with pytest.raises(SpecError) as error:
            read_scenario(written(tmp_path, GOOD.replace(good, bad)))
        line = str(error.value)
        if reason not in line or "\n" in line:
            failures.append((bad, line))
    assert not failures


def test_faults_are_exponential_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, GOOD))
    assert draw_faults(scenario, ranks_per_node=2) == draw_faults(scenario, ranks_per_node=2)
    many = scenario.model_copy(update={"most": 20_000})
    faults = draw_faults(many, ranks_per_node=2)
    gaps = np.diff([0.0, *(one.at_s for one in faults)])
    assert np.mean(gaps) == pytest.approx(9.0, rel=0.03)
    assert np.std(gaps) == pytest.approx(9.0, rel=0.05)
    share = np.mean([one.kind is FaultKind.KILL for one in faults])
    assert share == pytest.approx(0.4, abs=0.02)
    assert {one.node for one in faults} == {0, 1, 2, 3}
    assert {one.place for one in faults} == {0, 1}
    other = draw_faults(many.model_copy(update={"seed": 8}), ranks_per_node=2)
    assert other[0] != faults[0]


def test_a_policy_of_the_models_is_said_as_in_a_scenario(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, GOOD))
    assert all(StatedPolicy.of(one.policy()) == one for one in scenario.policies)
    last = scenario.policies[1]
    assert last.words == "host every 5, shared every 40, 1 replica, asynchronous"


def test_policies_say_what_they_do_without_a_spare_where_one_can_lack(tmp_path: Path) -> None:
    plain = read_scenario(written(tmp_path, GOOD))
    assert plain.runs() == plain.policies
    for stated, expected in (
        ("", ["wait"] * 2),
        ("without_spare: continue\n", ["continue"] * 2),
        ("without_spare: both\n", ["wait", "continue"] * 2),
    ):
        text = GOOD.replace("seed: 7\n", f"seed: 7\nrepair: 20s\n{stated}")
        runs = read_scenario(written(tmp_path, text)).runs()
        assert [one.without_spare for one in runs] == expected
        own = text.replace("{shared: 20}", "{shared: 20, without_spare: continue}")
        first, *_ = read_scenario(written(tmp_path, own)).runs()
        assert first.words == "shared every 20, continue without a spare"
