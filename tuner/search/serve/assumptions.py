"""Assumptions of a plan, in sentences: experts' loads, states, closed loops, tails, drafts."""

from collections.abc import Iterator
from typing import Final

from tuner.costs.serve.speculative import acceptance_words
from tuner.prices.serve.machine import LOAD
from tuner.search.reasons import zero_experts_note
from tuner.search.serve.choices import Choices
from tuner.search.serve.demand import Demand
from tuner.simulate.serving.client import DELAY_S, ROUNDS
from tuner.spec.accounting import state_bytes_per_sequence
from tuner.spec.files import shown_path
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_bytes, format_counted, format_ratio

LONG_RATIO: Final = 1.1
"""Tokens that a running sequence will hold over those of a mean request, from which on it is
said."""


def plan_assumptions(spec: ServeSpec, demand: Demand, choices: Choices) -> Iterator[str]:
    """Say what is not known of a deployment and was assumed."""
    yield from _loads(spec, choices)
    yield from _zero_experts(spec)
    yield from _states(spec)
    yield from _traffic(spec, demand)
    drafting = choices.drafting
    if drafting is not None:
        yield (
            f"{drafting.draft_tokens} drafted tokens,"
            f" {acceptance_words(drafting.rates)} of them kept where"
            f" all before were, make {drafting.tokens_per_step:.3g} tokens of a step; instances"
            " with them, with fewer and without were priced"
        )


def _loads(spec: ServeSpec, choices: Choices) -> Iterator[str]:
    goal = spec.goal
    if spec.model.moe is None:
        return
    if goal.routing is None:
        yield (
            f"experts bear the loads that their kernels were measured with ({LOAD}, as random"
            " prompts route; even ones on datasheets), not recorded ones: goal.routing names a"
            " recording"
        )
        return
    placed = "in order of ids"
    if goal.placement is not None:
        placed = f"as placed in {shown_path(goal.placement)}"
    yield f"experts bear the loads of {shown_path(goal.routing.path)}, {placed}"
    if choices.copies.is_launched:
        yield (
            "copies of experts, where an instance has some, go where EPLB puts them for these"
            " loads, as the engine's own balancer does once it has recorded them"
        )


def _zero_experts(spec: ServeSpec) -> Iterator[str]:
    """Say how many of a token's experts have weights, and what the engine does with the others."""
    moe = spec.model.moe
    if moe is None or not moe.zero_experts:
        return
    yield zero_experts_note(moe)
    computing = sorted(
        {release.name for release in spec.releases.values() if release.traits.computes_zero_copies}
    )
    if computing:
        yield (
            f"{', '.join(computing)}: copies for experts without weights are dispatched to expert 0"
            " and computed with weight 0, which loads its rank most"
        )


def _states(spec: ServeSpec) -> Iterator[str]:
    """Say what linear attention keeps, and what that does to prefix caches."""
    if spec.model.linear is None:
        return
    for release in {release.title: release for release in spec.releases.values()}.values():
        states = release.traits.memory_rule(release.release).states
        element = states.element_bytes(spec.model.architecture)
        size = format_bytes(state_bytes_per_sequence(spec.model, state_bytes=element))
        dtype = "fp32" if element == 4.0 else "bf16"
        yield (
            f"linear attention keeps {size} of a request, whatever its length, in {dtype}; memory"
            f" has room for {format_counted(states.per_request, 'such state')} of every running"
            f" request, as {release.title} keeps them at most"
        )
    yield (
        "a prefix is found up to where its state was kept: block ids of a trace are not counted as"
        " hits, a stated prefix_hit is taken as such"
    )


def _traffic(spec: ServeSpec, demand: Demand) -> Iterator[str]:
    traffic = spec.goal.traffic
    if demand.concurrency is not None:
        requests = traffic.requests or ROUNDS * demand.concurrency
        yield (
            f"the closed loop is simulated as benchmark clients do: {demand.concurrency} requests"
            f" at once, {requests} in all, each {DELAY_S * 1e3:.0f} ms after a"
            " request ends, of the lengths that the spec states; means hold the first burst too"
        )
    if traffic.prefix_hit and demand.cached_N is None:
        where = (
            "whichever instance a request meets"
            if traffic.prefix_scope == "common"
            else "the attention-data rank that served the request before of its session"
        )
        yield (
            f"{format_ratio(traffic.prefix_hit, digits=0)} of every prompt is found in the prefix"
            f" cache of {where}"
        )
    mean = demand.input_tokens + demand.output_tokens
    if demand.held_tokens > LONG_RATIO * mean:
        yield (
            f"long outputs run longest: a running sequence will hold {demand.held_tokens:.0f}"
            f" tokens on average, a request {mean:.0f}; {_room(spec)}"
        )


def _room(spec: ServeSpec) -> str:
    """Say what memory has room for, as the engine lets requests in."""
    if spec.main_release.traits.reserves_output:
        return "batches leave room for the whole outputs of all that run, except 1 % of the time"
    return (
        "batches leave room for what all that run hold, except 1 % of the time, when the newest is"
        " preempted and recomputed"
    )
