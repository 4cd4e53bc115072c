"""What a million tokens of prompts and of answers cost, by the device-seconds that they take.

    C    money an hour of a group of equal instances
    p    device-seconds of a mean request's prompt    d    of the tokens of its answer

    prefill instances      all of C is the prompts'
    decode instances       all of C is the answers'
    aggregated ones        p / (p + d) of C is the prompts', the rest the answers'; idle time is
                           shared out alike
    shared devices         the same, with p and d taken times the share of the multiprocessors
    offloaded prompts      local instances read short prompts alone

p is a prompt alone on its rank, what is found in the prefix cache not computed; d = O T(n) / n is
an answer's part of steps without prompts at the batch n that the plan gives a rank. The two sums
over the tokens that come and go are the cost of all devices again:

    input tokens/s * input price + output tokens/s * output price = cost

Tokens found in the cache count as input tokens, as an API bills them.

Not covered: engines that answer fewer sequences than the plan lets them, whose answers take more.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.planner.serve.demand import Demand
from tuner.planner.serve.mixed_batches import prompt_time
from tuner.planner.serve.multiplexing import halves_of
from tuner.planner.serve.options import Option, step_seconds
from tuner.planner.serve.remote_prefill import Cut
from tuner.planner.serve.simulation import Group
from tuner.planner.serve.solve_mode import Found, Question
from tuner.serve_plan import Role, TokenCost

MILLION: Final = 1e6
HOUR_S: Final = 3600.0


def token_cost(found: Found, question: Question) -> TokenCost | None:
    """Return the cost of tokens of an answer; None where a pool has no price or nothing comes."""
    demand, played = question.demand, found.played
    total = found.price_per_hour
    inputs_per_s = input_tokens_per_s(found, question)
    if total is None or inputs_per_s <= 0.0 or played.output_tokens_per_s <= 0.0:
        return None
    prompts = sum(
        _price_per_hour(group) * prompt_ratio(group.option, demand, cut=found.cut)
        for group in found.groups
    )
    return TokenCost(
        currency=question.spec.cluster.currency or "",
        input_per_million=prompts / HOUR_S / inputs_per_s * MILLION,
        output_per_million=(total - prompts) / HOUR_S / played.output_tokens_per_s * MILLION,
        input_ratio=prompts / total if total > 0.0 else 0.0,
    )


def input_tokens_per_s(found: Found, question: Question) -> float:
    """Tokens of the prompts that are served a second, cached ones included."""
    return found.played.requests_per_s * question.demand.input_tokens


def prompt_ratio(option: Option, demand: Demand, *, cut: Cut | None) -> float:
    """Share of an instance's device-seconds that prompts take."""
    if option.role is not Role.AGGREGATED:
        return float(option.role is Role.PREFILL)
    reading = writing = option.iteration
    share = 0.5
    if option.prefill_share_ratio is not None:
        share = option.prefill_share_ratio
        reading, writing = halves_of(
            option.iteration, share, demand, step_tokens=option.step_tokens
        )
    prompt_s = prompt_time(reading, _read(demand, cut), step_tokens=option.step_tokens).busy_s
    if cut is not None:
        prompt_s *= 1.0 - cut.long_share
    running_N = np.array([float(option.running)])
    step_s = float(step_seconds(writing, running_N, demand)[0]) / writing.tokens_per_step
    answer_s = demand.output_tokens * step_s / option.running
    return share * prompt_s / (share * prompt_s + (1.0 - share) * answer_s)


def _read(demand: Demand, cut: Cut | None) -> Demand:
    """Return the prompts that an instance reads itself."""
    if cut is None:
        return demand
    tokens = cut.input_tokens(is_long=False)
    return replace(demand, input_tokens=tokens, computed_tokens=tokens * cut.computed_ratio)


def _price_per_hour(group: Group) -> float:
    price = group.option.site.pool.price_per_device_hour or 0.0
    return group.count * group.option.devices * price
