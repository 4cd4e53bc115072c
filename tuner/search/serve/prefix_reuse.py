"""Prefix cache hits of recorded prompts in a deployment, from the block ids of the trace.

Instances determine the caches, and the hits determine how many instances are needed. So the plan
is repeated until the two agree:

    first   for every number of attention-data ranks that an instance may have, the caches of its
            best option, as many as serve the rate, under the router that it is launched with; so
            the search weighs wide instances and narrow ones by the hits of each
    then    the caches of the best solution for its own number of ranks

The caches are those of the ranks of aggregated or prefill instances. A rank's blocks are its
planned KV cache, less the outputs that run beside. Hits count from empty
caches, over the first requests of the trace. Of several kinds behind one router the smallest
cache stands for all; islands have caches of their own, and get requests by their weights.

Source of the rule: tuner/simulate/serving/prefix_hits.py.

Letters: N requests, in the order of the trace.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.config.serve import Role
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.memory import kv_bytes_per_token
from tuner.plans.serve import PlannedHits, PrefixReuse, ServePrediction
from tuner.search.serve.demand import NO_TARGET_TPOT_S, Floats, Ints, PrefixHits
from tuner.search.serve.islands import island_shares
from tuner.search.serve.options import Option
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.routed_simulation import policy_of
from tuner.search.serve.routers import RouterChoice, router_choices
from tuner.search.serve.simulation import InstanceGroup, reading_groups
from tuner.simulate.serving.prefix_hits import (
    by_prefix,
    by_weight,
    hit_tokens,
    in_turn,
    prefix_hits,
    ranks_in_turn,
)
from tuner.spec.serving.routers import RouterPolicy
from tuner.spec.serving.spec import ServeSpec
from tuner.spec.serving.traces import BLOCK_TOKENS, Blocks, trace_chunks
from tuner.units import format_ratio

MOST_REQUESTS: Final = 100_000
MOST_BLOCKS: Final = 1_000_000
"""Requests and blocks of the trace that are counted, whichever is reached first; all caches
together hold no more blocks than that, 250 MB."""
ROUNDS: Final = 4
Key = tuple[Role, int]
"""The role and the attention-data ranks of an instance."""
AGREE_RATIO: Final = 0.01
"""Share of the prompt tokens by which two rounds may differ."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPrompts:
    """The first prompts of a trace that names their blocks."""

    blocks: Blocks
    arrival_s_N: Floats
    """Seconds of arrival, at the rate that is planned for."""
    input_N: Ints

    def at(self, rate_per_s: float) -> "RecordedPrompts":
        """Return the prompts with the times of the trace stretched to a rate."""
        span_s = float(self.arrival_s_N[-1])
        if span_s <= 0.0:
            return self
        stretch = (len(self.input_N) - 1) / span_s / rate_per_s
        return replace(self, arrival_s_N=self.arrival_s_N * stretch)

    def under(self, reuse: PrefixReuse) -> PrefixHits:
        """Return what caches and a router find of the prompts."""
        if reuse.islands:
            return self._under_islands(reuse.islands)
        hit_N = prefix_hits(self.blocks, self.rank_N(reuse), cache_blocks=reuse.cache_blocks)
        found_N = hit_tokens(hit_N, self.input_N)
        return PrefixHits(ratio=float(found_N.sum() / self.input_N.sum()), cached_N=found_N)

    def rank_N(self, reuse: PrefixReuse) -> Ints:
        """Return the attention-data rank that a router sends each prompt to."""
        if reuse.router == "ranks":
            return self._by_prefix(reuse, places=reuse.instances * reuse.ranks)
        instance_N = in_turn(len(self.input_N), reuse.instances)
        if reuse.router == "cache_aware":
            instance_N = self._by_prefix(reuse, places=reuse.instances)
        if reuse.router != "own_ranks":
            return ranks_in_turn(instance_N, reuse.ranks)
        rank_N = np.empty_like(instance_N)
        single = reuse.model_copy(update={"instances": 1})
        for instance in range(reuse.instances):
            own_N = instance_N == instance
            rank_N[own_N] = self.taken(own_N)._by_prefix(single, places=reuse.ranks)
            rank_N[own_N] += instance * reuse.ranks
        return rank_N

    def taken(self, chosen_N: NDArray[np.bool_]) -> "RecordedPrompts":
        """Return some of the prompts."""
        return RecordedPrompts(
            blocks=self.blocks.taken(chosen_N),
            arrival_s_N=self.arrival_s_N[chosen_N],
            input_N=self.input_N[chosen_N],
        )

    def _by_prefix(self, reuse: PrefixReuse, *, places: int) -> Ints:
        return by_prefix(
            self.blocks,
            self.arrival_s_N,
            instances=places,
            cache_blocks=reuse.cache_blocks * reuse.ranks * reuse.instances // places,
            stay_s=reuse.stay_s,
        )

    def _under_islands(self, islands: Sequence[PrefixReuse]) -> PrefixHits:
        found_N = np.zeros_like(self.input_N)
        for island, prompts, chosen_N in self.split_by_island(islands):
            found_N[chosen_N] = np.asarray(prompts.under(island).cached_N)
        return PrefixHits(ratio=float(found_N.sum() / self.input_N.sum()), cached_N=found_N)

    def split_by_island(
        self, islands: Sequence[PrefixReuse]
    ) -> Iterator[tuple[PrefixReuse, "RecordedPrompts", NDArray[np.bool_]]]:
        """Yield the islands that get any of the prompts, with these and where they were."""
        if not islands:
            return
        island_N = by_weight(len(self.input_N), [reuse.share_ratio for reuse in islands])
        for at, island in enumerate(islands):
            chosen_N = island_N == at
            if chosen_N.any():
                yield island, self.taken(chosen_N), chosen_N


def recorded_prompts(spec: ServeSpec, *, rate_per_s: float) -> RecordedPrompts | None:
    """Read the prompts of a trace; None where the traffic has none whose blocks are named.

    None of a model with linear attention, too: its hits end where the engine kept a state, which
    block ids do not say (vLLM 0.33.0: at ends of large pages; SGLang 0.5.23: where a request
    ended or a checkpoint was made).

    Args:
        spec: with the traffic.
        rate_per_s: at which requests come; times of the trace are stretched to it.

    Raises:
        SpecError: the trace cannot be used.
    """
    path = spec.goal.traffic.trace
    if path is None or spec.model.linear is not None:
        return None
    ids: list[Ints] = []
    counts: list[Ints] = []
    arrivals: list[Floats] = []
    inputs: list[Ints] = []
    for chunk in trace_chunks(path, with_blocks=True):
        if chunk.blocks is None:
            return None
        ids.append(chunk.blocks.id_B)
        counts.append(chunk.blocks.count_N)
        arrivals.append(chunk.arrival_s_N)
        inputs.append(chunk.input_tokens_N)
        if sum(map(len, inputs)) >= MOST_REQUESTS or sum(map(len, ids)) >= MOST_BLOCKS:
            break
    whole = Blocks(id_B=np.concatenate(ids), count_N=np.concatenate(counts))
    kept = min(MOST_REQUESTS, int(np.searchsorted(whole.end_N, MOST_BLOCKS, side="right")))
    kept = max(kept, 1)
    count_N = whole.count_N[:kept]
    if not count_N.any():
        return None
    recorded = RecordedPrompts(
        blocks=Blocks(id_B=whole.id_B[: int(count_N.sum())], count_N=count_N),
        arrival_s_N=np.concatenate(arrivals)[:kept],
        input_N=np.concatenate(inputs)[:kept],
    )
    return recorded.at(rate_per_s)


def most_reuse(problem: ServeProblem) -> PrefixReuse:
    """Return one cache as large as the memory of all pools."""
    block_bytes = (
        kv_bytes_per_token(problem.decoder, problem.formats, InstanceDegrees()) * BLOCK_TOKENS
    )
    whole = sum(
        serving_pool.memory_bytes * serving_pool.pool.num_devices
        for serving_pool in problem.serving_pools
    )
    blocks = max(1, math.floor(whole / block_bytes))
    return PrefixReuse(router="one", instances=1, ranks=1, cache_blocks=blocks, stay_s=0.0)


def measure_reuse(
    solution: ModeSolution, problem: ServeProblem, prompts: RecordedPrompts
) -> PrefixReuse:
    """Return the caches and the router of a solution, with its hits and other routers' hits."""
    tpot_s = float(solution.simulated.tpot_s_R.mean()) if len(solution.simulated.tpot_s_R) else 0.0
    stay_s = float(solution.simulated.ttft_s_R.mean()) + problem.demand.output_tokens * tpot_s
    shares = island_shares(solution.groups)
    islands = [
        _caches(
            solution.router,
            [group for group in solution.groups if group.island == name],
            problem,
            stay_s=stay_s,
        ).model_copy(update={"share_ratio": shares.get(name, 1.0)})
        for name in dict.fromkeys(group.island for group in solution.groups)
    ]
    plain = islands[0] if len(islands) == 1 else _together(islands)
    return _counted(plain, prompts)


def hits_of_options(problem: ServeProblem, prompts: RecordedPrompts) -> dict[Key, PrefixHits]:
    """Return the hits of instances by role and attention-data ranks, of the best option of each."""
    spec, demand, best = problem.spec, problem.demand, dict[Key, Option]()
    for option in problem.options.options:
        key = option.role, option.degrees.attention_data
        if option.role is Role.DECODE:
            continue
        if key not in best or _per_device(option) > _per_device(best[key]):
            best[key] = option
    routers = {
        role: router_choices(
            spec.goal,
            spec.emit,
            is_disaggregated=role is Role.PREFILL,
            releases=spec.releases.values(),
        )[0]
        for role, _ in best
    }
    tpot_s = min(demand.tpot_s, NO_TARGET_TPOT_S)
    hits = {}
    for (role, ranks), option in best.items():
        most_instances = option.serving_pool.pool.num_devices // option.devices
        needed = math.ceil(demand.rate_per_s / option.rate_per_s)
        count = max(
            1, most_instances if spec.goal.objective == "rate" else min(needed, most_instances)
        )
        reuse = _caches(
            routers[role],
            [InstanceGroup(option=option, count=count)],
            problem,
            stay_s=option.ttft_s + demand.output_tokens * (option.tpot_s or tpot_s),
        )
        hits[role, ranks] = prompts.under(reuse)
    return hits


def _per_device(option: Option) -> float:
    return option.rate_per_s / option.devices


def _counted(reuse: PrefixReuse, prompts: RecordedPrompts) -> PrefixReuse:
    """Return caches with what they find of prompts, and with what other routers would."""
    rules = ["in_turn", "cache_aware"] + ["ranks"] * (reuse.ranks > 1)
    rules += ["own_ranks"] * (reuse.router == "own_ranks")
    by_router = {router: prompts.under(_behind(reuse, router)).ratio for router in rules}
    most_loaded = 1.0
    if reuse.router in ("ranks", "own_ranks") and not reuse.islands:
        requests_P = np.bincount(prompts.rank_N(reuse), minlength=reuse.instances * reuse.ranks)
        most_loaded = float(requests_P.max() / requests_P.mean())
    is_mixed = any(island.router != reuse.router for island in reuse.islands)
    return reuse.model_copy(
        update={
            "by_router": by_router,
            "hit_ratio": prompts.under(reuse).ratio if is_mixed else by_router[reuse.router],
            "most_loaded_ratio": most_loaded,
            "requests": len(prompts.input_N),
            "islands": tuple(
                _counted(island, island_prompts)
                for island, island_prompts, _ in prompts.split_by_island(reuse.islands)
            ),
        }
    )


def _caches(
    router: RouterChoice, groups: Sequence[InstanceGroup], problem: ServeProblem, *, stay_s: float
) -> PrefixReuse:
    """Return the caches of the instances behind one router."""
    reading = reading_groups(groups)
    follows = policy_of(router, reading) is RouterPolicy.CACHE_AWARE
    ranks = reading[0].option.degrees.attention_data
    if follows:
        rule = "ranks" if router.to_ranks and ranks > 1 else "cache_aware"
    else:
        rule = "own_ranks" if router.finds_ranks and ranks > 1 else "in_turn"
    return PrefixReuse(
        router=rule,
        instances=sum(group.count for group in reading),
        ranks=ranks,
        cache_blocks=_blocks(reading, problem),
        stay_s=stay_s,
    )


def reuse_key(groups: Sequence[InstanceGroup]) -> Key:
    """Return the role and the attention-data ranks of the instances whose caches count."""
    first = reading_groups(groups)[0].option
    return first.role, first.degrees.attention_data


def _together(islands: Sequence[PrefixReuse]) -> PrefixReuse:
    first = islands[0]
    return first.model_copy(
        update={
            "share_ratio": 1.0,
            "router": first.router
            if all(island.router == first.router for island in islands)
            else "in_turn",
            "instances": sum(island.instances for island in islands),
            "ranks": max(island.ranks for island in islands),
            "cache_blocks": min(island.cache_blocks for island in islands),
            "islands": tuple(islands),
        }
    )


def _behind(reuse: PrefixReuse, router: str) -> PrefixReuse:
    islands = tuple(island.model_copy(update={"router": router}) for island in reuse.islands)
    return reuse.model_copy(update={"router": router, "islands": islands})


def _blocks(reading: Sequence[InstanceGroup], problem: ServeProblem) -> int:
    """Blocks of a rank's cache beside the outputs that run on it."""
    tokens = min(
        group.option.kv_tokens
        - (group.option.role is Role.AGGREGATED)
        * 0.5
        * group.option.running
        * problem.demand.output_tokens
        for group in reading
    )
    return max(1, math.floor(tokens / BLOCK_TOKENS))


def with_reuse(
    predicted: ServePrediction, reuse: PrefixReuse | None, hits: PrefixHits | None
) -> ServePrediction:
    """Return a prediction with the hits that were counted of recorded prompts."""
    if reuse is None or hits is None:
        return predicted
    islands = reuse.islands or (reuse,)
    unseen = {"ranks": "cache_aware", "own_ranks": "in_turn"}.get(reuse.router, reuse.router)
    low = min(reuse.by_router.get(unseen, hits.ratio), hits.ratio)
    follows = reuse.router not in ("in_turn", "own_ranks")
    counted = PlannedHits(
        ratio=hits.ratio,
        ratio_band=(low, hits.ratio),
        instances=reuse.instances,
        ranks=sum(island.instances * island.ranks for island in islands),
        if_instances=reuse.by_router["cache_aware"] if follows else None,
        if_ranks=reuse.by_router.get("ranks") if follows else None,
    )
    return predicted.model_copy(update={"prefix_hits": counted})


def describe_reuse(reuse: PrefixReuse, *, planned_ratio: float) -> str:
    """Describe the hits, and what the plan counts on."""
    ranks = sum(island.instances * island.ranks for island in reuse.islands or (reuse,))
    uneven = f"; the most loaded rank gets {reuse.most_loaded_ratio:.1f} times the mean requests"
    others = ", ".join(
        f"{format_ratio(ratio)} {_ROUTERS[router]}" for router, ratio in reuse.by_router.items()
    )
    return (
        f"by the hash_ids of the trace's first {reuse.requests} requests, {others} of the prompt"
        f" tokens are in the prefix caches of {ranks} rank{'s' * (ranks != 1)} with"
        f" {'at least ' * bool(reuse.islands)}{reuse.cache_blocks * BLOCK_TOKENS} tokens each,"
        " counted from empty caches;"
        f" {format_ratio(planned_ratio)} is planned on, a router {_ROUTERS[reuse.router]}"
        f"{uneven * (reuse.most_loaded_ratio > 1.0)}"
    )


_ROUTERS: Final = {
    "in_turn": "in turn",
    "own_ranks": "in turn to instances that follow the caches of their ranks",
    "cache_aware": "that follows caches",
    "ranks": "that follows caches of ranks",
}
