"""Time that a launch loses to failures by when it saves, and the smallest change that loses less.

The run is forecast as a plan's is (tuner/faults), with the launch's interval and way of saving. A
change sets the interval to the best one, or saves in the background, or both; of the two single
changes the better one is proposed, unless only both bring `LEAST_GAIN` of the time. A launch that
saves to hosts keeps its replicas and gets both intervals; one that does not gets the lines for it
where the spec asks for copies on hosts (`levels`). A folder or switch without which an interval has
no effect is named with it, saving in the background only where every release that the spec names
can do it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tuner.catalog.manifest import Capabilities
from tuner.catalog.programs import background_checkpoint_obstacle
from tuner.config.shapes import number, single
from tuner.costs.train.adapters import num_adapter_parameters
from tuner.costs.train.columns_of import shape_of_model
from tuner.engines.checkpoints import KEPT, retain_steps
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.engines.targets import TARGETS, programs
from tuner.estimate.prices import PricedConfiguration, PricingSetup, to_strategies
from tuner.estimate.records import CheckpointChange, CheckpointEstimate, CheckpointRoom
from tuner.faults.forecast import RunForecast, TrainingRun, forecast
from tuner.faults.level_seconds import copied_bytes, host_bytes
from tuner.faults.reliability import Jobs
from tuner.faults.resolved import host_level, jobs_on_pool, resolved
from tuner.spec.accounting import num_parameters
from tuner.spec.goal import NEVER_FAILS, ONE_LEVEL, TWO_LEVELS, Reliability
from tuner.spec.spec import Spec

LEAST_GAIN: Final = 0.002
"""Share of the wall clock; less is not worth a change."""
MOST_SPARES: Final = 16
"""Spare nodes that are tried to end the waiting for repairs."""
SAVE_FORM: Final = "--save DIR "
"""Megatron-LM saves nothing without a folder."""
ENABLE_FORM: Final = "checkpoint.enable = true, "
"""Torchtitan saves nothing without it."""
FORMS: Final[Mapping[TrainingEngine, tuple[str, str]]] = {
    TrainingEngine.MEGATRON: ("--save-interval {}", "--async-save --use-persistent-ckpt-worker"),
    TrainingEngine.MS_SWIFT: (
        "--save_steps {}",
        "--async_save true --use_persistent_ckpt_worker true",
    ),
    TrainingEngine.TORCHTITAN: (
        "checkpoint.interval = {}",
        'checkpoint.async_mode = "async_with_pinned_mem"',
    ),
}
"""Spelling of the steps between checkpoints, and of saving in the background, by engine."""
_TARGET_OF: Final[Mapping[TrainingEngine, str]] = {
    TrainingEngine.MEGATRON: "megatron-lm",
    TrainingEngine.MS_SWIFT: "ms-swift",
    TrainingEngine.TORCHTITAN: "torchtitan",
}
"""Target whose checkpoints a launch writes, by engine."""
HOST_FORM: Final = "--non-persistent-save-interval {}"
TO_HOSTS: Final = (
    "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir FOLDER"
    " --non-persistent-save-interval {}"
)
REPLICATED: Final = " --replication --replication-jump {} --replication-factor {}"

Replicas = Literal["auto"] | int
ChangedRun = tuple[tuple[str, ...], RunForecast]
"""Lines of a launch, and the run with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Way in which a launch saves; an interval of None is the best one."""

    steps: int | None
    in_background: bool
    from_pinned: bool = False
    on_hosts: bool = False
    host_steps: int | None = None
    replicas: Replicas = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A launch whose run is forecast."""

    spec: Spec
    stated: Reliability
    priced: PricedConfiguration
    setup: PricingSetup

    def forecast(self, saving: Saving) -> RunForecast:
        """Forecast the run with some way to save."""
        step_s = self.priced.step_s
        levels = TWO_LEVELS if saving.on_hosts and _loses_nodes(self.stated) else ONE_LEVEL
        update = {
            "interval": None if saving.steps is None else saving.steps * step_s,
            "asynchronous": saving.in_background,
            "levels": levels,
            "host_interval": None if saving.host_steps is None else saving.host_steps * step_s,
            "replicas": saving.replicas,
        }
        checkpoint = self.stated.checkpoint.model_copy(update=update)
        stated = self.stated.model_copy(update={"checkpoint": checkpoint})
        return _forecast(self, stated, from_pinned=saving.from_pinned)


def price_checkpoints(
    spec: Spec, launch: LaunchSettings, priced: PricedConfiguration, setup: PricingSetup
) -> CheckpointEstimate | None:
    """Forecast the run as launched and with a better way to save.

    None where the spec states no failures, or the engine's launch does not say when it saves.
    """
    stated = spec.goal.reliability
    if stated is None or launch.engine not in FORMS:
        return None
    if not launch.restarts_in_process:
        stated = stated.model_copy(update={"in_process_restart": None})
    run = LaunchedRun(spec=spec, stated=stated, priced=priced, setup=setup)
    now = _as_launched(launch, devices_per_node=setup.pool.devices_per_node)
    as_launched = None if now is None else run.forecast(now)
    changes = list(_changes(launch, run))
    spares, spared = _more_spares(run, now)
    return CheckpointEstimate(
        interval_steps=launch.save_interval,
        in_background=launch.saves_in_background,
        from_pinned_memory=launch.saves_from_pinned_memory,
        host_interval_steps=launch.host_save_interval if now is not None and now.on_hosts else None,
        run=as_launched,
        room=None if as_launched is None else _room(launch, as_launched),
        change=_smallest(as_launched, changes),
        more_spare_nodes=spares,
        spared_time_ratio=spared,
    )


def _more_spares(run: LaunchedRun, saving: Saving | None) -> tuple[int, float]:
    """Return spare nodes that end the waiting for repairs, and the share that then trains."""
    stated, best = run.stated, (0, 0.0)
    if saving is None or stated.repair is None:
        return best
    for more in range(MOST_SPARES + 1):
        spares = stated.model_copy(update={"spare_nodes": stated.num_spare_nodes + more})
        spared = replace(run, stated=spares).forecast(saving)
        best = more, spared.effective_time_ratio
        if not spared.finishes or spared.time_ratios.get("waiting", 0.0) < LEAST_GAIN:
            break
    return best


def _room(launch: LaunchSettings, run: RunForecast) -> CheckpointRoom:
    """Count checkpoints with those that the launch keeps, and with the fewest that it can."""
    interval = launch.save_interval
    assert interval is not None
    # All of these engines save at the end of a run, too.
    saved = None if run.steps is None else math.ceil(run.steps / interval)

    def max_kept(newest: int, retain: int | None) -> int | None:
        if saved is None or run.steps is None:
            return None if retain is not None else newest + 1
        stay = 0 if retain is None else run.steps // retain
        return min(newest + 1 + stay, saved)

    if launch.kept_checkpoints is not None:
        return CheckpointRoom(most=max_kept(launch.kept_checkpoints, launch.retain_interval))
    if "kept_checkpoints" in launch.spelled:
        line, fewest = f"{launch.name('kept_checkpoints')} = {KEPT}", max_kept(KEPT, None)
    else:
        retain = retain_steps(interval, run.steps)
        line, fewest = f"{launch.name('retain_interval')} {retain}", max_kept(1, retain)
    if saved is not None and saved == fewest:
        return CheckpointRoom(most=saved)
    return CheckpointRoom(most=saved, change=line, change_most=fewest)


def failure_notes(spec: Spec, launch: LaunchSettings) -> Iterator[str]:
    """Say what of the stated failures has no effect on a launch."""
    stated = spec.goal.reliability
    if stated is None:
        return
    devices = spec.cluster.pools[0].devices_per_node
    now = _as_launched(launch, devices_per_node=devices)
    if launch.host_copies > 1 and now is not None and now.replicas == 0:
        yield (
            f"--replication-jump {launch.replication_jump} leaves all {launch.host_copies} copies"
            f" of a rank on its own node, which takes them along; --replication-jump {devices}"
            " sends them to others"
        )
    if now is not None and now.on_hosts and not _loses_nodes(stated):
        yield (
            "checkpoints on hosts are left out of the forecast, which needs a rate at which nodes"
            " are lost: state node_mtbf, nodes_lost or device_mtbf"
        )
    if stated.in_process_restart is not None and not launch.restarts_in_process:
        yield (
            "goal.reliability.in_process_restart has no effect on this launch, which does not"
            " restart inside its processes (--inprocess-restart of Megatron-LM)"
        )
    if stated.without_spare != "wait":
        yield (
            f"goal.reliability.without_spare: {stated.without_spare} has no effect on a launch:"
            " without a spare node it waits for a repair; `moetune plan` plans the layout for one"
            " node less"
        )


def _loses_nodes(stated: Reliability) -> bool:
    return (stated.device_mtbf, stated.node_mtbf_s) != (None, None)


def _as_launched(launch: LaunchSettings, *, devices_per_node: int) -> Saving | None:
    """Return how it saves; None where it does not, or to hosts alone, which no lost node leaves."""
    if launch.save_interval is None or launch.saves_nowhere:
        return None
    host_steps = launch.host_save_interval
    on_hosts = host_steps is not None and 2 * host_steps <= launch.save_interval
    return Saving(
        steps=launch.save_interval,
        in_background=launch.saves_in_background,
        from_pinned=launch.saves_from_pinned_memory,
        on_hosts=on_hosts,
        host_steps=host_steps if on_hosts else None,
        replicas=_replicas(launch, devices_per_node) if on_hosts else "auto",
    )


def _replicas(launch: LaunchSettings, devices_per_node: int) -> int:
    """Other nodes that hold a copy of a rank's: those that its group of ranks reaches."""
    jump, others = launch.replication_jump or devices_per_node, launch.host_copies - 1
    return others if jump >= devices_per_node else others * jump // devices_per_node


def _changes(launch: LaunchSettings, run: LaunchedRun) -> Iterator[ChangedRun]:
    """Yield the lines of every change with its run, single ones first."""
    interval, background = FORMS[launch.engine]
    now = _as_launched(launch, devices_per_node=run.setup.pool.devices_per_node)
    interval = _missing(launch) + interval
    launched = (launch.saves_in_background, launch.saves_from_pinned_memory)
    options: dict[tuple[bool, bool], tuple[str, ...]] = {launched: ()}
    if _may_save_in_background(launch, run):
        # What the forms write.
        options.setdefault((True, _target(launch).pinned_checkpoints), (background,))
    on_hosts = now is not None and now.on_hosts
    replicas: Replicas = now.replicas if now is not None else "auto"
    for (in_background, from_pinned), switch in options.items():
        best = run.forecast(
            Saving(
                steps=None,
                in_background=in_background,
                from_pinned=from_pinned,
                on_hosts=on_hosts,
                replicas=replicas,
            )
        )
        lines: tuple[str, ...] = (interval.format(best.checkpoint_interval_steps),)
        levels = best.checkpoint_levels
        if levels is not None and levels.host_interval_steps is not None:
            lines += (HOST_FORM.format(levels.host_interval_steps),)
        yield lines + switch, best
        if now is not None and switch:
            changed = replace(now, in_background=in_background, from_pinned=from_pinned)
            yield switch, run.forecast(changed)
    if not on_hosts and _may_save_to_hosts(launch, run):
        best = run.forecast(
            Saving(steps=None, in_background=launch.saves_in_background, on_hosts=True)
        )
        levels = best.checkpoint_levels
        if levels is not None and levels.host_interval_steps is not None:
            to_hosts = TO_HOSTS.format(levels.host_interval_steps)
            if levels.replicas:
                devices = run.setup.pool.devices_per_node
                to_hosts += REPLICATED.format(devices, levels.replicas + 1)
            yield (interval.format(best.checkpoint_interval_steps), to_hosts), best


def _missing(launch: LaunchSettings) -> str:
    """Return what an interval is worth nothing without, where the launch lacks it."""
    if launch.engine is TrainingEngine.TORCHTITAN:
        return ENABLE_FORM if launch.save_interval is None else ""
    return SAVE_FORM if launch.saves_nowhere else ""


def _target(launch: LaunchSettings) -> Capabilities:
    return TARGETS[_TARGET_OF[launch.engine]]


def _may_save_in_background(launch: LaunchSettings, run: LaunchedRun) -> bool:
    """Return whether all releases that the spec names, or else the newest, save in background."""
    if not launch.engine.is_megatron:
        return True
    strategies = single(to_strategies(run.priced.configuration, run.setup))
    zero_stage = round(number(strategies.zero_stage))
    engine = run.spec.goal.engine
    names = (*run.spec.emit, "" if engine is None else f"{engine.name}-{engine.version}")
    return not any(
        background_checkpoint_obstacle(TARGETS[name], zero_stage=zero_stage)
        for name in names
        if name in TARGETS
    )


def _may_save_to_hosts(launch: LaunchSettings, run: LaunchedRun) -> bool:
    """Return whether the engine can save to hosts and the spec asks for it."""
    return run.stated.checkpoint.keeps_host_copies and launch.engine is TrainingEngine.MEGATRON


def _smallest(now: RunForecast | None, changes: Sequence[ChangedRun]) -> CheckpointChange | None:
    before = 0.0 if now is None else now.effective_time_ratio

    def gain(change: ChangedRun) -> float:
        return change[1].effective_time_ratio - before

    for lines in (1, 2, 3):
        usable = [
            change for change in changes if len(change[0]) == lines and gain(change) >= LEAST_GAIN
        ]
        if usable:
            best = max(usable, key=gain)
            return CheckpointChange(lines=best[0], run=best[1], gain_ratio=gain(best))
    return None


def copies_of_launch(
    spec: Spec, launch: LaunchSettings, priced: PricedConfiguration, setup: PricingSetup
) -> float:
    """Bytes of a node's memory that a launch's copies of checkpoints take."""
    devices = setup.pool.devices_per_node
    now = _as_launched(launch, devices_per_node=devices)
    if now is None or launch.engine not in FORMS:
        return 0.0
    jobs = _jobs(LaunchedRun(spec=spec, stated=NEVER_FAILS, priced=priced, setup=setup))
    if now.on_hosts:
        return host_bytes(jobs, replicas=_replicas(launch, devices))
    return copied_bytes(jobs) if now.in_background else 0.0


def _jobs(run: LaunchedRun) -> Jobs:
    """Return the quantities of a launch that decide its checkpoints."""
    configuration, spec = run.priced.configuration, run.spec
    strategies = single(to_strategies(configuration, run.setup))
    adapters, shape = spec.goal.adapters, shape_of_model(spec.model, mtp_layers=0)
    return jobs_on_pool(
        strategies,
        parameters=float(num_parameters(spec.model)),
        pool=run.setup.pool,
        stated=run.stated,
        adapters=number(num_adapter_parameters(shape, strategies)) if adapters else 0.0,
        saved=programs((_TARGET_OF[configuration.engine],)).saved_bytes(
            adapters=adapters,
            zero_stage=round(number(strategies.zero_stage)),
            precision=configuration.precision,
        ),
    )


def _forecast(run: LaunchedRun, stated: Reliability, *, from_pinned: bool) -> RunForecast:
    spec, pool, sheet = run.spec, run.setup.pool, run.setup.sheet
    jobs = _jobs(replace(run, stated=stated))
    profile = None if run.setup.measured is None else run.setup.measured.profile
    host = host_level(
        stated,
        strategies=single(to_strategies(run.priced.configuration, run.setup)),
        programs=programs(("megatron-lm",)),
        pool=pool,
        nic_bytes_per_s=sheet.scale_out_bytes_per_s if pool.nic is None else pool.nic,
        profile=profile,
    )
    model = resolved(
        stated,
        host_bytes_per_s=sheet.host_bytes_per_s,
        profile=profile,
        host=host,
        has_pinned=from_pinned,
        loading_ranks=programs((_TARGET_OF[run.priced.configuration.engine],)).loading_ranks(
            devices_per_node=pool.devices_per_node
        ),
    )
    configuration = run.priced.configuration
    training = TrainingRun(
        step_s=run.priced.step_s,
        tokens_per_step=configuration.global_batch * configuration.sequence,
        tokens=spec.goal.tokens,
        devices_per_node=pool.devices_per_node,
        price_per_device_hour=pool.price_per_device_hour,
    )
    return forecast(training, jobs=jobs, reliability=model)
