"""Whole placements' plans, from a spec with recordings to the verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording as write_stored
from solvers.placement.balance.check import objective
from solvers.placement.ranks import Placement
from tests.expect import present, refused
from tests.patience import patient_s
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.goals.place_plan import place
from tuner.goals.place_spec import read_place_spec
from tuner.plans.place import PlacePlan
from tuner.search.place import plan_place as planning
from tuner.search.place.evidence import split_recordings
from tuner.search.place.links import links_between
from tuner.search.place.plan_place import state_problem
from tuner.search.place.prices import place_pool
from tuner.search.place.search import layer_time_candidates
from tuner.search.place.verdict import Gain, gain_of
from tuner.search.settings import SearchSettings
from tuner.spec.place import Objective

MODELS = Path(__file__).parents[4] / "examples" / "models"

CLUSTER = """\
cluster:
  pools: [{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8}]
"""


def write_recording(
    path: Path,
    rng: np.random.Generator,
    *,
    passes: int = 6,
    layers: int = 3,
    experts: int = 16,
    skew: float = 0.8,
    tokens: int = 20_000,
    top_k: int = 2,
    layer_ids: tuple[int, ...] = (),
) -> None:
    shares = np.exp(skew * rng.standard_normal((layers, experts)))
    shares /= shares.sum(axis=1, keepdims=True)
    counts = [[rng.multinomial(tokens, row).tolist() for row in shares] for _ in range(passes)]
    total = np.sum(counts, axis=0)
    path.write_text(
        json.dumps(
            {
                "num_logical_experts": experts,
                "top_k": top_k,
                "layer_ids": list(layer_ids or range(layers)),
                "logical_count": total.tolist(),
                "passes": counts,
            }
        )
    )


def planned(
    folder: Path,
    goal: str,
    *,
    head: str = "",
    workloads: int = 2,
    skew: float = 0.8,
    passes: int = 6,
    layers: int = 3,
    experts: int = 16,
    tokens: int = 20_000,
    top_k: int = 2,
    layer_ids: tuple[int, ...] = (),
    time_limit_s: float = 1.0,
) -> PlacePlan:
    rng = np.random.default_rng(7)
    names = [f"w{number}" for number in range(workloads)]
    for name in names:
        write_recording(
            folder / f"{name}.json",
            rng,
            skew=skew,
            passes=passes,
            layers=layers,
            experts=experts,
            tokens=tokens,
            top_k=top_k,
            layer_ids=layer_ids,
        )
    listed = ", ".join(f"{{name: {name}, path: {name}.json}}" for name in names)
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\n{head}goal:\n  kind: place\n  workloads: [{listed}]\n{goal}"
    )
    return place(path, time_limit_s=time_limit_s).plan


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> PlacePlan:
    """16 experts in 20 slots on 4 ranks."""
    return planned(tmp_path_factory.mktemp("replicated"), "  ranks: 4\n  slots_per_rank: 5\n")


def test_the_plan_is_better_than_what_runs_and_no_worse_than_the_rule(
    replicated: PlacePlan,
) -> None:
    mean = {
        name: sum(
            getattr(one, f"imbalance_{name}") for one in present(replicated.predicted).outcomes
        )
        for name in ("before", "rule", "after")
    }
    assert mean["after"] < mean["before"]
    assert mean["after"] <= mean["rule"] * 1.005
    assert present(replicated.verdict).word in ("worth it", "fragile")


def test_plans_are_evaluated_on_holdout_passes_and_on_workloads_left_out_in_turn(
    tmp_path: Path,
) -> None:
    goal = "  ranks: 4\n  slots_per_rank: 5\n  judge_ratio: 0.33\n"
    predicted = present(planned(tmp_path, goal, workloads=3).predicted)
    first = predicted.outcomes[0]
    assert (first.passes_planned_from, first.passes_judged) == (4, 2)
    assert [one.workload for one in predicted.left_out] == ["w0", "w1", "w2"]


def test_one_pass_is_parted_by_lot_and_one_workload_leaves_others_unknown(tmp_path: Path) -> None:
    plan = planned(tmp_path, "  ranks: 4\n", passes=1, workloads=1)
    assert present(plan.predicted).outcomes[0].passes_judged == 0
    assert present(plan.predicted).left_out == ()
    for words in ("one pass recorded", "one workload"):
        assert any(words in note for note in plan.provenance.notes)


def test_a_placement_is_made_and_certified_for_the_rule_that_the_runtime_applies(
    tmp_path: Path,
) -> None:
    goal = "  ranks: 16\n  ranks_per_node: 4\n  slots_per_rank: 3\n"
    found = {}
    for dispatch in ("even", "static"):
        plan = planned(
            tmp_path,
            goal + f"  dispatch: {dispatch}\n",
            workloads=1,
            experts=40,
            tokens=200_000,
            time_limit_s=3.0,
        )
        assert plan.certificate.dispatch == dispatch
        found[dispatch] = plan
    problem = state_problem(read_place_spec(tmp_path / "spec.yaml"), settings=SearchSettings())
    for_static = problem.balance()
    value = {
        name: objective(
            for_static,
            Placement(expert_LS=np.array(present(plan.decision).physical_to_logical)),
        )
        for name, plan in found.items()
    }
    assert found["static"].certificate.objective == pytest.approx(value["static"])
    assert value["static"] <= objective(for_static, problem.baseline.placement)
    # Half of the excess over the bound of a plan for an even split, or less.
    least = present(found["static"].certificate.bound)
    assert value["static"] - least <= 0.5 * (value["even"] - least)


def test_layers_of_the_certificate_add_up_to_it(replicated: PlacePlan) -> None:
    certificate = replicated.certificate
    assert present(certificate.bound) <= present(certificate.objective)
    assert sum(one.objective for one in certificate.layers) == pytest.approx(certificate.objective)
    assert sum(one.bound for one in certificate.layers) == pytest.approx(
        present(certificate.bound), rel=1e-6
    )
    assert all(one.bound <= one.objective for one in certificate.layers)


@each_row("tokens, passes", [(300, 1), (2000, 1), (20_000, 1), (20_000, 6)])
def test_the_accidents_of_even_routing_are_no_gain(
    tmp_path: Path, tokens: int, passes: int
) -> None:
    # Whatever is uneven in it is chance.
    plan = planned(tmp_path, "  ranks: 4\n", skew=0.0, passes=passes, workloads=1, tokens=tokens)
    assert present(plan.verdict).word == "not worth it"


def test_passes_in_which_a_layer_saw_no_token_are_noted(tmp_path: Path) -> None:
    plan = planned(tmp_path, "  ranks: 4\n", passes=4, workloads=1)
    values = json.loads((tmp_path / "w0.json").read_text())
    values["passes"][1][2] = [0] * 16
    values["logical_count"] = np.sum(values["passes"], axis=0).tolist()
    (tmp_path / "w0.json").write_text(json.dumps(values))
    plan = place(tmp_path / "spec.yaml", time_limit_s=1.0).plan
    assert any("1 passes in which some layer saw no token" in one for one in plan.provenance.notes)


@pytest.mark.slow
def test_dynamic_dispatch_is_evaluated_at_any_size_of_a_pass(tmp_path: Path) -> None:
    goal = "  ranks: 4\n  slots_per_rank: 5\n  dispatch: dynamic\n  tokens_per_pass: 77\n"
    # Steps, not the time, end searches of this size.
    (first, _) = present(planned(tmp_path, goal, layers=1, time_limit_s=8.0).predicted).outcomes
    even = planned(tmp_path, goal.replace("dynamic", "even"), layers=1, time_limit_s=8.0)
    # Expected is an even split.
    # Two searches, which the time limit may end at different steps.
    assert first.imbalance_after == pytest.approx(
        present(even.predicted).outcomes[0].imbalance_after, rel=0.01
    )


def test_seconds_of_layers_add_up(tmp_path: Path) -> None:
    head = f"model: {MODELS / 'olmoe-1b-7b'}\n{CLUSTER}"
    goal = "  ranks: 16\n  objective: layer_time\n  slots_per_rank: 5\n  robust: worst\n"
    certificate = planned(tmp_path, goal, head=head, experts=64, top_k=8).certificate
    assert sum(one.objective for one in certificate.layers) == pytest.approx(certificate.objective)


def test_a_plan_says_what_priced_it_and_what_it_leaves_idle(tmp_path: Path) -> None:
    cluster = (
        "cluster:\n  pools:\n    - {name: near, device: h100-sxm, nodes: 2, devices_per_node: 8}\n"
        "    - {name: far, device: a100-sxm-80gb, nodes: 2, devices_per_node: 8}\n"
    )
    head = f"model: {MODELS / 'olmoe-1b-7b'}\n{cluster}"
    plan = planned(tmp_path, "  ranks: 8\n", head=head, experts=64, top_k=8)
    assert "time is priced on pool 'near', from the datasheet of h100-sxm" in plan.provenance.notes
    assert any("the other pools are not used" in note for note in plan.provenance.notes)


@pytest.mark.slow
def test_engines_that_share_otherwise_are_named(tmp_path: Path) -> None:
    head = f"model: {MODELS / 'olmoe-1b-7b'}\nemit: [sglang, eplb]\n"
    said = "eplb runs an even split, under which nothing was evaluated here"
    for slots, is_said in ((9, True), (8, False)):
        goal = f"  ranks: 8\n  slots_per_rank: {slots}\n"
        plan = planned(tmp_path, goal, head=head, experts=64, top_k=8)
        assert (said in plan.provenance.notes) == is_said


def test_recordings_that_differ_in_transitions_only_have_different_hashes(tmp_path: Path) -> None:
    first = planned_ways(tmp_path, "layer_chain", time_limit_s=0.5)
    kept = clustered(np.random.default_rng(11), workload="chat")
    write_stored(
        tmp_path / "chat", replace(kept, transition_MEE=2.0 * present(kept.transition_MEE))
    )
    repeated = place(tmp_path / "spec.yaml", time_limit_s=0.5).plan
    before, after = first.provenance.recording_sha256, repeated.provenance.recording_sha256
    assert before["chat"] != after["chat"]
    assert before["law"] == after["law"]


@pytest.mark.slow
@each_row("robust", ["mean", "worst", "cvar"])
def test_every_way_to_be_robust_gives_a_bounded_plan(tmp_path: Path, robust: str) -> None:
    plan = planned(tmp_path, f"  ranks: 4\n  slots_per_rank: 5\n  robust: {robust}\n")
    assert 1.0 <= present(plan.certificate.bound) <= present(plan.certificate.objective) < 1.3


def test_a_limit_on_moved_experts_is_kept(tmp_path: Path) -> None:
    rows = [[*range(16), 0, 1, 2, 3]] * 3
    (tmp_path / "current.json").write_text(json.dumps(rows))
    goal = "  ranks: 4\n  slots_per_rank: 5\n  current: current.json\n  max_moved_experts: 3\n"
    plan = planned(tmp_path, goal, time_limit_s=patient_s(2.0))
    assert present(present(plan.predicted).migration).moved_experts <= 3
    assert plan.binding_constraint == "the limit on moved experts"


def test_a_balance_that_eplbs_rule_does_better_is_not_worth_it_unless_moves_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behind_the_rule(*args: Any) -> Gain:
        gain = gain_of(*args)
        is_free = gain.eplb_gain_ratio is not None
        return replace(gain, eplb_gain_ratio=gain.gain_ratio + 0.05 if is_free else None)

    monkeypatch.setattr(planning, "gain_of", behind_the_rule)
    (tmp_path / "current.json").write_text(json.dumps([[*range(16), 0, 1, 2, 3]] * 3))
    goal = "  ranks: 4\n  slots_per_rank: 5\n  current: current.json\n"
    free = planned(tmp_path, goal, workloads=1, time_limit_s=0.2)
    limited = planned(tmp_path, f"{goal}  max_moved_experts: 6\n", workloads=1, time_limit_s=1.0)
    assert present(free.verdict).word == "not worth it"
    assert present(free.verdict).reason.startswith("EPLB's rule saves")
    # What a search of so little time finds may be nothing on a busy machine.
    assert "EPLB's rule" not in present(limited.verdict).reason


def test_a_plan_may_have_more_slots_than_what_runs(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text(json.dumps([list(range(16))] * 3))
    plain = planned(tmp_path, "  ranks: 4\n")
    more = planned(tmp_path, "  ranks: 4\n  slots_per_rank: 5\n  current: current.json\n")
    before, after = (
        [one.imbalance_before for one in present(made.predicted).outcomes] for made in (plain, more)
    )
    assert before == after
    # Four more slots a layer hold something new, on three layers.
    assert present(present(more.predicted).migration).moved_experts >= 12
    assert all(one.method != "as it runs" for one in more.alternatives)
    (tmp_path / "current.json").write_text(
        json.dumps({"decision": {"layer_ids": [0, 1], "physical_to_logical": [[0]] * 3}})
    )
    with refused(SpecError, "current.json", "2 layer_ids and 3 rows of physical_to_logical"):
        planned(tmp_path, "  ranks: 4\n  current: current.json\n")


MOVED = "  current: current.json\n  max_moved_experts: 3\n"


@each_row(
    ("goal", "slots", "says"),
    [
        # Other slots than the current ones exclude limits and traffic.
        (MOVED, 20, "drop the limit on moved experts"),
        (
            "  slots_per_rank: 4\n  objective: co_activation\n  current: current.json\n",
            20,
            "placements of the same slots",
        ),
        (f"  objective: layer_chain\n{MOVED}", 16, "supports no limit on moved experts"),
        # Recordings must hold what the objective looks at.
        ("  objective: layer_chain\n", 16, "transitions"),
        ("  objective: co_activation\n", 16, "sampled tokens"),
        ("  objective: co_activation\n  redundant_experts: 4\n", 16, "places every expert once"),
    ],
)
def test_goals_that_exclude_each_other_are_refused(
    tmp_path: Path, goal: str, slots: int, says: str
) -> None:
    row = [*range(16), 0, 1, 2, 3][:slots]
    (tmp_path / "current.json").write_text(json.dumps([row] * 3))
    with refused(SpecError, match=says):
        planned(tmp_path, f"  ranks: 4\n{goal}")


def test_latent_experts_are_moved_and_sent_at_their_latent_width(tmp_path: Path) -> None:
    head = f"model: {MODELS / 'nemotron-3-super'}\n{CLUSTER.replace('8}', '8, nic: 1Gbit/s}')}"
    (tmp_path / "current.json").write_text(json.dumps([[*range(511, -1, -1)]] * 2))
    goal = "  ranks: 16\n  phase: decode\n  current: current.json\n"
    plan = planned(
        tmp_path,
        goal,
        head=head,
        workloads=1,
        layers=2,
        layer_ids=(1, 3),
        experts=512,
        top_k=22,
        tokens=200_000,
        time_limit_s=0.5,
    )
    moved = present(present(plan.predicted).migration)
    # Two matrices of 1,024 x 2,688 in bf16.
    assert moved.moved_experts > 0
    assert moved.moved_bytes == moved.moved_experts * 2 * 1024 * 2688 * 2
    assert present(present(plan.verdict).step_gain_ratio) < present(plan.verdict).gain_ratio
    # Dispatch sends 1,024 elements; a token of a layer chain moves on with all 4,096.
    spec = read_place_spec(tmp_path / "spec.yaml")
    evidence = split_recordings(spec)
    pool = place_pool(present(spec.cluster), spec.goal)
    sent, kept = (
        links_between(replace(spec, goal=one), evidence, pool).facts.between_cost
        for one in (spec.goal, spec.goal.model_copy(update={"objective": Objective.LAYER_CHAIN}))
    )
    assert present(kept) / present(sent) == pytest.approx(4.0, rel=0.05)


@pytest.mark.slow
@each_row("phase", ["prefill", "decode"])
def test_seconds_are_predicted_where_a_model_and_devices_are_named(
    tmp_path: Path, phase: str
) -> None:
    head = f"model: {MODELS / 'olmoe-1b-7b'}\n{CLUSTER}"
    goal = (
        "  ranks: 16\n  ranks_per_node: 8\n  slots_per_rank: 5\n  objective: layer_time\n"
        f"  phase: {phase}\n  tokens_per_pass: {65536 if phase == 'prefill' else 1024}\n"
    )
    plan = planned(tmp_path, goal, head=head, experts=64, top_k=8)
    (one, _) = present(plan.predicted).layer_times
    low, high = one.after_s_band
    assert 0.0 < low < one.after_s < high
    assert one.after_s == pytest.approx(one.experts_after_s + one.exchange_after_s)
    assert one.after_s <= one.before_s
    assert 0.0 <= present(present(plan.verdict).step_gain_ratio) < present(plan.verdict).gain_ratio
    assert present(plan.certificate.bound) <= present(plan.certificate.objective)


@pytest.mark.slow
def test_the_same_spec_has_the_same_plan(tmp_path: Path) -> None:
    goal = "  ranks: 4\n  slots_per_rank: 5\n"
    # Enough time for the search to end by itself: cut short, it depends on the machine.
    first, second = (planned(tmp_path, goal, layers=1, time_limit_s=60.0) for _ in range(2))
    assert first.decision == second.decision
    assert first.predicted == second.predicted


def clustered(rng: np.random.Generator, *, workload: str, in_order: bool = False) -> Recording:
    """16 experts in 4 clusters that tokens stay in: every fourth expert, or four in order."""
    tokens, layers, experts = 400, 3, 16
    cluster_T = rng.integers(0, 4, tokens)
    members = np.arange(experts) if in_order else np.arange(experts).reshape(4, 4).T.ravel()
    token_LTK = np.zeros((layers, tokens, 2), dtype=np.int32)
    for layer in range(layers):
        for token, cluster in enumerate(cluster_T):
            inside = members[4 * cluster : 4 * cluster + 4]
            pool = inside if rng.random() < 0.8 else np.arange(experts)
            token_LTK[layer, token] = rng.choice(pool, 2, replace=False)
    counts = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in token_LTK])
    flow = np.zeros((layers - 1, experts, experts))
    for layer in range(layers - 1):
        for one in range(2):
            for other in range(2):
                np.add.at(
                    flow[layer], (token_LTK[layer, :, one], token_LTK[layer + 1, :, other]), 1.0
                )
    return Recording(
        model="tiny",
        workload=workload,
        layer_ids=(0, 1, 2),
        top_k=2,
        count_PLE=counts[None],
        transition_MEE=flow,
        token_LTK=token_LTK,
    )


def planned_ways(
    folder: Path,
    objective: str,
    *,
    crossed: bool = False,
    goal: str = "",
    time_limit_s: float = 2.0,
) -> PlacePlan:
    rng = np.random.default_rng(11)
    for name, in_order in (("chat", False), ("law", crossed)):
        write_stored(folder / name, clustered(rng, workload=name, in_order=in_order))
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 4\n  ranks_per_node: 2\n"
        f"  objective: {objective}\n{goal}"
        "  workloads: [{name: chat, path: chat}, {name: law, path: law}]\n"
    )
    return place(path, time_limit_s=time_limit_s).plan


@pytest.fixture(scope="module")
def of_ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlacePlan]:
    """A plan for each objective about traffic, with more time than its searches take."""
    return {
        objective: planned_ways(tmp_path_factory.mktemp(objective), objective, time_limit_s=20.0)
        for objective in ("layer_chain", "co_activation")
    }


@pytest.mark.slow
@each_row("objective", ["layer_chain", "co_activation"])
def test_traffic_falls_and_the_load_stays_within_the_rules(
    of_ways: dict[str, PlacePlan], objective: str
) -> None:
    plan = of_ways[objective]
    before, rule, after = present(plan.predicted).traffic[objective]
    assert after < 0.9 * before
    assert after < 0.9 * rule
    assert present(plan.certificate.bound) <= after
    assert present(plan.verdict).word == "worth it"
    assert all(fold.traffic is not None for fold in present(plan.predicted).left_out)


def test_affinity_of_one_workload_that_hurts_another_is_called_fragile(tmp_path: Path) -> None:
    # Experts in order suit the second workload already; what suits the first takes that away.
    plan = planned_ways(tmp_path, "co_activation", crossed=True)
    assert present(plan.verdict).word == "fragile"
    assert "'law'" in present(plan.verdict).reason


@each_row(
    ("goal", "names"),
    [
        ("  exchange: merged\n", {"balance of copies", "co-activation"}),
        ("", {"balance of copies"}),
        ("  exchange: merged\n  redundant_experts: 4\n", {"balance of copies"}),
    ],
)
def test_layer_time_has_candidates_that_its_search_misses(
    tmp_path: Path, goal: str, names: set[str]
) -> None:
    write_stored(tmp_path / "chat", clustered(np.random.default_rng(11), workload="chat"))
    path = tmp_path / "spec.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 4\n  ranks_per_node: 2\n"
        f"{goal}  workloads: [{{name: chat, path: chat}}]\n"
    )
    problem = state_problem(read_place_spec(path), settings=SearchSettings())
    assert set(layer_time_candidates(problem, time_limit_s=0.5)) == names


@pytest.mark.slow
def test_the_current_placement_is_kept_if_no_candidate_has_less_traffic(
    tmp_path: Path, of_ways: dict[str, PlacePlan]
) -> None:
    plan = of_ways["layer_chain"]
    (tmp_path / "current.json").write_text(json.dumps(present(plan.decision).physical_to_logical))
    goal = "  current: current.json\n"
    repeated = planned_ways(tmp_path, "layer_chain", goal=goal, time_limit_s=20.0)
    before, _, after = present(repeated.predicted).traffic["layer_chain"]
    assert after <= before * (1.0 + 1e-9)
    assert present(present(repeated.predicted).migration).break_even_s is None


@pytest.mark.slow
def test_the_load_limit_is_named_where_it_binds(
    tmp_path: Path, of_ways: dict[str, PlacePlan]
) -> None:
    tight = of_ways["co_activation"]
    assert "the largest load that EPLB's rule gives a rank" in tight.binding_constraint
    wide = planned_ways(tmp_path, "co_activation", goal="  traffic_slack_ratio: 10.0\n")
    assert "slots of a rank" in wide.binding_constraint


def test_traffic_is_evaluated_on_holdout_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    # Tokens without any affinity: what the search finds in the first half is not in the second.
    token_LTK = np.argsort(rng.random((3, 200, 16)), axis=2)[:, :, :2].astype(np.int32)
    counts = np.stack([np.bincount(layer.ravel(), minlength=16) for layer in token_LTK])
    write_stored(
        tmp_path / "chat",
        Recording(
            model="tiny",
            workload="chat",
            layer_ids=(0, 1, 2),
            top_k=2,
            count_PLE=counts[None],
            token_LTK=token_LTK,
        ),
    )
    path = tmp_path / "spec.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 4\n  objective: co_activation\n"
        "  workloads: [{name: chat, path: chat}]\n"
    )
    plan = place(path, time_limit_s=2.0).plan
    assert present(plan.verdict).word == "not worth it"
    before, _, after = present(plan.predicted).traffic["co_activation"]
    assert present(plan.certificate.objective) < 0.97 * before
    assert abs(after / before - 1.0) < 0.05
