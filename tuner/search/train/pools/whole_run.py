"""The whole run of a chain over pools: its failures, checkpoints, length and cost.

Each pool's nodes fail at the stated rate and are replaced by spares of the same pool
(tuner/faults/kinds.py). Where repairs are priced, nodes of a used pool that the chain leaves idle
are spares too; pools that it does not use are neither waited for nor paid.
"""

from collections.abc import Sequence
from dataclasses import replace

from tuner.costs.train.shapes import number, single
from tuner.faults.forecast import Run, RunForecast, forecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.kinds import jobs_together, slowest
from tuner.faults.reliability import Jobs, Reliability, checkpoint_bytes
from tuner.faults.resolved import jobs_on_pool, resolved
from tuner.search.train.plan_fields import NEVER_FAILS
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool


def effective_step_s(chain: Chain, problem: PoolsProblem, *, step_s: float) -> float:
    """Seconds of wall clock per step with failures; the step itself where none are priced."""
    jobs, reliability = failure_model(chain, problem)
    return number(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def forecast_run(chain: Chain, problem: PoolsProblem, *, step_s: float) -> RunForecast | None:
    """Forecast the run; None where neither its length nor failures are stated."""
    goal = problem.specs[0].goal
    if goal.reliability is None and goal.tokens is None:
        return None
    jobs, reliability = failure_model(chain, problem)
    pools = [problem.priced_pools[index].pool for index in _used(chain)]
    spares = [float(kind.spare_nodes) for kind in jobs.kinds]
    standing_by = sum(n * pool.devices_per_node for n, pool in zip(spares, pools, strict=True))
    return forecast(
        Run(
            step_s=step_s,
            tokens_per_step=goal.tokens_per_step,
            tokens=goal.tokens,
            devices_per_node=standing_by / sum(spares) if sum(spares) else 0.0,
            price_per_device_hour=_price(jobs.kinds, pools),
        ),
        jobs=jobs,
        reliability=reliability,
    )


def failure_model(chain: Chain, problem: PoolsProblem) -> tuple[Jobs, Reliability | None]:
    """Return the jobs of a chain and their reliability; None where no failures are priced."""
    parameters = float(num_parameters(problem.any_pool.model))
    kinds, reliabilities = [], []
    for index in _used(chain):
        priced_pool, stated = problem.priced_pools[index], problem.specs[index].goal.reliability
        strategies = single(chain.candidate.on(index).strategies)
        kinds.append(
            jobs_on_pool(
                replace(strategies, pipeline=float(chain.pool_S.count(index))),
                parameters=parameters,
                pool=priced_pool.pool,
                stated=stated or NEVER_FAILS,
            )
        )
        if stated is not None:
            profile = None if priced_pool.measured is None else priced_pool.measured.profile
            reliabilities.append(
                resolved(
                    stated, host_bytes_per_s=priced_pool.sheet.host_bytes_per_s, profile=profile
                )
            )
    jobs = jobs_together(kinds, checkpoint_bytes=number(checkpoint_bytes(parameters)))
    return jobs, slowest(reliabilities) if reliabilities else None


def _used(chain: Chain) -> list[int]:
    return sorted(set(chain.pool_S))


def _price(kinds: Sequence[Jobs], pools: Sequence[Pool]) -> float | None:
    """Mean price of a device hour, spares included; None where a pool states none."""
    devices_total, paid = 0.0, 0.0
    for kind, pool in zip(kinds, pools, strict=True):
        if pool.price_per_device_hour is None:
            return None
        devices = float(kind.devices) + float(kind.spare_nodes) * pool.devices_per_node
        devices_total += devices
        paid += devices * pool.price_per_device_hour
    return paid / devices_total
