"""Changes of one knob of a launch of reinforcement learning, each priced as a launch of its own.

A knob is doubled, halved or switched; what the launch cannot then run with is left out. Of those
that fit the one with the shortest step is the smallest change, as each changes one knob.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.costs.rl.packing import TokenBudget
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.reading.rl_launch import RlLaunch
from tuner.errors import SpecError
from tuner.estimate.rl.records import RlChange
from tuner.estimate.rl.setup import PricedStep, RlInputs, price_step_of
from tuner.simulate.rl.step import RlPlacement

LEAST_GAIN_RATIO: Final = 0.02
MOST_CHANGES: Final = 6
RATIO_STEP: Final = 0.1
LARGEST_RATIO: Final = 0.95
TRAINER_DEGREES: Final = ("tensor", "pipeline", "expert", "context")
OFFLOADS: Final = ("offloads_weights", "offloads_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A launch that differs in one knob."""

    what: str
    lines: tuple[str, ...]
    launch: RlLaunch


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedVariant:
    """A variant that can be launched, with its price."""

    variant: Variant
    step_s: float
    peak_bytes: float
    fits: bool


def priced_variants(
    launch: RlLaunch, inputs: RlInputs, *, evaluate: Callable[[PricedStep], tuple[float, bool]]
) -> Iterator[PricedVariant]:
    """Price the launches that differ in one knob; `evaluate`: seconds, and whether it fits."""
    for variant in variants(launch):
        try:
            priced = price_step_of(variant.launch, inputs)
            seconds, fits = evaluate(priced)
        except (SpecError, ValueError):
            # The knob's other setting is none that the launch can run with.
            continue
        yield PricedVariant(
            variant=variant, step_s=seconds, peak_bytes=priced.memory.peak_bytes, fits=fits
        )


def best_changes(tried: list[PricedVariant], *, step_s: float, fits: bool) -> tuple[RlChange, ...]:
    """Return the changes that gain, the largest first; of a misfit, those that make it fit."""
    least = LEAST_GAIN_RATIO if fits else -float("inf")
    chosen = sorted(
        (variant for variant in tried if variant.fits), key=lambda variant: variant.step_s
    )
    return tuple(
        RlChange(
            what=variant.variant.what,
            lines=variant.variant.lines,
            step_time_s=variant.step_s,
            gain_ratio=1.0 - variant.step_s / step_s,
            peak_memory_bytes=round(variant.peak_bytes),
        )
        for variant in chosen
        if 1.0 - variant.step_s / step_s >= least
    )[:MOST_CHANGES]


def variants(launch: RlLaunch) -> Iterator[Variant]:
    """Yield every launch that differs in one knob."""
    yield from _engine_variants(launch)
    yield from _trainer_variants(launch)
    yield from _batch_variants(launch)
    if launch.placement is RlPlacement.DISAGGREGATED:
        yield from _split_variants(launch)


def _engine_variants(launch: RlLaunch) -> Iterator[Variant]:
    degrees = launch.degrees
    for tensor in (2 * degrees.attention_tensor, degrees.attention_tensor // 2):
        if not tensor:
            continue
        ranks = tensor * degrees.attention_data
        has_experts = degrees.expert > 1
        changed = replace(
            degrees,
            attention_tensor=tensor,
            moe_tensor=1 if has_experts else ranks,
            expert=ranks if has_experts else 1,
        )
        yield _variant(launch, "degrees", tensor, degrees=changed)
    for ratio in (launch.memory_ratio + RATIO_STEP, launch.memory_ratio - RATIO_STEP):
        if 0.0 < ratio <= LARGEST_RATIO:
            yield _variant(launch, "memory_ratio", round(ratio, 2), memory_ratio=round(ratio, 2))
    yield _variant(
        launch, "most_running", 2 * launch.most_running, most_running=2 * launch.most_running
    )
    if launch.is_eager:
        yield _variant(launch, "is_eager", "False", is_eager=False)


def _trainer_variants(launch: RlLaunch) -> Iterator[Variant]:
    trainer = launch.trainer
    for field in TRAINER_DEGREES:
        degree = getattr(trainer, field)
        for size in (2 * degree, degree // 2):
            if size:
                settings: dict[str, Any] = {field: size}
                if field == "pipeline":
                    settings |= {"first_stage_layers": None, "last_stage_layers": None}
                yield _trainer_variant(launch, field, size, settings)
    if trainer.recompute is not Recompute.NONE:
        settings = {
            "recompute": Recompute.NONE,
            "recompute_modules": (),
            "recompute_method": "",
            "recompute_layers": None,
        }
        yield _trainer_variant(launch, "recompute", "null", settings)


def _batch_variants(launch: RlLaunch) -> Iterator[Variant]:
    for field in ("train_budget", "forward_budget"):
        budget: TokenBudget = getattr(launch, field)
        for size in (2 * budget.size, budget.size // 2):
            if size:
                changed: dict[str, Any] = {field: replace(budget, size=size)}
                yield _variant(launch, field, size, **changed)
    for field in OFFLOADS:
        if launch.name(field) != field:
            value = not getattr(launch, field)
            switched: dict[str, Any] = {field: value}
            yield _variant(launch, field, value, **switched)
    is_exact = launch.samples_per_update == launch.all_samples and launch.epochs == 1
    if launch.recomputes_old and is_exact and not launch.versions:
        # One update on-policy: the ratio of probabilities is 1.
        yield _variant(launch, "recomputes_old", "True", recomputes_old=False)


def _split_variants(launch: RlLaunch) -> Iterator[Variant]:
    for nodes in (1, -1):
        moved = nodes * launch.devices_per_node
        train = (launch.trainer.devices or 0) - moved
        if train > 0 and launch.rollout_devices + moved > 0:
            yield Variant(
                what=f"{abs(moved)} devices from {'training' if nodes > 0 else 'rollout'} to"
                f" {'rollout' if nodes > 0 else 'training'}",
                lines=(f"training {train}, rollout {launch.rollout_devices + moved} devices",),
                launch=replace(
                    launch,
                    trainer=launch.trainer.model_copy(update={"devices": train}),
                    rollout_devices=launch.rollout_devices + moved,
                ),
            )


def _variant(launch: RlLaunch, field: str, value: object, **changed: Any) -> Variant:
    return _changed_line(launch.name(field), value, replace(launch, **changed))


def _trainer_variant(
    launch: RlLaunch, field: str, value: object, settings: dict[str, Any]
) -> Variant:
    trainer: LaunchSettings = launch.trainer.model_copy(update=settings)
    return _changed_line(trainer.name(field), value, replace(launch, trainer=trainer))


def _changed_line(name: str, value: object, launch: RlLaunch) -> Variant:
    what = f"{name.rpartition('.')[2]} {value}"
    return Variant(what=what, lines=(f"{name}={value}",), launch=launch)
