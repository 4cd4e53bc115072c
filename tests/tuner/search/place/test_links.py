"""What a token copy costs between ranks, from each source that a spec may have."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.ranks import Floats, Placement
from tests.expect import present, refused
from tests.printed import words_of
from tuner.errors import SpecError
from tuner.goals.place_plan import place
from tuner.plans.place import PlacePlan
from tuner.report.place_page import place_report

EXAMPLES = Path(__file__).parents[4] / "examples"
MODEL = EXAMPLES / "models" / "mixtral-8x7b"
HIDDEN = 4096
NODES = ("a", "b", "c", "d")
USUAL = 4e11


def write_matrix(path: Path, *, slow: frozenset[str] = frozenset(), ratio: float = 10.0) -> None:
    lines = [",".join(("bytes_per_s", *NODES))]
    for one in NODES:
        cells = (
            "" if one == two else repr(USUAL / (ratio if {one, two} == slow else 1.0))
            for two in NODES
        )
        lines.append(",".join((one, *cells)))
    path.write_text("\n".join(lines) + "\n")


@functools.cache
def chained(seed: int) -> Recording:
    """Mixtral's 8 experts on a ring: tokens choose neighbours, and go on to neighbours mostly."""
    rng = np.random.default_rng(seed)
    tokens, layers = 600, 4
    on_ring = rng.permutation(8)
    token_LTK = np.zeros((layers, tokens, 2), dtype=np.int32)
    for token in range(tokens):
        here = int(rng.integers(8))
        for layer in range(layers):
            step = 1 if rng.random() < 0.9 else int(rng.integers(2, 8))
            token_LTK[layer, token] = on_ring[here], on_ring[(here + step) % 8]
            here = (here + int(rng.integers(2))) % 8 if rng.random() < 0.9 else int(rng.integers(8))
    parts = np.array_split(token_LTK, 6, axis=1)
    counts = [[np.bincount(row.ravel(), minlength=8) for row in part] for part in parts]
    return Recording(
        model="tiny",
        workload="chat",
        layer_ids=(0, 1, 2, 3),
        top_k=2,
        count_PLE=np.array(counts),
        token_LTK=token_LTK,
    )


def planned(
    folder: Path,
    *,
    goal: str = "  objective: layer_chain\n",
    pool: str = "device: h100-sxm",
    model: bool = True,
    recording: Recording | None = None,
) -> PlacePlan:
    write_recording(folder / "chat", recording or chained(3))
    spec = folder / "spec.yaml"
    head = f"model: {MODEL}\n" if model else ""
    if pool:
        head += f"cluster:\n  pools: [{{name: p, nodes: 4, devices_per_node: 2, {pool}}}]\n"
    per_node = "" if "ranks:" in goal else "  ranks: 8\n  ranks_per_node: 2\n"
    per_node += "" if "tokens_per" in goal else "  tokens_per_pass: 65536\n"
    spec.write_text(
        f"schema_version: 1\n{head}goal:\n  kind: place\n{per_node}{goal}"
        "  workloads: [{name: chat, path: chat}]\nemit: []\n"
    )
    return place(spec, time_limit_s=2.0).plan


def seconds(plan: PlacePlan) -> tuple[float, float, float]:
    (one,) = present(plan.predicted).traffic_times
    return one.before_s, one.rule_s, one.after_s


def test_without_a_cluster_costs_are_relative_and_the_plan_says_so(tmp_path: Path) -> None:
    plan = planned(tmp_path, pool="", model=False)
    links = present(present(plan.predicted).links)
    assert links.unit == "relative"
    assert (links.inside_cost, links.between_cost) == (1.0, 6.0)
    assert "constants" in str(links.inside_source)
    assert present(plan.predicted).traffic_times == ()


def test_a_faster_nic_makes_traffic_cheaper_in_every_objective(tmp_path: Path) -> None:
    # Each objective and each kind of traffic once.
    for objective, traffic in (("layer_chain", "total"), ("co_activation", "busiest")):
        goal = f"  objective: {objective}\n  traffic: {traffic}\n  traffic_slack_ratio: 0.3\n"
        slow, fast = (
            planned(tmp_path, goal=goal, pool=f"device: h100-sxm, nic: {rate}Gbit/s")
            for rate in (1, 400)
        )
        links, faster = (present(present(plan.predicted).links) for plan in (slow, fast))
        assert (links.unit, links.inside_cost) == ("seconds", faster.inside_cost)
        # 1 Gbit/s is 125 MB/s: a row of 8 KiB takes 65 us and more, from half the ranks on.
        assert present(links.between_cost) > 2 * HIDDEN / 1.25e8
        # Thousands of token copies cross a domain in a pass.
        assert min(seconds(slow)) > 100.0 * present(links.between_cost)
        assert min(seconds(slow)) > 20.0 * max(seconds(fast)), (goal, seconds(slow), seconds(fast))


@pytest.mark.slow
def test_the_placement_leaves_the_link_that_is_slow_wherever_it_is(tmp_path: Path) -> None:
    """What even links would suggest is priced on the slow ones by hand, token by token."""

    def plan_on(slow: frozenset[str]) -> PlacePlan:
        write_matrix(tmp_path / "links.csv", slow=slow)
        return planned(
            tmp_path,
            pool="device: h100-sxm, link_matrix: links.csv",
            goal="  objective: layer_chain\n  traffic_slack_ratio: 0.5\n",
        )

    even = plan_on(frozenset())
    ratios = []
    for far in (1, 2, 3):
        slow = plan_on(frozenset({"a", NODES[far]}))
        links = present(present(slow.predicted).links)
        node_G = np.arange(8) // 2
        inside, between = present(links.inside_cost), present(links.between_cost)
        assert "link_matrix of pool 'p'" in str(links.between_source)
        assert {rank // 2 for rank in links.slowest_ranks} == {0, far}
        # The cost of bandwidth is ten times as high, its share of the latency is not.
        assert 5.0 < links.slowest_cost / between <= 10.001
        cost_GG = np.where(node_G[:, None] == node_G, inside, between)
        for one, two in ((0, far), (far, 0)):
            cost_GG[np.ix_(node_G == one, node_G == two)] = links.slowest_cost
        np.fill_diagonal(cost_GG, 0.0)
        on_even, on_slow = (paid(plan, cost_GG) for plan in (even, slow))
        assert on_slow == pytest.approx(present(slow.predicted).traffic["layer_chain"][2])
        ratios.append(on_slow / on_even)
    # On a ring of four nodes two of a node's three links carry much, so at least two of them do.
    assert max(ratios) < 1.02
    assert sorted(ratios)[1] < 0.7


def paid(plan: PlacePlan, cost_GG: Floats) -> float:
    """Cost of the second half of the tokens, a token copy, one pair of choices after another."""
    placement = Placement(expert_LS=np.array(present(plan.decision).physical_to_logical))
    recording = chained(3)
    rank_LE = np.argsort(placement.expert_LS, axis=1)
    token_LTK = present(recording.token_LTK)[:, 300:]
    return sum(
        float(cost_GG[rank_LE[layer, here], rank_LE[layer + 1, there]])
        for layer in range(3)
        for token in range(300)
        for here in token_LTK[layer, token]
        for there in token_LTK[layer + 1, token]
    ) / (300 * 4)


def test_measured_links_of_a_profile_come_before_everything_else(tmp_path: Path) -> None:
    # Four machines of one rank; what node-2 sends is five times slower (examples/profiles).
    profile = EXAMPLES / "profiles" / "four-nodes"
    write_matrix(tmp_path / "slow.csv", slow=frozenset({"a", "b"}))
    goal = "  objective: layer_chain\n  ranks: 4\n  ranks_per_node: 1\n  tokens_per_pass: 4096\n"
    plans = [
        planned(tmp_path, model=model, goal=goal, pool=f"profile: {profile}{matrix}")
        for matrix in ("", ", link_matrix: slow.csv")
        for model in (True, False)
    ]
    for plan in plans:
        links = present(present(plan.predicted).links)
        assert links.between_source == "measured links of the profile"
        assert links.inside_cost is None
        assert links.slowest_ranks[0] == 2
    first = present(present(plans[0].predicted).links)
    assert first.unit == "seconds"
    # 8 KiB at 25 MB/s, and 1.2 ms of latency shared by 2,048 copies.
    assert first.slowest_cost == pytest.approx(8192 / 2.52e7 + 1.2e-3 / 2048, rel=0.02)
    assert present(present(plans[1].predicted).links).unit == "relative"


def test_co_activation_is_not_recommended_where_it_is_priced_slower_than_eplbs_rule(
    tmp_path: Path,
) -> None:
    # On one node tokens that go together save little, and the most-loaded rank has more to do.
    config = json.loads((EXAMPLES / "models" / "qwen3-30b-a3b" / "config.json").read_text())
    config |= {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "schema_version: 1\nmodel: config.json\n"
        "cluster:\n  pools: [{name: p, device: h100-sxm, devices_per_node: 8}]\n"
        "goal:\n  kind: place\n  objective: co_activation\n  ranks: 8\n"
        "  tokens_per_pass: 16384\n"
        f"  workloads: [{{name: chat, path: {EXAMPLES / 'routing' / 'python'}}}]\nemit: []\n"
    )
    plan = place(spec, time_limit_s=2.0).plan
    assert plan.verdict is not None
    (times,) = present(plan.predicted).layer_times
    assert times.rule_s < times.after_s < 0.9 * times.before_s
    assert plan.verdict.gain_ratio > plan.verdict.noise_ratio
    assert plan.verdict.word == "not worth it"
    assert "EPLB's rule saves" in plan.verdict.reason
    assert any(one.method == "eplb" for one in plan.alternatives)


def test_links_that_do_not_cover_the_pool_are_refused_in_a_line(tmp_path: Path) -> None:
    write_matrix(tmp_path / "four.csv")
    lines = (tmp_path / "four.csv").read_text().splitlines()
    comparison = [",".join(line.split(",")[:4]) for line in lines[:4]]
    (tmp_path / "three.csv").write_text("\n".join(comparison) + "\n")
    for goal in ("layer_chain", "co_activation", "balance", "layer_time"):
        for model in (True, False)[: 1 + (goal != "layer_time")]:
            said = "is of 3 nodes, the pool has 4; measure every pair"
            with refused(SpecError, "spec.yaml: cluster.pools: the link_matrix of", said):
                planned(
                    tmp_path,
                    goal=f"  objective: {goal}\n",
                    pool="device: h100-sxm, link_matrix: three.csv",
                    model=model,
                )


def test_traffic_is_an_option_of_objectives_about_traffic_only(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="which has no traffic; plan for co_activation"):
        planned(tmp_path, goal="  objective: balance\n  traffic: busiest\n")


def test_sums_over_all_passes_have_no_holdout_tokens(tmp_path: Path) -> None:
    whole = chained(3)
    flow = np.random.default_rng(4).integers(1, 50, size=(3, 8, 8)).astype(float)
    summed = dataclasses.replace(whole, token_LTK=None, transition_MEE=flow)
    with_tokens, with_sums = planned(tmp_path / "a"), planned(tmp_path / "b", recording=summed)
    for plan, tokens in ((with_tokens, 300), (with_sums, 0)):
        assert present(plan.predicted).traffic_times[0].tokens_judged == tokens
        says = any("evaluated on what it was planned from" in one for one in plan.provenance.notes)
        assert says is (tokens == 0)
    assert with_sums.certificate.objective == pytest.approx(
        present(with_sums.predicted).traffic["layer_chain"][2]
    )


def test_the_most_loaded_pair_is_no_worse_under_its_own_objective(tmp_path: Path) -> None:
    slack = "  traffic_slack_ratio: 0.5\n"
    total = planned(tmp_path, goal=f"  objective: layer_chain\n  traffic: total\n{slack}")
    (tmp_path / "total.json").write_text(total.model_dump_json())
    goal = f"  objective: layer_chain\n  traffic: busiest\n{slack}  current: total.json\n"
    busiest = planned(tmp_path, goal=goal)
    (of_total,) = (one for one in busiest.alternatives if one.method == "as it runs")
    assert (
        0.0
        < present(busiest.certificate.bound)
        <= present(busiest.certificate.objective)
        < of_total.objective
    )


def test_a_slow_link_makes_the_priced_exchange_of_every_objective_longer(tmp_path: Path) -> None:
    write_matrix(tmp_path / "even.csv")
    write_matrix(tmp_path / "slow.csv", slow=frozenset({"a", "b"}))
    for goal in (
        "  objective: co_activation\n",
        "  objective: layer_time\n",
        "  objective: layer_time\n  exchange: merged\n",
    ):
        exchanges = []
        for name in ("even", "slow"):
            plan = planned(
                tmp_path,
                goal=f"{goal}  tokens_per_pass: 65536\n",
                pool=f"device: h100-sxm, link_matrix: {name}.csv",
            )
            exchanges.append(present(plan.predicted).layer_times[0])
        even, slow = exchanges
        # Of three links of a node one takes ten times as long: (10 + 1 + 1) / 3.
        most = 4.0 * even.exchange_after_s
        assert 1.5 * even.exchange_after_s < slow.exchange_after_s <= most * 1.2, (
            goal,
            even.exchange_after_s,
            slow.exchange_after_s,
        )
        assert slow.before_s > even.before_s, (goal, even.before_s, slow.before_s)


def test_a_chain_is_priced_by_the_token_copy_and_co_activation_by_the_token(tmp_path: Path) -> None:
    chain = planned(tmp_path, pool="", model=False)
    together = planned(tmp_path, goal="  objective: co_activation\n", pool="", model=False)
    for plan, what, other in ((chain, "a token copy", "a token"), (together, "a token", "")):
        text = words_of(place_report(plan))
        assert re.search(rf"[\d.]+ {what}, lower bound [\d.]+ {what};", text)
        assert f"Traffic of {what}, " in text
        if other:
            assert f"{other}, lower bound" not in text
