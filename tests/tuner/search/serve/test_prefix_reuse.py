"""Prefix hits of a recorded traffic: planned on until instances and caches agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.models import MODELS
from tests.tuner.search.serve.testing import problem_of
from tuner.config.serve import Role
from tuner.goals.serve_plan import deploy
from tuner.goals.serve_spec import read_serve_spec
from tuner.plans.serve import PrefixReuse, ServePlan
from tuner.search.serve import plan_serve as planning
from tuner.search.serve import prefix_reuse
from tuner.search.serve.demand import PrefixHits, build_demand, with_hits
from tuner.search.serve.prefix_reuse import RecordedPrompts, measure_reuse, recorded_prompts
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.simulation import sample_rank_requests
from tuner.simulate.serving.prefix_hits import by_weight
from tuner.spec.serving.routers import CACHE_THRESHOLD, RouterPolicy

SPEC = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster: {{pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: ENGINE}}
  traffic: {{trace: trace.jsonl, prefix_hit: 0.9}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  modes: [aggregated]
  objective: devices
"""
SINGLE = "nodes: 8, devices_per_node: 1, nics_per_node: 1, nic: 10Gbit/s"
"""Where several instances of one device serve more than one of several."""
Row = tuple[float, int, list[int]]


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Path]:
    def made(rows: list[Row], *, engine: str = "sglang", has_blocks: bool = True) -> Path:
        lines = [
            {"timestamp": 1e3 * at_s, "input_length": tokens, "output_length": 200}
            | ({"hash_ids": blocks} if has_blocks else {})
            for at_s, tokens, blocks in rows
        ]
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.replace("ENGINE", engine))
        return path

    return made


def shared(count: int, *, every_s: float = 0.1) -> list[Row]:
    """Prompts of 2048 tokens whose first 1536 are those of one of two documents, in turn."""
    return [
        (every_s * number, 2048, [*range(3 * (number % 2), 3 * (number % 2) + 3), 100 + number])
        for number in range(count)
    ]


def plan_of(path: Path) -> ServePlan:
    return deploy(path, time_limit_s=20.0).plan


def test_a_plan_counts_on_what_its_own_caches_hold(spec: Callable[..., Path]) -> None:
    plan = plan_of(spec(shared(400)))
    reuse = present(plan.prefix_reuse)
    (group,) = present(plan.decision).instances
    ranks = group.count * group.attention_dp
    assert (reuse.instances, reuse.ranks, reuse.router) == (
        group.count,
        group.attention_dp,
        "cache_aware",
    )
    # Every rank meets a document for the first time once: 3 of 4 blocks are found but then.
    at_most = 0.75 * (1.0 - 2.0 / 400)
    assert (0.75 * (1.0 - 2.0 * ranks / 400)) - 1e-9 <= reuse.hit_ratio <= at_most + 1e-9
    assert plan.goal.traffic.prefix_hit == pytest.approx(reuse.hit_ratio, abs=0.01)
    assert any("hash_ids" in note for note in plan.provenance.notes)
    assert not any("whichever instance" in note for note in plan.provenance.notes)


def test_a_trace_without_blocks_is_planned_as_stated(spec: Callable[..., Path]) -> None:
    plan = plan_of(spec(shared(400), has_blocks=False))
    assert plan.prefix_reuse is None
    assert plan.goal.traffic.prefix_hit == 0.9


def test_instances_that_look_for_prefixes_on_their_ranks_find_what_one_rank_would(
    spec: Callable[..., Path],
) -> None:
    # Fourteen sessions of turns that grow by a block, one turn of each after the other.
    rows = [
        (
            0.1 * (14 * turn + session),
            512 * (turn + 1),
            [100 * session + b for b in range(turn + 1)],
        )
        for turn in range(6)
        for session in range(14)
    ]
    prompts = present(recorded_prompts(read_serve_spec(spec(rows)), rate_per_s=10.0))

    def found(router: Any, *, instances: int, ranks: int) -> float:
        reuse = PrefixReuse(
            router=router,
            instances=instances,
            ranks=ranks,
            cache_blocks=400,
            stay_s=1.0,
        )
        return prompts.under(reuse).ratio

    best = found("ranks", instances=1, ranks=4)
    assert found("own_ranks", instances=1, ranks=4) == pytest.approx(best)
    assert best > 1.4 * found("in_turn", instances=1, ranks=4)
    # In turn over three instances, a session meets its prefix on one of three, then on its rank.
    alone = found("in_turn", instances=3, ranks=1)
    assert found("in_turn", instances=3, ranks=4) < 0.7 * alone
    assert 0.8 * alone < found("own_ranks", instances=3, ranks=4) <= alone


def test_requests_are_simulated_with_the_hits_of_their_own(spec: Callable[..., Path]) -> None:
    read = read_serve_spec(spec(shared(40)))
    prompts = present(recorded_prompts(read, rate_per_s=10.0))
    one = PrefixReuse(router="one", instances=1, ranks=1, cache_blocks=99, stay_s=1.0)
    hits = prompts.under(one)
    # The first prompt of each document finds nothing, the other 38 find 1536 of 2048 tokens.
    assert present(hits.cached_N).tolist() == [0, 0, *[1536] * 38]
    assert hits.ratio == pytest.approx(38 * 1536 / (40 * 2048))
    demand = with_hits(build_demand(read.goal, longest=32768), hits)
    assert demand.computed_tokens == pytest.approx(2048 * (1.0 - hits.ratio))
    every = sample_rank_requests(read.goal, demand, count=40, every=1, most_tokens=1e6)
    assert present(every.cached_R).tolist() == present(hits.cached_N).tolist()
    third = sample_rank_requests(read.goal, demand, count=40, every=3, most_tokens=1e6)
    assert present(third.cached_R).tolist() == present(hits.cached_N)[::3].tolist()


def test_a_rank_of_a_closed_loop_gets_its_requests_whether_hits_were_counted_or_not(
    spec: Callable[..., Path],
) -> None:
    path = spec([(0.1 * number, 512, [number]) for number in range(160)])
    path.write_text(path.read_text().replace("{trace:", "{concurrency: 16, trace:"))
    goal = read_serve_spec(path).goal
    demand = build_demand(goal, longest=32768)
    assert demand.cached_N is None
    for one in (demand, with_hits(demand, PrefixHits(ratio=0.5, cached_N=np.full(160, 256)))):
        found = sample_rank_requests(goal, one, count=40, every=4, most_tokens=1e6)
        assert len(found.input_R) == 40
        assert found.after_R is not None


def test_caches_of_ranks_and_routers_find_what_a_count_by_hand_finds(
    spec: Callable[..., Path],
) -> None:
    prompts = present(recorded_prompts(read_serve_spec(spec(shared(8))), rate_per_s=10.0))

    def found(**fields: object) -> list[int]:
        plain = {"router": "in_turn", "instances": 1, "ranks": 1, "cache_blocks": 99, "stay_s": 1.0}
        return prompts_under(prompts, PrefixReuse.model_validate(plain | fields))

    # Two instances in turn get one document each; four meet each document twice, so do two of two
    # ranks; a cache of 3 blocks is filled by the document that came last.
    assert found(instances=2) == [0, 0, 3, 3, 3, 3, 3, 3]
    assert found(instances=4) == [0, 0, 0, 0, 3, 3, 3, 3]
    assert found(instances=2, ranks=2) == [0, 0, 0, 0, 3, 3, 3, 3]
    assert found(cache_blocks=3) == [0] * 8
    # The cache-aware rule keeps a document where it is, whatever the number of instances.
    assert found(instances=4, router="cache_aware") == [0, 0, 3, 3, 3, 3, 3, 3]
    # It leads to an instance, whose ranks get the document in turn, or to the rank that has it.
    assert found(instances=2, ranks=2, router="cache_aware") == [0, 0, 0, 0, 3, 3, 3, 3]
    assert found(instances=2, ranks=2, router="ranks") == [0, 0, 3, 3, 3, 3, 3, 3]
    assert found(ranks=4, router="ranks") == [0, 0, 3, 3, 3, 3, 3, 3]


def test_islands_have_caches_of_their_own_and_get_requests_by_their_weights(
    spec: Callable[..., Path],
) -> None:
    prompts = present(recorded_prompts(read_serve_spec(spec(shared(12))), rate_per_s=10.0))
    plain = PrefixReuse(router="in_turn", instances=1, ranks=1, cache_blocks=99, stay_s=1.0)

    def islands(*shares: float) -> PrefixReuse:
        parts = tuple(plain.model_copy(update={"share_ratio": share}) for share in shares)
        return plain.model_copy(update={"instances": len(parts), "islands": parts})

    # Even weights send every other request, which is one document, to each: as two in turn.
    in_turn = prompts_under(prompts, plain.model_copy(update={"instances": 2}))
    assert prompts_under(prompts, islands(0.5, 0.5)) == in_turn == [0, 0, *[3] * 10]
    # Of weights 2 to 1 each meets both documents, in an order of three requests.
    assert by_weight(6, (2 / 3, 1 / 3)).tolist() == [0, 1, 0, 0, 1, 0]
    assert prompts_under(prompts, islands(2 / 3, 1 / 3)) == [0, 0, 3, 0, 0, *[3] * 7]
    small = islands(0.5, 0.5)
    parts = (small.islands[0], plain.model_copy(update={"share_ratio": 0.5, "cache_blocks": 3}))
    # A cache of 3 blocks keeps the document that alone comes.
    assert prompts_under(prompts, small.model_copy(update={"islands": parts})) == in_turn


def prompts_under(prompts: RecordedPrompts, reuse: PrefixReuse) -> list[int]:
    return [tokens // 512 for tokens in present(prompts.under(reuse).cached_N)]


def test_only_the_beginning_of_a_long_trace_is_counted(
    spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_serve_spec(spec(shared(50)))
    monkeypatch.setattr(prefix_reuse, "MOST_REQUESTS", 20)
    prompts = present(recorded_prompts(read, rate_per_s=10.0))
    assert len(prompts.input_N) == 20
    monkeypatch.setattr(prefix_reuse, "MOST_BLOCKS", 30)
    prompts = present(recorded_prompts(read, rate_per_s=5.0))
    # 7 prompts of 4 blocks are 28.
    assert len(prompts.input_N) == 7
    assert prompts.arrival_s_N == pytest.approx(0.2 * np.arange(7))


def test_without_a_router_that_follows_caches_the_instances_look_on_their_ranks(
    spec: Callable[..., Path],
) -> None:
    plan = plan_of(spec(shared(200), engine="trtllm"))
    reuse = present(plan.prefix_reuse)
    assert reuse.router == ("own_ranks" if reuse.ranks > 1 else "in_turn")
    assert reuse.hit_ratio == reuse.by_router[reuse.router] >= reuse.by_router["in_turn"]
    assert present(present(plan.predicted).prefix_hits).ratio_band[0] == reuse.by_router["in_turn"]


def test_hits_are_counted_at_the_rate_that_is_found(
    spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec(shared(200))
    path.write_text(path.read_text().replace("objective: devices", "objective: rate"))
    rates: list[tuple[float, float | None]] = []

    def seen(found: ModeSolution, problem: ServeProblem, prompts: RecordedPrompts) -> PrefixReuse:
        recorded_per_s = (len(prompts.input_N) - 1) / float(prompts.arrival_s_N[-1])
        rates.append((recorded_per_s, found.rate_per_s))
        return measure_reuse(found, problem, prompts)

    monkeypatch.setattr(planning, "measure_reuse", seen)
    plan = plan_of(path)
    assert rates
    for recorded_per_s, found_per_s in rates:
        assert recorded_per_s == pytest.approx(found_per_s)
        assert recorded_per_s > 11.0  # the trace as it was recorded has 10 requests/s
    assert plan.prefix_reuse is not None


def test_hits_that_were_counted_are_not_lowered_again_and_the_router_has_their_threshold(
    spec: Callable[..., Path],
) -> None:
    for engine in ("vllm", "trtllm"):
        path = spec(shared(400, every_s=0.015), engine=engine)
        text = path.read_text().replace("mixtral-8x7b", "llama-3.1-8b")
        path.write_text(text.replace("nodes: 1, devices_per_node: 8", SINGLE))
        plan = plan_of(path)
        assert present(plan.prefix_reuse).instances > 1, engine
        planned = plan.goal.traffic.prefix_hit
        assert planned == pytest.approx(present(plan.prefix_reuse).hit_ratio, abs=0.01), engine
        router = present(present(plan.decision).router)
        follows = router.policy is RouterPolicy.CACHE_AWARE
        assert follows == (present(plan.prefix_reuse).router == "cache_aware") == (engine == "vllm")
        assert router.cache_threshold == (CACHE_THRESHOLD if follows else None)
        assert not any("counted on in prefix caches" in line for line in plan.provenance.notes)


def test_wide_instances_are_weighed_by_the_fewer_hits_of_their_ranks(
    spec: Callable[..., Path],
) -> None:
    path = spec(shared(400), engine="sglang")
    prompts = present(recorded_prompts(read_serve_spec(path), rate_per_s=10.0))
    whole = PrefixHits(ratio=0.74)
    found = prefix_reuse.hits_of_options(problem_of(path, hits=whole), prompts)
    counts = sorted(ranks for role, ranks in found if role is Role.AGGREGATED)
    assert counts[0] == 1 < counts[-1]
    ratios = [found[Role.AGGREGATED, ranks].ratio for ranks in counts]
    # Every further rank meets both documents for the first time once more.
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < ratios[0]
    # Each option is priced with the hits of its own number of ranks.
    priced = problem_of(
        path, hits=whole, hits_by_ranks=lambda role, ranks: found.get((role, ranks))
    )
    for ranks in counts:
        demand = priced.demand.on(Role.AGGREGATED, ranks=ranks)
        ratio = found[Role.AGGREGATED, ranks].ratio
        assert demand.computed_tokens == pytest.approx(2048 * (1.0 - ratio))
