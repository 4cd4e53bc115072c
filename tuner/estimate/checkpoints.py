"""What a launch loses to failures by when it saves, and the smallest change that loses less.

The run is forecast as a plan's is (tuner/faults), with the launch's interval and way of saving. A
change sets the interval to the best one, or saves in the background, or both; of the two single
ones the better is the smallest, unless only both bring `LEAST_GAIN` of the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from tuner.costs.train.shapes import single
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.estimate.prices import PricedConfiguration, PricingSetup, to_strategies
from tuner.estimate.records import CheckpointChange, CheckpointEstimate
from tuner.faults.forecast import RunForecast, TrainingRun, forecast
from tuner.faults.resolved import jobs_on_pool, resolved
from tuner.spec.accounting import num_parameters
from tuner.spec.goal import Reliability
from tuner.spec.spec import Spec

LEAST_GAIN: Final = 0.002
"""Share of the wall clock; less is not worth a change."""
FORMS: Final[Mapping[TrainingEngine, tuple[str, str]]] = {
    TrainingEngine.MEGATRON: ("--save-interval {}", "--async-save --use-persistent-ckpt-worker"),
    TrainingEngine.TORCHTITAN: ("checkpoint.interval = {}", 'checkpoint.async_mode = "async"'),
}
"""By engine: how it writes the steps between checkpoints, and that it saves in the background."""

Change = tuple[tuple[str, ...], RunForecast]
"""Lines of a launch, and the run with them."""


class RunOf(Protocol):
    """Forecasts the run with other checkpoints."""

    def __call__(self, steps: int | None, /, *, in_background: bool) -> RunForecast:
        """Return it; without steps, at the best interval."""


def price_checkpoints(
    spec: Spec, launch: LaunchSettings, priced: PricedConfiguration, setup: PricingSetup
) -> CheckpointEstimate | None:
    """Forecast the run as launched and with a better way to save.

    None where the spec states no failures, or the engine's launch does not say when it saves.
    """
    stated = spec.goal.reliability
    if stated is None or launch.engine not in FORMS:
        return None

    def run_of(steps: int | None, *, in_background: bool) -> RunForecast:
        interval_s = None if steps is None else steps * priced.step_s
        update = {"interval": interval_s, "asynchronous": in_background}
        checkpoint = stated.checkpoint.model_copy(update=update)
        return _run(spec, stated.model_copy(update={"checkpoint": checkpoint}), priced, setup)

    as_launched = (
        None
        if launch.save_interval is None
        else run_of(launch.save_interval, in_background=launch.saves_in_background)
    )
    changes = list(_changes(launch, run_of))
    return CheckpointEstimate(
        interval_steps=launch.save_interval,
        in_background=launch.saves_in_background,
        run=as_launched,
        change=_smallest(as_launched, changes),
    )


def _changes(launch: LaunchSettings, run_of: RunOf) -> Iterator[Change]:
    """Yield the lines of every change with its run, single ones first."""
    interval, background = FORMS[launch.engine]
    for in_background in (launch.saves_in_background, True):
        best = run_of(None, in_background=in_background)
        lines = (interval.format(best.checkpoint_interval_steps),)
        yield lines + (background,) * (in_background > launch.saves_in_background), best
    if launch.save_interval is not None and not launch.saves_in_background:
        yield (background,), run_of(launch.save_interval, in_background=True)


def _smallest(now: RunForecast | None, changes: Sequence[Change]) -> CheckpointChange | None:
    before = 0.0 if now is None else now.effective_time_ratio

    def gain(one: Change) -> float:
        return one[1].effective_time_ratio - before

    for lines in (1, 2):
        usable = [one for one in changes if len(one[0]) == lines and gain(one) >= LEAST_GAIN]
        if usable:
            best = max(usable, key=gain)
            return CheckpointChange(lines=best[0], run=best[1], gain_ratio=gain(best))
    return None


def _run(
    spec: Spec, stated: Reliability, priced: PricedConfiguration, setup: PricingSetup
) -> RunForecast:
    pool = setup.pool
    jobs = jobs_on_pool(
        single(to_strategies(priced.configuration, setup)),
        parameters=float(num_parameters(spec.model)),
        pool=pool,
        stated=stated,
    )
    profile = None if setup.measured is None else setup.measured.profile
    model = resolved(stated, host_bytes_per_s=setup.sheet.host_bytes_per_s, profile=profile)
    run = TrainingRun(
        step_s=priced.step_s,
        tokens_per_step=priced.configuration.global_batch * priced.configuration.sequence,
        tokens=spec.goal.tokens,
        devices_per_node=pool.devices_per_node,
        price_per_device_hour=pool.price_per_device_hour,
    )
    return forecast(run, jobs=jobs, reliability=model)
