"""Answers one mode: instances by the integer program, their traffic played, spare capacity found.

A mode is one question, or where long prompts are offloaded one for each threshold, of which the one
with the least objective that keeps the targets counts (remote_prefill.py). The bound of several
questions is the least of theirs, at the goal's own spare capacity: no threshold of the grid and no
instances do better, whatever waiting asks for besides.

Instances of a role are of one kind where requests are spread in turn. Where the stack's router
follows load (routers.py), the program is asked for several kinds too, if these would cost less
before anything waits, and they are simulated behind that router.

Where waiting breaks a target the program is asked for more spare capacity until it holds: of
prefill instances where only first tokens are late, of the others where tokens are; then for as
little of both as bisection finds. Instances that come near the target by themselves are left out
beside that, in case fast ones need less.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from solvers.result import Status
from tuner.costs.serving.decoder import Decoder, Formats, decoder_of
from tuner.costs.serving.expert_loads import ExpertLoads
from tuner.planner.serve.afd_options import PricedCells
from tuner.planner.serve.demand import Demand, PrefixHits, demand_of, with_hits
from tuner.planner.serve.instances import formats_of_goal
from tuner.planner.serve.islands import island_layouts, island_shares, prefixes_kept
from tuner.planner.serve.kv_transfers import HandOvers, handovers_of
from tuner.planner.serve.launchable import launchable_cells, launchable_options, release_refuses
from tuner.planner.serve.mode_simulation import played_in
from tuner.planner.serve.multiplexing import shared_options
from tuner.planner.serve.options import Options, PoolSite
from tuner.planner.serve.program import (
    BOUND_TOLERANCE,
    ROLES,
    Solved,
    Spare,
    program_of,
    serving_columns,
    solve,
)
from tuner.planner.serve.recorded_loads import expert_loads
from tuner.planner.serve.remote_prefill import Cut, cut_options, cuts_of
from tuner.planner.serve.routers import (
    ROUTED,
    RouterChoice,
    choices_of,
    has_sessions,
    loses_prefixes,
)
from tuner.planner.serve.simulation import Group, Played, joined
from tuner.serve_plan import Role
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.manifests.registry import modes_on
from tuner.spec.serving.read import ServeSpec

PRICED: Final[Mapping[Mode, tuple[Role, ...]]] = {
    "aggregated": (Role.AGGREGATED,),
    "disaggregated": (Role.PREFILL, Role.DECODE),
    "attention_expert": (Role.PREFILL,),
    "shared_device": (Role.AGGREGATED, Role.DECODE),
    "prefill_offload": (Role.PREFILL, Role.AGGREGATED),
}
"""Roles whose ways to run an instance a mode is made of."""
MOST_SPARE: Final = 4.0
"""Share of the traffic's rate that is tried as spare capacity at most."""
FIRST_SPARE: Final = 0.25
TIGHTER_RATIOS: Final = (0.7, 0.45)
"""Of a target that waiting breaks: what instances may take by themselves."""
MOST_PLAYED: Final = 3
"""Of the thresholds of a mode, the best by their programs."""
PREFIX_ROUNDS: Final = 4
"""Times that hits are lowered by the number of instances; the last time to none."""
KEPT_TOLERANCE: Final = 0.02
"""Of the hits that are left, within which they agree with the instances."""
HIT_DIGITS: Final = 4
"""Of the share of prompt tokens in prefix caches that a plan states."""
SPARE_STEPS: Final = 4
"""Halvings of the interval in which the least spare capacity lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to look."""

    time_limit_s: float = 60.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """One mode's answer."""

    solved: Solved
    groups: tuple[Group, ...]
    played: Played
    spare: Spare
    missed: tuple[str, ...]
    cut: Cut | None = None
    """Where long prompts are prefilled on another pool."""
    bound: float = 0.0
    """Least objective of the mode's programs at the goal's own spare capacity, as proven."""
    eased: tuple[str, ...] = ()
    """Targets that are missed at the goal's own spare capacity, for which more was bought."""
    router: RouterChoice
    """How requests are spread."""
    covered_kinds: int = 1
    """Of instances in one role that the bound holds for."""
    prefix_hit: float | None = None
    """Share of prompts in the prefix cache, where a router looks for none; None: as stated."""
    rate_per_s: float | None = None
    """The most requests a second at which the targets hold, where that is the goal."""

    @property
    def objective(self) -> float:
        """Of the program; seconds per request that is served, where their rate is the goal."""
        return self.solved.outcome.objective if self.rate_per_s is None else 1.0 / self.rate_per_s

    @property
    def mode(self) -> Mode:
        """That is answered."""
        return self.solved.program.mode

    @property
    def price_per_hour(self) -> float | None:
        """Of all instances; None where a pool has no price."""
        prices = [group.option.site.pool.price_per_device_hour for group in self.groups]
        if any(price is None for price in prices):
            return None
        return sum(
            group.count * group.option.devices * (price or 0.0)
            for group, price in zip(self.groups, prices, strict=True)
        )

    @property
    def devices(self) -> int:
        """Of all instances."""
        return sum(group.count * group.option.devices for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """Everything that a mode is answered from."""

    spec: ServeSpec
    sites: tuple[PoolSite, ...]
    demand: Demand
    options: Options
    refused: Mapping[Role, str]
    """Roles whose every way the engine's release refuses, with the reason met most."""
    hand_overs: HandOvers
    decoder: Decoder
    formats: Formats
    settings: Settings
    loads: ExpertLoads | None = None
    """Recorded; None: those of the kernel tables."""
    cut: Cut | None = None
    """Where the question is of one threshold."""
    cells: PricedCells = field(default_factory=PricedCells)
    """Of attention and FFN servers, where the release has them."""
    simulated: dict[tuple[Any, ...], tuple[Played, Any]] = field(default_factory=dict)
    """What was simulated so far, by mode, instances, router and threshold."""
    hits: PrefixHits | None = None
    """What prefix caches hold of recorded prompts; None: the share that the traffic states."""
    narrow: "Callable[[Question], Question] | None" = None
    """What restricts the instances, again where the traffic is priced anew; None: nothing."""


def narrowed(question: Question, narrow: Callable[[Question], Question]) -> Question:
    """Return the question of other instances, which it keeps where its traffic is priced anew."""
    return replace(narrow(question), narrow=narrow)


def question_of(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    settings: Settings,
    *,
    hits: PrefixHits | None = None,
    demand: Demand | None = None,
) -> Question:
    """Read the traffic and price every way to run an instance.

    Args:
        spec: that is asked.
        sites: its pools.
        settings: how hard to look.
        hits: what prefix caches hold of recorded prompts; the question's traffic then states it.
        demand: of the same traffic, where it was read before.

    Raises:
        SpecError: the traffic, a recorded routing or its placement cannot be used.
    """
    if hits is not None:
        stated = {"prefix_hit": round(hits.ratio, HIT_DIGITS)}
        traffic = spec.goal.traffic.model_copy(update=stated)
        spec = replace(spec, goal=spec.goal.model_copy(update={"traffic": traffic}))
    decoder, formats = decoder_of(spec.model), formats_of_goal(spec.goal)
    longest = min(spec.goal.max_model_len or spec.model.max_position, spec.model.max_position)
    demand = demand_of(spec.goal, longest=longest) if demand is None else demand
    demand = demand if hits is None else with_hits(demand, hits)
    roles = tuple(
        dict.fromkeys(
            role for mode in get_args(Mode) if mode in spec.goal.modes for role in PRICED[mode]
        )
    )
    loads = expert_loads(spec.goal, spec.model)
    options = launchable_options(
        spec,
        sites,
        decoder=decoder,
        formats=formats,
        demand=demand,
        roles=roles,
        loads=loads,
    )
    cells = launchable_cells(
        spec, sites, decoder=decoder, formats=formats, demand=demand, loads=loads
    )
    handing = (*options.options, *cells.options, *cells.refused)
    return Question(
        spec=spec,
        sites=sites,
        demand=demand,
        options=options,
        refused=options.refused,
        hand_overs=handovers_of(spec, input_tokens=demand.input_tokens, options=handing),
        decoder=decoder,
        formats=formats,
        settings=settings,
        loads=loads,
        cells=cells,
        hits=hits,
    )


def variants_of(question: Question, mode: Mode) -> tuple[Question, ...]:
    """Return what a mode asks: one question, or one for each threshold; none where it cannot be."""
    match mode:
        case "shared_device":
            return _of_shares(question)
        case "prefill_offload":
            return tuple(_of_cuts(question))
        case "attention_expert":
            return _of_cells(question)
        case _:
            return (question,)


def _of_shares(question: Question) -> tuple[Question, ...]:
    made = shared_options(question.options.options, question.demand)
    launched = tuple(one for one in made if not release_refuses(one, question.spec))
    options = replace(question.options, options=launched or made)
    return (replace(question, options=options),) if made else ()


def _of_cells(question: Question) -> tuple[Question, ...]:
    """Take refused cells where there are no others, so that the answer says what refuses them."""
    cells = question.cells.options or question.cells.refused
    prefills = tuple(one for one in question.options.options if one.role is Role.PREFILL)
    options = replace(question.options, options=(*prefills, *cells))
    return (replace(question, options=options),) if cells else ()


def _of_cuts(question: Question) -> Iterator[Question]:
    if len(question.sites) < 2 or not question.spec.cluster.links:
        return
    for cut in cuts_of(question.spec.goal, question.demand):
        made = cut_options(question.options.options, cut, question.demand)
        # Flows count requests of the whole mix, of which only long ones move a cache.
        moved = handovers_of(
            question.spec,
            input_tokens=cut.long_share * cut.input_tokens(is_long=True),
            options=made,
        )
        yield replace(
            question,
            options=replace(question.options, options=made),
            hand_overs=replace(moved, between_pools=True),
            cut=cut,
        )


def answer(question: Question, mode: Mode, *, may_refuse: bool = True) -> Found | None:
    """Find the cheapest instances with which every target holds when the traffic is simulated.

    Args:
        question: everything that counts.
        mode: to be answered.
        may_refuse: leave out handovers that the engine's release refuses.
    """

    def behind_routers(asked: Question) -> Found | None:
        found: Found | None = None
        for router in routers_for(asked.spec, mode):
            found = answer_with(asked, mode, router, found, may_refuse=may_refuse)
        return found

    return with_hits_left(question, mode, behind_routers)


def with_hits_left(
    question: Question, mode: Mode, answered: Callable[[Question], Found | None]
) -> Found | None:
    """Answer a mode with the prefix hits that are left where a router looks for no prefixes.

    That may be the one of the instances, or the one in front of islands. An answer without islands
    to hits of islands keeps theirs, which are fewer than its own.

    Hits of recorded prompts are counted behind their router (prefix_reuse.py).

    Args:
        question: everything that counts.
        mode: to be answered.
        answered: answers a question with its own hits.
    """
    found = answered(question)
    goal = question.spec.goal
    is_counted = question.hits is not None
    pools = question.spec.cluster.pools
    loses = loses_prefixes(goal, question.spec.emit, mode, pools=pools)
    if found is None or is_counted or not has_sessions(goal):
        return found
    # What a cache finds follows from the number of caches, and that from what they find.
    kept = prefixes_kept(found.groups, loses=loses)
    for rounds_left in reversed(range(PREFIX_ROUNDS)):
        if kept == 1.0:
            return found
        hit = goal.traffic.prefix_hit * kept if rounds_left else 0.0
        found = answered(_with_hits(question, hit))
        if found is None:
            return None
        left = prefixes_kept(found.groups, loses=loses)
        if left >= kept * (1.0 - KEPT_TOLERANCE):
            return replace(found, prefix_hit=hit)
        kept = left
    return replace(found, prefix_hit=0.0)


def _with_hits(question: Question, hit: float) -> Question:
    """Price the question's traffic with another share of prompts in the prefix cache."""
    spec = question.spec
    traffic = spec.goal.traffic.model_copy(update={"prefix_hit": hit})
    goal = spec.goal.model_copy(update={"traffic": traffic})
    priced = question_of(replace(spec, goal=goal), question.sites, question.settings)
    return priced if question.narrow is None else narrowed(priced, question.narrow)


def solved_variants(
    question: Question, mode: Mode, spare: Spare, *, router: RouterChoice, may_refuse: bool
) -> list[tuple[Question, Solved]]:
    """Solve every variant of a question that has an answer, least objective first."""
    found = [
        (variant, solved)
        for variant in variants_of(question, mode)
        if (solved := solved_with(variant, mode, spare, router=router, may_refuse=may_refuse))
        is not None
    ]
    return sorted(found, key=lambda pair: pair[1].outcome.objective)


def answer_with(
    question: Question,
    mode: Mode,
    router: RouterChoice,
    before: Found | None,
    *,
    may_refuse: bool = True,
) -> Found | None:
    """Answer a mode with one way to route, where that may be better than what was found before.

    Args:
        question: everything that counts.
        mode: to be answered.
        router: how requests are spread.
        before: found so far; returned where nothing costs less.
        may_refuse: leave out handovers that the engine's release refuses.
    """
    least = least_spare(question)
    first = solved_variants(question, mode, least, router=router, may_refuse=may_refuse)
    if not first:
        return before
    bound = min(solved.outcome.bound for _, solved in first)
    found = before
    if before is not None:
        bound = min(bound, before.bound)
        found = replace(before, bound=bound, covered_kinds=router.most_kinds)
    for variant, solved in first[:MOST_PLAYED]:
        if not _may_be_better(solved, found):
            break
        base = _played(variant, solved, least, router)
        one = _least_spare(variant, base, found, may_refuse=may_refuse)
        one = replace(one, eased=base.missed)
        kept, found = found, _better(found, one)
        for tighter in _tightened(variant, base, one):
            again = solved_with(tighter, mode, least, router=router, may_refuse=may_refuse)
            if again is not None and _may_be_better(again, found):
                base_again = _played(tighter, again, least, router)
                tight = _least_spare(tighter, base_again, found, may_refuse=may_refuse)
                found = _better(found, replace(tight, eased=base.missed))
        if not found.missed and found is not kept:
            break
    return None if found is None else replace(found, bound=bound, covered_kinds=router.most_kinds)


def _may_be_better(solved: Solved, found: Found | None) -> bool:
    return (
        found is None
        or bool(found.missed)
        or solved.outcome.objective < found.objective * (1.0 - BOUND_TOLERANCE)
    )


def _better(one: Found | None, other: Found) -> Found:
    """Return the one that keeps the targets, then the one with the lower objective."""
    if one is None or (bool(other.missed), other.objective) < (bool(one.missed), one.objective):
        return other
    return one


def _tightened(question: Question, base: Found, found: Found) -> Iterator[Question]:
    """Leave out what comes near a missed target by itself, where spare capacity had to be bought.

    A program sees no waiting, so that it takes slow instances whose requests then wait too long.
    """
    is_launched = base.mode in modes_on(question.spec.goal, question.spec.cluster)
    is_least = found.objective <= base.objective * (1.0 + BOUND_TOLERANCE)
    if not base.missed or not is_launched or (is_least and not found.missed):
        return
    yield from tightened(question, base.missed)


def tightened(question: Question, missed: tuple[str, ...]) -> Iterator[Question]:
    """Yield the question without instances that come near missed targets by themselves."""
    demand = question.demand
    of_first = any(name.startswith("ttft") for name in missed)
    of_token = any(name.startswith("tpot") for name in missed)
    for ratio in TIGHTER_RATIOS:
        kept = tuple(
            option
            for option in question.options.options
            if not (of_first and option.ttft_s > ratio * demand.ttft_s)
            and not (of_token and option.tpot_s > ratio * demand.tpot_s)
        )
        if len(kept) < len(question.options.options):
            yield replace(question, options=replace(question.options, options=kept))


def least_spare(question: Question) -> Spare:
    """Return what the goal asks for in any case."""
    ratio = question.spec.goal.spare_ratio
    return Spare(prefill_ratio=ratio, others_ratio=ratio)


def _least_spare(
    question: Question, base: Found, before: Found | None, *, may_refuse: bool
) -> Found:
    """Raise spare capacity until the targets hold or nothing is gained, then lower it again."""
    mode, found = base.mode, base

    def at(spare: Spare) -> Found | None:
        return tried(question, mode, spare, base.router, before, may_refuse=may_refuse)

    low = found.spare
    while found.missed:
        raised = _raised(found, has_prefill=Role.PREFILL in ROLES[mode])
        more = None if raised is None else at(raised)
        if more is None:
            return found
        low, found = found.spare, more
    if found.spare.prefill_ratio > found.spare.others_ratio:
        found = _lowered(found, low.prefill_ratio, "prefill_ratio", at)
        return _lowered(found, least_spare(question).others_ratio, "others_ratio", at)
    found = _lowered(found, low.others_ratio, "others_ratio", at)
    if Role.PREFILL not in ROLES[mode]:
        return found
    return _lowered(found, least_spare(question).prefill_ratio, "prefill_ratio", at)


def _raised(found: Found, *, has_prefill: bool) -> Spare | None:
    """Twice the spare capacity of what makes requests late; None where that is tried at most."""
    spare = found.spare
    is_first = all(name.startswith("ttft") for name in found.missed)
    more = max(FIRST_SPARE, 2.0 * spare.prefill_ratio)
    if has_prefill and is_first and more <= MOST_SPARE:
        return replace(spare, prefill_ratio=more)
    more = max(FIRST_SPARE, 2.0 * spare.others_ratio)
    return replace(spare, others_ratio=more) if more <= MOST_SPARE else None


def _lowered(found: Found, low: float, side: str, at: Callable[[Spare], Found | None]) -> Found:
    """Bisect one side's spare capacity between what is too little and what suffices."""
    best, high = found, getattr(found.spare, side)
    for _ in range(SPARE_STEPS if high > low else 0):
        middle = 0.5 * (low + high)
        less = at(replace(best.spare, **{side: middle}))
        if less is not None and not less.missed:
            best, high = less, middle
        else:
            low = middle
    return best


def tried(
    question: Question,
    mode: Mode,
    spare: Spare,
    router: RouterChoice,
    before: Found | None,
    *,
    may_refuse: bool = True,
) -> Found | None:
    """Answer one question with that spare capacity, and simulate it.

    None where nothing serves it, or where it costs no less than what was found before.
    """
    solved = solved_with(question, mode, spare, router=router, may_refuse=may_refuse)
    if solved is None or not _may_be_better(solved, before):
        return None
    return _played(question, solved, spare, router)


def solved_with(
    question: Question, mode: Mode, spare: Spare, *, router: RouterChoice, may_refuse: bool
) -> Solved | None:
    """Choose instances behind one router, or in islands of one vendor each where that is less."""
    layouts = island_layouts(question.spec, mode)
    found = [
        solved
        for islands in layouts
        if (
            solved := _solved_as(
                question, mode, spare, router=router, may_refuse=may_refuse, islands=islands
            )
        )
    ]
    if not found:
        return None
    best = min(found, key=lambda solved: solved.outcome.objective)
    outcome = best.outcome
    bound = min(solved.outcome.bound for solved in found)
    is_open = bound < outcome.objective * (1.0 - BOUND_TOLERANCE)
    if outcome.status is Status.OPTIMAL and is_open:
        outcome = replace(outcome, status=Status.FEASIBLE)
    return replace(best, outcome=replace(outcome, bound=bound))


def _solved_as(
    question: Question,
    mode: Mode,
    spare: Spare,
    *,
    router: RouterChoice,
    may_refuse: bool,
    islands: Mapping[str, str],
) -> Solved | None:
    """Take as many kinds of instances for each role as the router can tell apart.

    Modes whose routing is not planned take two kinds where one does not serve the traffic.
    """
    for kinds in (router.most_kinds,) if mode in ROUTED else (1, 2):
        program = program_of(
            mode,
            question.options.options,
            sites=question.sites,
            hand_overs=question.hand_overs,
            demand=question.demand,
            spare=spare,
            may_refuse=may_refuse,
            most_kinds=kinds,
            islands=islands,
        )
        if program is None:
            return None
        solved = solve(program, time_limit_s=question.settings.time_limit_s / 4.0)
        if solved.outcome.solution is not None:
            return solved
    return None


def _played(question: Question, solved: Solved, spare: Spare, router: RouterChoice) -> Found:
    groups = groups_of(solved)
    played = play(question, solved.program.mode, groups, router=router)
    return Found(
        solved=solved,
        groups=groups,
        played=played,
        spare=spare,
        missed=played.missed(question.spec.goal.slo),
        cut=question.cut,
        router=router,
    )


def groups_of(solved: Solved) -> tuple[Group, ...]:
    """Return the instances that serve, prefill before others."""
    mode, islands = solved.program.mode, solved.program.islands
    groups = [
        Group(option=option, count=count, island=islands.get(option.site.pool.name, ""))
        for option, count in serving_columns(solved)
    ]
    if len({group.island for group in groups}) == 1:
        groups = [replace(group, island="") for group in groups]
    groups.sort(key=lambda group: ROLES[mode].index(group.option.role))
    if mode != "prefill_offload":
        return tuple(groups)
    # The program's decode reads short prompts too.
    return tuple(
        group
        if group.option.role is Role.PREFILL
        else replace(group, option=replace(group.option, role=Role.AGGREGATED))
        for group in groups
    )


def play(
    question: Question,
    mode: Mode,
    groups: Sequence[Group],
    *,
    router: RouterChoice | None = None,
) -> Played:
    """Simulate the question's traffic on instances, on each island its share.

    Args:
        question: with its traffic.
        mode: of the instances.
        groups: equal instances each.
        router: how requests are spread; None: the plainest that knows so many kinds.
    """
    shares = island_shares(groups)
    if shares:
        parts = [
            play(
                at_share(question, share),
                mode,
                [replace(group, island="") for group in groups if group.island == name],
                router=router,
            )
            for name, share in shares.items()
        ]
        return joined(parts, goal=question.spec.goal, weights=tuple(shares.values()))
    router = router or router_for(question, mode, groups)
    key = (
        mode,
        tuple((id(group.option), group.count) for group in groups),
        router,
        question.cut,
        id(question.demand),
        id(question.spec.goal),
    )
    if key not in question.simulated:
        played = played_in(
            mode,
            groups,
            router=router,
            cut=question.cut,
            hand_overs=question.hand_overs,
            goal=question.spec.goal,
            demand=question.demand,
        )
        # What is kept keeps its key: no other object can have the same identity.
        question.simulated[key] = (played, (groups, question.demand, question.spec.goal))
    return question.simulated[key][0]


def routers_for(spec: ServeSpec, mode: Mode) -> tuple[RouterChoice, ...]:
    """Return the ways to route that a mode of a spec is planned with, the plainest first."""
    return choices_of(spec.goal, spec.emit, mode, pools=spec.cluster.pools)


def router_for(question: Question, mode: Mode, groups: Sequence[Group]) -> RouterChoice:
    """Return the plainest way to route that knows so many kinds of instances."""
    routers = routers_for(question.spec, mode)
    kinds = Counter((group.option.role, group.island) for group in groups)
    return routers[0 if max(kinds.values()) == 1 else -1]


def at_share(question: Question, share: float) -> Question:
    """Return the question with that share of the traffic."""
    demand, traffic = question.demand, question.spec.goal.traffic
    if demand.concurrency is not None:
        fewer = max(1, round(share * demand.concurrency))
        demand = replace(demand, concurrency=fewer, rate_per_s=share * demand.rate_per_s)
        traffic = traffic.model_copy(update={"concurrency": fewer})
    else:
        demand = replace(demand, rate_per_s=share * demand.rate_per_s)
        traffic = traffic.model_copy(update={"rate": demand.rate_per_s})
    goal = question.spec.goal.model_copy(update={"traffic": traffic})
    return replace(question, spec=replace(question.spec, goal=goal), demand=demand)
