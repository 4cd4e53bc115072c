"""A gain under one table of static dispatch, beside what other tables would show."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from solvers.placement.ranks import Floats, Placement
from tuner.goals.place_plan import place
from tuner.search.place.evidence import split_recordings
from tuner.search.place.launch_noise import launch_noise
from tuner.spec.place_read import PlaceSpec, read_place_spec


def spec_of_many_tokens(folder: Path, *, dispatch: str, slots: int = 6) -> PlaceSpec:
    """One layer, 8 of 32 experts twice as hot, 4 nodes; passes differ by counting alone."""
    rng = np.random.default_rng(3)
    share_E = rng.dirichlet(np.where(np.arange(32) < 8, 100.0, 50.0))
    passes = [[rng.multinomial(400_000, share_E)] for _ in range(8)]
    recorded = {
        "num_logical_experts": 32,
        "top_k": 8,
        "layer_ids": [3],
        "logical_count": np.sum(passes, axis=0).tolist(),
        "passes": np.array(passes).tolist(),
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "dispatch": dispatch,
        "ranks": 8,
        "ranks_per_node": 2,
        "slots_per_rank": slots,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": []}))
    return read_place_spec(spec)


def three_copies_of_the_hottest(spec: PlaceSpec, load_E: Floats) -> Placement:
    """Place the 8 hottest on three nodes of four; the tokens of the last two ranks are dealt."""
    order_E = np.argsort(-load_E)
    hot_E = order_E[:8]
    experts = np.concatenate([order_E, np.roll(hot_E, 2), np.roll(hot_E, 4)])
    expert_GS = experts.reshape(-1, spec.ranks.num_ranks).T
    return Placement(expert_LS=expert_GS.reshape(1, -1))


def test_a_gain_under_one_table_is_as_uncertain_as_tables_differ(tmp_path: Path) -> None:
    spec = spec_of_many_tokens(tmp_path, dispatch="static")
    evidence = split_recordings(spec)
    placement = three_copies_of_the_hottest(spec, evidence[0].fit_LE[0])
    noise = launch_noise(spec, evidence, placement, None, dispatch="static")
    assert 0.005 < noise < 0.3
    for rule in ("even", "near_dynamic"):
        assert launch_noise(spec, evidence, placement, None, dispatch=rule) == 0.0


def test_the_engine_s_own_table_leaves_nothing_open(tmp_path: Path) -> None:
    spec = spec_of_many_tokens(tmp_path, dispatch="static")
    evidence = split_recordings(spec)
    placement = three_copies_of_the_hottest(spec, evidence[0].fit_LE[0])
    relabelled = replace(evidence[0].recording, layer_ids=(0,), num_decoder_layers=1)
    whole = replace(spec, num_layers=1, recordings={"all": relabelled})
    assert launch_noise(whole, evidence, placement, None, dispatch="static") == 0.0
    guessed = replace(whole, recordings={"all": replace(relabelled, num_decoder_layers=None)})
    assert launch_noise(guessed, evidence, placement, None, dispatch="static") > 0.0


def test_launches_are_identical_without_replicas(tmp_path: Path) -> None:
    spec = spec_of_many_tokens(tmp_path, dispatch="static", slots=4)
    evidence = split_recordings(spec)
    single = Placement(expert_LS=np.arange(32)[None])
    assert launch_noise(spec, evidence, single, None, dispatch="static") == 0.0


def test_a_plan_states_at_least_the_noise_of_its_launches(tmp_path: Path) -> None:
    spec = spec_of_many_tokens(tmp_path, dispatch="static")
    made = place(tmp_path / "spec.yaml", time_limit_s=0.5)
    assert made.plan.decision is not None
    assert made.plan.verdict is not None
    placement = Placement(expert_LS=np.array(made.plan.decision.physical_to_logical))
    drawn = launch_noise(spec, split_recordings(spec), placement, None, dispatch="static")
    assert made.plan.verdict.noise_ratio >= drawn
