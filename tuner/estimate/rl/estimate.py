"""Prices a launch of reinforcement learning: seconds by phase, memory at three moments, changes.

Where phases alternate, the longest bounds the step; where two sides work at once, the slower one
does and the other idles. A rollout is bound by its last responses, by room for their caches, or by
decoding.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from tuner.config.host_memory import HostMemory, host_memory
from tuner.costs.rl.residuals import BAND_FACTORS
from tuner.engines.reading.rl_launch import RlLaunch
from tuner.estimate.rl.changes import best_changes, priced_variants
from tuner.estimate.rl.records import RlEstimate
from tuner.estimate.rl.setup import PricedStep, RlInputs, price_step_of
from tuner.estimate.rl.timers import compare_timers
from tuner.simulate.rl.step import Phases, RlPlacement
from tuner.units import format_bytes, format_ratio

TAIL_RATIO: Final = 0.3
"""Share of a rollout that its last tenth of responses takes, from which on it is said to bind."""
OTHER_FRAMEWORK_FACTOR: Final = 1.35
"""Factor on the band where no published step of the framework has lengths."""


def estimate_step(
    inputs: RlInputs,
    launch: RlLaunch,
    *,
    measured: Mapping[str, float] | None = None,
    timed_steps: int = 0,
) -> RlEstimate:
    """Price a launch and look for the smallest change that beats it.

    Args:
        inputs: spec and model.
        launch: as read.
        measured: median seconds of a log's timers; None: there is no log.
        timed_steps: of the log.

    Raises:
        SpecError: the launch contradicts itself, the model or the cluster.
    """
    priced = price_step_of(launch, inputs)
    phases = priced.step.phases(inputs.residuals)
    host = _host(priced, inputs)
    misfits = tuple(_misfits(priced, inputs, host))

    def evaluate(variant: PricedStep) -> tuple[float, bool]:
        is_free = not [*_misfits(variant, inputs, _host(variant, inputs))]
        return variant.step.phases(inputs.residuals).step_s, is_free

    tried = [*priced_variants(launch, inputs, evaluate=evaluate)]
    changes = best_changes(tried, step_s=phases.step_s, fits=not misfits)
    batch, setup = priced.step.batch, inputs.setup
    factor = BAND_FACTORS[launch.placement]
    is_fitted = launch.framework.startswith("NeMo-RL")
    factor *= 1.0 if is_fitted else OTHER_FRAMEWORK_FACTOR
    bound, words = _bound(priced, phases)
    return RlEstimate(
        source=launch.source,
        framework=launch.framework,
        model=inputs.model.name,
        device=setup.sheet.name,
        placement=launch.placement,
        versions=launch.versions,
        train_devices=priced.step.trainer.devices,
        rollout_devices=launch.rollout_devices,
        samples=launch.all_samples,
        updates=priced.step.updates.mini_batches * launch.epochs,
        mean_tokens=float(batch.length_N.mean()),
        step_time_s=phases.step_s,
        step_time_s_band=(phases.step_s / factor, phases.step_s * factor),
        tokens_per_s_per_device=float(batch.length_N.sum()) / phases.step_s / launch.devices,
        phases_s=phases.seconds(),
        bound=bound,
        bound_words=words,
        idle_ratio=_idle(phases),
        device_memory={
            moment: {what: round(size) for what, size in parts.items()}
            for moment, parts in priced.memory.device.items()
        },
        memory_capacity_bytes=round(setup.memory_capacity_bytes),
        kv_tokens=max(round(priced.memory.kv_tokens), 0),
        host_memory=host,
        fits=not misfits,
        misfits=misfits,
        smallest_change=changes[0] if changes else None,
        changes=changes,
        num_tried=len(tried),
        timers=() if measured is None else compare_timers(measured, phases, factor=factor),
        timed_steps=timed_steps,
        flags_ignored=launch.ignored,
        notes=(*launch.notes, *_notes(launch, is_fitted=is_fitted)),
    )


def _host(priced: PricedStep, inputs: RlInputs) -> HostMemory | None:
    return host_memory(priced.memory.host, limit_bytes=inputs.setup.host_limit_bytes)


def _misfits(priced: PricedStep, inputs: RlInputs, host: HostMemory | None) -> Iterator[str]:
    """Yield why a launch cannot run."""
    capacity = inputs.setup.memory_capacity_bytes
    for moment, parts in priced.memory.device.items():
        needed = sum(parts.values())
        if needed > capacity:
            yield (
                f"{moment}: {format_bytes(needed)} of a device, which has {format_bytes(capacity)}"
            )
    longest = priced.launch.longest_prompt + priced.launch.longest_response
    if priced.memory.kv_tokens < longest:
        yield (
            f"rollout: caches of {max(round(priced.memory.kv_tokens), 0)} tokens hold no sequence"
            f" of {longest}; raise {priced.launch.name('memory_ratio')} or the engine's degrees"
        )
    if host is not None and not host.fits:
        yield f"host: {host.words}"


def _bound(priced: PricedStep, phases: Phases) -> tuple[str, str]:
    """Return what takes most of the step, and why."""
    if phases.is_late and phases.trainer_s > phases.rollout_s:
        idle = 1.0 - phases.rollout_s / phases.trainer_s
        return "train", f"training is the slower side; rollout idles {format_ratio(idle)} of it"
    if phases.is_late:
        idle = 1.0 - phases.trainer_s / phases.rollout_s
        return "rollout", f"rollout is the slower side; training idles {format_ratio(idle)} of it"
    name, seconds = max(phases.seconds().items(), key=lambda item: item[1])
    share = format_ratio(seconds / phases.step_s)
    return name, f"{name} takes {share} of the step" + (
        f": {_rollout_words(priced, phases)}" if name == "rollout" else ""
    )


def _rollout_words(priced: PricedStep, phases: Phases) -> str:
    step = priced.step
    share = len(step.batch.response_N) / step.side.ranks
    wanted = float(step.batch.length_N.mean()) * min(share, step.side.most_running)
    if priced.memory.kv_tokens < wanted:
        return (
            f"caches hold {priced.memory.kv_tokens / wanted:.2f} of a rank's sequences, the others"
            " wait"
        )
    if step.side.most_running < share:
        return f"a rank runs {step.side.most_running} of its {share:.0f} sequences at once"
    tail = 1.0 - phases.rolled_s / phases.rollout_s
    if tail > TAIL_RATIO:
        return f"the last tenth of the responses takes {format_ratio(tail)} of it"
    return "decoding at full batches"


def _idle(phases: Phases) -> dict[str, float]:
    """Return the share of the step in which each side's devices do nothing."""
    if phases.placement is RlPlacement.COLOCATED:
        return {}
    busy = {"train": phases.trainer_s, "rollout": phases.rollout_s}
    return {name: max(1.0 - seconds / phases.step_s, 0.0) for name, seconds in busy.items()}


def _notes(launch: RlLaunch, *, is_fitted: bool) -> Iterator[str]:
    yield f"defaults are those of {launch.framework}; lengths are the goal's, cut at its limits"
    if not is_fitted:
        yield (
            "no published step of this framework states lengths: seconds between decode steps and"
            " the pace of passes are NeMo-RL's, and the band is wider for it"
        )
    yield "rewards, tools, validation and checkpoints are not priced"
