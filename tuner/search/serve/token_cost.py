"""Cost of a million input and output tokens, by the device-seconds that they take.

    C    money an hour of a group of equal instances
    p    device-seconds of a mean request's prompt    d    of its output tokens

    prefill instances      all of C is the input tokens'
    decode instances       all of C is the output tokens'
    aggregated ones        p / (p + d) of C is the input tokens', the rest the output tokens';
                           idle time is split in the same ratio
    multiplexed devices    the same, with p and d taken times the share of the SMs
    offloaded prompts      local instances prefill short prompts only

p is a single prompt on its rank, prefix hits not computed; d = O T(n) / n is a request's part of
steps without prompts at the batch n that the plan gives a rank. Over all input and output
tokens both prices add up to the cost of all devices:

    input tokens/s * input price + output tokens/s * output price = cost

Tokens found in the cache count as input tokens, as an API bills them.

Not covered: engines that run fewer sequences than the plan allows, whose output tokens cost more.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.offload import LengthThreshold
from tuner.plans.serve import TokenCost
from tuner.search.serve.demand import Demand
from tuner.search.serve.mixed_batches import prompt_time, split_iteration
from tuner.search.serve.options import Option, step_seconds
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.simulation import InstanceGroup

MILLION: Final = 1e6
HOUR_S: Final = 3600.0


def token_cost(solution: ModeSolution, problem: ServeProblem) -> TokenCost | None:
    """Return the cost of output tokens; None where a pool has no price or nothing comes."""
    demand, simulated = problem.demand, solution.simulated
    total = solution.price_per_hour
    inputs_per_s = input_tokens_per_s(solution, problem)
    if total is None or inputs_per_s <= 0.0 or simulated.output_tokens_per_s <= 0.0:
        return None
    prompts = sum(
        _price_per_hour(group) * prompt_ratio(group.option, demand, threshold=solution.threshold)
        for group in solution.groups
    )
    return TokenCost(
        currency=problem.spec.cluster.currency or "",
        input_per_million=prompts / HOUR_S / inputs_per_s * MILLION,
        output_per_million=(total - prompts) / HOUR_S / simulated.output_tokens_per_s * MILLION,
        input_ratio=prompts / total if total > 0.0 else 0.0,
    )


def input_tokens_per_s(solution: ModeSolution, problem: ServeProblem) -> float:
    """Tokens of the prompts that are served a second, cached ones included."""
    return solution.simulated.requests_per_s * problem.demand.input_tokens


def prompt_ratio(option: Option, demand: Demand, *, threshold: LengthThreshold | None) -> float:
    """Share of an instance's device-seconds that prompts take."""
    if option.role is not Role.AGGREGATED:
        return float(option.role is Role.PREFILL)
    demand = demand.on(option.role, ranks=option.degrees.attention_data)
    reading = writing = option.iteration
    share = 0.5
    if option.prefill_share_ratio is not None:
        share = option.prefill_share_ratio
        reading, writing = split_iteration(
            option.iteration, share, demand, step_tokens=option.step_tokens
        )
    prompt_s = prompt_time(reading, _read(demand, threshold), step_tokens=option.step_tokens).busy_s
    if threshold is not None:
        prompt_s *= 1.0 - threshold.long_share
    running_N = np.array([float(option.running)])
    step_s = float(step_seconds(writing, running_N, demand)[0]) / writing.tokens_per_step
    decode_s = demand.output_tokens * step_s / option.running
    return share * prompt_s / (share * prompt_s + (1.0 - share) * decode_s)


def _read(demand: Demand, threshold: LengthThreshold | None) -> Demand:
    """Return the prompts that an instance prefills itself."""
    if threshold is None:
        return demand
    tokens = threshold.input_tokens(is_long=False)
    return replace(demand, input_tokens=tokens, computed_tokens=tokens * threshold.computed_ratio)


def _price_per_hour(group: InstanceGroup) -> float:
    price = group.option.serving_pool.pool.price_per_device_hour or 0.0
    return group.count * group.option.devices * price
