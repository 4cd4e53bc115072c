"""Answers one mode: instances by the integer program, their traffic played, spare capacity found.

Where waiting breaks a target the program is asked for more spare capacity, by bisection, until it
holds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from tuner.costs.serving.decoder import Decoder, Formats, decoder_of
from tuner.planner.serve.demand import Demand, demand_of
from tuner.planner.serve.handovers import HandOvers, handovers_of
from tuner.planner.serve.instances import formats_of_goal
from tuner.planner.serve.launchable import launchable_options
from tuner.planner.serve.options import (
    Options,
    PoolSite,
)
from tuner.planner.serve.playing import Group, Played, played_apart, played_together
from tuner.planner.serve.program import (
    ROLES,
    Mode,
    Solved,
    program_of,
    serving_columns,
    solve,
)
from tuner.planner.serve.recorded_loads import expert_loads
from tuner.serve_plan import Role
from tuner.spec.serving.read import ServeSpec

MOST_SPARE: Final = 4.0
"""Share of the traffic's rate that is tried as spare capacity at most."""
SPARE_STEPS: Final = 5
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
    spare_ratio: float
    missed: tuple[str, ...]

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


def question_of(spec: ServeSpec, sites: tuple[PoolSite, ...], settings: Settings) -> Question:
    """Read the traffic and price every way to run an instance.

    Raises:
        SpecError: the traffic cannot be read.
    """
    decoder, formats = decoder_of(spec.model), formats_of_goal(spec.goal)
    longest = min(spec.goal.max_model_len or spec.model.max_position, spec.model.max_position)
    demand = demand_of(spec.goal, longest=longest)
    roles = tuple(
        dict.fromkeys(
            role for mode in get_args(Mode) if mode in spec.goal.modes for role in ROLES[mode]
        )
    )
    options = launchable_options(
        spec,
        sites,
        decoder=decoder,
        formats=formats,
        demand=demand,
        roles=roles,
        loads=expert_loads(spec.goal, spec.model),
    )
    return Question(
        spec=spec,
        sites=sites,
        demand=demand,
        options=options,
        refused=options.refused,
        hand_overs=handovers_of(spec, input_tokens=demand.input_tokens, options=options.options),
        decoder=decoder,
        formats=formats,
        settings=settings,
    )


def answer(question: Question, mode: Mode, *, may_refuse: bool = True) -> Found | None:
    """Find the least spare capacity with which every target holds when the traffic is played.

    Args:
        question: everything that counts.
        mode: to be answered.
        may_refuse: leave out handovers that the engine's release refuses.
    """
    least = question.spec.goal.spare_ratio
    found = tried(question, mode, least, may_refuse=may_refuse)
    if found is None or not found.missed:
        return found
    high = max(0.25, 2.0 * least)
    best = None
    while best is None and high <= MOST_SPARE:
        more = tried(question, mode, high, may_refuse=may_refuse)
        if more is None:
            break
        found = more
        if not more.missed:
            best = more
        else:
            least, high = high, 2.0 * high
    if best is None:
        return found
    low = least
    for _ in range(SPARE_STEPS):
        middle = 0.5 * (low + best.spare_ratio)
        less = tried(question, mode, middle, may_refuse=may_refuse)
        if less is not None and not less.missed:
            best = less
        else:
            low = middle
    return best


def tried(
    question: Question, mode: Mode, spare_ratio: float, *, may_refuse: bool = True
) -> Found | None:
    """Answer a mode with that spare capacity, and play it; None where nothing serves so much."""
    program = program_of(
        mode,
        question.options.options,
        sites=question.sites,
        hand_overs=question.hand_overs,
        demand=question.demand,
        spare_ratio=spare_ratio,
        may_refuse=may_refuse,
    )
    if program is None:
        return None
    solved = solve(program, time_limit_s=question.settings.time_limit_s / 4.0)
    if solved.outcome.solution is None:
        return None
    groups = groups_of(solved)
    played = play(question, mode, groups)
    return Found(
        solved=solved,
        groups=groups,
        played=played,
        spare_ratio=spare_ratio,
        missed=played.missed(question.spec.goal.slo),
    )


def groups_of(solved: Solved) -> tuple[Group, ...]:
    """Return the instances that serve, prefill before decode."""
    order = ROLES[solved.program.mode]
    groups = (Group(option=option, count=count) for option, count in serving_columns(solved))
    return tuple(sorted(groups, key=lambda group: order.index(group.option.role)))


def play(question: Question, mode: Mode, groups: Sequence[Group]) -> Played:
    """Play the question's traffic against instances."""
    goal, demand = question.spec.goal, question.demand
    if mode == "aggregated":
        return played_together(groups, goal=goal, demand=demand)
    prefill = _fused([group for group in groups if group.option.role is Role.PREFILL])
    decode = _fused([group for group in groups if group.option.role is Role.DECODE])
    return played_apart(prefill, decode, hand_overs=question.hand_overs, goal=goal, demand=demand)


def _fused(groups: Sequence[Group]) -> Group:
    """Stand the slowest kind for all of a role, as many of them as serve what all do."""
    slowest = min(groups, key=lambda group: group.option.rate_per_s / group.option.devices)
    rate = sum(group.rate_per_s for group in groups)
    return Group(option=slowest.option, count=max(1, int(rate / slowest.option.rate_per_s)))
