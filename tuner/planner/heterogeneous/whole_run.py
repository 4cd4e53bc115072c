"""The whole run of a chain over pools: its failures, checkpoints, length and bill.

Each pool's machines fail at the stated rate and are replaced by spares of the same pool
(tuner/faults/kinds.py). Where repairs are priced, machines of a pool that the chain leaves unused
stand by for it too; pools that it leaves out altogether are neither waited for nor paid.
"""

from collections.abc import Sequence
from dataclasses import replace

from tuner.costs.analytic.shapes import number, single
from tuner.faults.forecast import Run, RunForecast, forecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.kinds import jobs_together, slowest
from tuner.faults.reliability import Jobs, Reliability, checkpoint_bytes
from tuner.faults.resolved import jobs_of, resolved
from tuner.planner.analytic.plan_fields import NEVER_FAILS
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.chains import Chain
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool


def effective_step_s(chain: Chain, question: PoolsQuestion, *, step_s: float) -> float:
    """Seconds of wall clock per step with failures; the step itself where none are priced."""
    jobs, reliability = failures_of(chain, question)
    return number(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def run_of(chain: Chain, question: PoolsQuestion, *, step_s: float) -> RunForecast | None:
    """Forecast the run; None where neither its length nor failures are asked about."""
    goal = question.specs[0].goal
    if goal.reliability is None and goal.tokens is None:
        return None
    jobs, reliability = failures_of(chain, question)
    pools = [question.sites[index].pool for index in _used(chain)]
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


def failures_of(chain: Chain, question: PoolsQuestion) -> tuple[Jobs, Reliability | None]:
    """What decides the failures of a chain, and how often there are any."""
    parameters = float(num_parameters(question.alike.model))
    kinds, reliabilities = [], []
    for index in _used(chain):
        site, stated = question.sites[index], question.specs[index].goal.reliability
        strategies = single(chain.column.on(index).strategies)
        kinds.append(
            jobs_of(
                replace(strategies, pipeline=float(chain.pool_S.count(index))),
                parameters=parameters,
                pool=site.pool,
                stated=stated or NEVER_FAILS,
            )
        )
        if stated is not None:
            profile = None if site.measured is None else site.measured.profile
            reliabilities.append(
                resolved(stated, host_bytes_per_s=site.sheet.host_bytes_per_s, profile=profile)
            )
    jobs = jobs_together(kinds, checkpoint_bytes=number(checkpoint_bytes(parameters)))
    return jobs, slowest(reliabilities) if reliabilities else None


def _used(chain: Chain) -> list[int]:
    return sorted(set(chain.pool_S))


def _price(kinds: Sequence[Jobs], pools: Sequence[Pool]) -> float | None:
    """Price of a device hour on average over what is held; None where a pool states none."""
    held, paid = 0.0, 0.0
    for kind, pool in zip(kinds, pools, strict=True):
        if pool.price_per_device_hour is None:
            return None
        devices = float(kind.devices) + float(kind.spare_nodes) * pool.devices_per_node
        held += devices
        paid += devices * pool.price_per_device_hour
    return paid / held
