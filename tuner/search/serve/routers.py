"""The router as part of the decision: which policy each mode is planned with.

    one kind of instances      round robin, which every router has; where bursts queue too long,
                               the least loaded instance
    several kinds              by load over what each may run at once; where the stack's router has
                               no weights, by load alone, simulated as such
    disaggregated              the least loaded, of each role
    prefixes of sessions       cache-aware where the stack has it; elsewhere a returning session
                               finds its prefix on one instance of n, so that 1 / n of the hits are
                               left
        on d attention ranks   each has a cache of its own: a router that chooses among ranks keeps
                               all hits, as does an engine that looks for prefixes on its own
                               ranks; elsewhere 1 / d are left

A policy must be one of every stack that the spec names (`emit`), with every engine of its pools.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.catalog.serve_rules.autoscalers import named_autoscaler
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.routers import (
    RouterCapabilities,
    router_stacks,
    router_with,
)
from tuner.config.serve import Role, ServeRouter
from tuner.search.serve.demand import HitsByRanks, PrefixHits, spread_hits
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.routers import CACHE_THRESHOLD, RouterPolicy

MOST_KINDS: Final = 3
"""Largest number of kinds of instances in one role where the router follows load."""
_BY_LOAD: Final = (
    RouterPolicy.LEAST_REQUESTS,
    RouterPolicy.POWER_OF_TWO,
    RouterPolicy.ROUND_ROBIN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterChoice:
    """Choice of the policies that spread requests over the instances of a mode."""

    policy: RouterPolicy
    """Policy for one kind of aggregated or prefill instances."""
    mixed_policy: RouterPolicy
    """Policy for several kinds of aggregated or prefill instances."""
    decode_policy: RouterPolicy | None = None
    """Policy for decode instances; None: there are none."""
    holds_prefill: bool = False
    """Whether a request counts on its prefill instance until it ends."""
    has_sessions: bool = False
    """Whether prefixes lie on the instance of a session's request before."""
    to_ranks: bool = False
    """The cache-aware policy chooses among the attention-data ranks of all instances."""
    finds_ranks: bool = False
    """Instances look for a prefix among their own attention-data ranks."""
    is_one_count: bool = False
    """These instances must have equally many ranks, as an option names their number."""
    most_kinds: int = 1

    @property
    def keeps_hits_on_ranks(self) -> bool:
        """Whether a request gets to the attention-data rank of its instance with its prefix."""
        return self.to_ranks or self.finds_ranks


def router_choices(
    goal: ServeGoal,
    targets: Iterable[str],
    *,
    is_disaggregated: bool,
    is_routed: bool = True,
    releases: Collection[ServingCapabilities],
) -> tuple[RouterChoice, ...]:
    """Return the router choices that a mode is planned with, the simplest first.

    Args:
        goal: with its engines and prefixes.
        targets: that the spec names.
        is_disaggregated: prompts are prefilled on instances of their own.
        is_routed: the mode's routing is planned.
        releases: of the engines that serve.
    """
    stacks = stack_routers(targets, releases)
    keeps = has_sessions(goal) and _have(
        stacks, RouterPolicy.CACHE_AWARE, is_disaggregated=is_disaggregated
    )
    options = _ranks_options(stacks, is_disaggregated=is_disaggregated) if keeps else (None,)
    to_ranks, is_one_count = None not in options, any(options)
    finds_ranks = all(release.finds_ranks for release in releases)
    if not is_routed:
        # Simulated round robin; every prefix is a hit where it is looked for.
        plain = RouterPolicy.CACHE_AWARE if keeps else RouterPolicy.ROUND_ROBIN
        decode = RouterPolicy.ROUND_ROBIN if is_disaggregated else None
        return (
            RouterChoice(
                policy=plain,
                mixed_policy=plain,
                decode_policy=decode,
                to_ranks=to_ranks,
                finds_ranks=finds_ranks,
            ),
        )
    load = (
        RouterPolicy.CACHE_AWARE
        if keeps
        else _first(stacks, _BY_LOAD, is_disaggregated=is_disaggregated)
    )
    mixed = load
    if not keeps and _have(
        stacks, RouterPolicy.WEIGHTED_LEAST_REQUESTS, is_disaggregated=is_disaggregated
    ):
        mixed = RouterPolicy.WEIGHTED_LEAST_REQUESTS
    plain = load if is_disaggregated or keeps else RouterPolicy.ROUND_ROBIN
    by_load = RouterChoice(
        policy=load,
        mixed_policy=mixed,
        decode_policy=_decode(stacks, load) if is_disaggregated else None,
        holds_prefill=any(router.holds_prefill for stack in stacks for router in stack[:1])
        and is_disaggregated,
        has_sessions=keeps,
        to_ranks=to_ranks,
        finds_ranks=finds_ranks,
        is_one_count=is_one_count,
        most_kinds=MOST_KINDS,
    )
    if named_autoscaler(targets) is not None:
        # Instances that were just added are idle beside busy ones, and have a common target.
        return (replace(by_load, mixed_policy=load, most_kinds=1),)
    one_kind = RouterChoice(
        policy=plain,
        mixed_policy=plain,
        decode_policy=by_load.decode_policy,
        holds_prefill=by_load.holds_prefill,
        has_sessions=keeps,
        to_ranks=to_ranks,
        finds_ranks=finds_ranks,
        is_one_count=is_one_count,
    )
    return (one_kind, by_load)


def reaches_ranks(
    goal: ServeGoal,
    targets: Iterable[str],
    role: Role,
    *,
    releases: Collection[ServingCapabilities],
) -> bool:
    """Return whether prefixes are looked for on ranks of aggregated or prefill instances."""
    is_disaggregated = role is Role.PREFILL
    choices = router_choices(goal, targets, is_disaggregated=is_disaggregated, releases=releases)
    return choices[0].keeps_hits_on_ranks


def stated_hits(
    goal: ServeGoal, targets: Iterable[str], *, releases: Collection[ServingCapabilities]
) -> HitsByRanks | None:
    """Return what is left of stated hits on so many ranks; None: everything on any."""
    if not has_sessions(goal):
        return None
    named = tuple(targets)
    reached = {role: reaches_ranks(goal, named, role, releases=releases) for role in Role}
    stated = goal.traffic.prefix_hit

    def left(role: Role, ranks: int) -> PrefixHits | None:
        return None if reached[role] else spread_hits(stated, places=ranks)

    return None if all(reached.values()) else left


def missing_ranks(targets: Iterable[str], *, releases: Collection[ServingCapabilities]) -> str:
    """Return why an option of a named router for ranks reaches none; empty: it has no option."""
    stacks = stack_routers(targets, releases)
    return next(
        (router.lacks_ranks for stack in stacks for router in stack if router.lacks_ranks), ""
    )


def _ranks_options(
    stacks: Iterable[tuple[RouterCapabilities, ...]], *, is_disaggregated: bool
) -> tuple[str | None, ...]:
    """Return each stack's option for attention-data ranks of its cache-aware router."""
    routers = (
        router_with(stack, RouterPolicy.CACHE_AWARE, is_disaggregated=is_disaggregated)
        for stack in stacks
    )
    return tuple(
        None if router is None else router.ranks_option(is_disaggregated=is_disaggregated)
        for router in routers
    )


def has_sessions(goal: ServeGoal) -> bool:
    """Return whether prefixes lie on single instances."""
    return goal.traffic.prefix_hit > 0.0 and goal.traffic.prefix_scope == "session"


def stack_routers(
    targets: Iterable[str], releases: Collection[ServingCapabilities]
) -> tuple[tuple[RouterCapabilities, ...], ...]:
    """Return the routers of every stack that such releases may be served by."""
    return router_stacks(tuple(release.routers for release in releases), targets)


def loses_prefixes(
    goal: ServeGoal,
    targets: Iterable[str],
    *,
    is_disaggregated: bool,
    releases: Collection[ServingCapabilities],
) -> bool:
    """Return whether prefixes lie on single instances and no router of the stack looks for them."""
    stacks = stack_routers(targets, releases)
    return has_sessions(goal) and not _have(
        stacks, RouterPolicy.CACHE_AWARE, is_disaggregated=is_disaggregated
    )


def to_serve_router(
    choice: RouterChoice,
    goal: ServeGoal,
    *islands: Sequence[tuple[Role, int]],
    is_counted: bool = False,
    is_scaled: bool = False,
    ranks: int = 1,
) -> ServeRouter | None:
    """Return the router of a decision; None where it has no choice.

    Args:
        choice: of the solution.
        goal: with the prefixes.
        islands: of each, role and number of each kind of its instances.
        is_counted: hits were counted of recorded prompts, at the router's default threshold; else a
            prefix is followed from half its length on, or from there.
        is_scaled: an autoscaler adds to instances that are alone in their role, too.
        ranks: of attention data parallelism, of instances that requests go to first.
    """
    kinds = [_first_counts(groups) for groups in islands]
    to_ranks = choice.to_ranks and ranks > 1
    first = max(sum(counts) for counts in kinds) * (ranks if to_ranks else 1)
    last = max(
        sum(count for _, count in groups) - sum(counts)
        for groups, counts in zip(islands, kinds, strict=True)
    )
    if is_scaled:
        first, last = max(first, 2), 2 * min(last, 1)
    if first <= 1 and last <= 1:
        return None
    # Some routers refuse to choose from one, and none needs to.
    policy = choice.policy if max(map(len, kinds)) == 1 else choice.mixed_policy
    policy = policy if first > 1 else RouterPolicy.ROUND_ROBIN
    decode = choice.decode_policy if last > 1 else RouterPolicy.ROUND_ROBIN
    threshold = None
    if policy is RouterPolicy.CACHE_AWARE:
        half = CACHE_THRESHOLD if is_counted else goal.traffic.prefix_hit / 2.0
        threshold = round(min(CACHE_THRESHOLD, half), 2)
    return ServeRouter(
        policy=policy,
        decode_policy=decode if last else None,
        cache_threshold=threshold,
        ranks=ranks if to_ranks else None,
    )


def _first_counts(groups: Sequence[tuple[Role, int]]) -> list[int]:
    """Return the numbers of the instances that requests go to first, by kind."""
    prefill = [count for role, count in groups if role is Role.PREFILL]
    return prefill or [count for role, count in groups if role is not Role.DECODE]


def _decode(
    stacks: Iterable[tuple[RouterCapabilities, ...]], prefill: RouterPolicy
) -> RouterPolicy:
    """Return the policy of decode instances beside that of prefill."""
    stacks = tuple(stacks)
    if any(stack[0].one_policy for stack in stacks):
        return prefill
    shared = prefill is RouterPolicy.CACHE_AWARE and any(stack[0].threshold for stack in stacks)
    return _first(stacks, _BY_LOAD[1:] if shared else _BY_LOAD, is_disaggregated=True)


def _have(
    stacks: Iterable[tuple[RouterCapabilities, ...]],
    policy: RouterPolicy,
    *,
    is_disaggregated: bool,
) -> bool:
    return all(
        router_with(stack, policy, is_disaggregated=is_disaggregated) is not None
        for stack in stacks
    )


def _first(
    stacks: Iterable[tuple[RouterCapabilities, ...]],
    policies: Iterable[RouterPolicy],
    *,
    is_disaggregated: bool,
) -> RouterPolicy:
    stacks = tuple(stacks)
    choices = (
        policy for policy in policies if _have(stacks, policy, is_disaggregated=is_disaggregated)
    )
    return next(choices, RouterPolicy.ROUND_ROBIN)
