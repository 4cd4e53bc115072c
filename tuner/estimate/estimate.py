"""Says what a launch will do on the machines of a spec, and the smallest change that beats it.

    launch + spec -> Configuration -> analytic price -> Estimate

The analytic model prices production engines on datasheet devices (tuner/costs/analytic); residuals
that ship with the program, or that the caller fitted, correct it and give the error band.

The share of data parallelism is found by pricing once more with links that take no time: what the
once-a-step part loses is visible gradient sums and gathers. Under ZeRO-2 and 3 most of them are
inside the passes, so there it is what the passes lose when the state is not sharded.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Final

import numpy as np

from tuner.costs.analytic.calibration import Residuals, shipped
from tuner.costs.analytic.columns_of import PEAK_OF, PRECISION_OF
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.costs.analytic.routing import busiest_ratios
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.estimate import environment
from tuner.estimate.changes import LEAST_GAIN_RATIO, find_changes, manifest_refusals
from tuner.estimate.configuration import Configuration, configuration_of
from tuner.estimate.decision import decision_of
from tuner.estimate.flop_counts import CONVENTION, megatron_flop, model_flop, recomputed_flop
from tuner.estimate.launch import Dispatcher, LaunchSettings
from tuner.estimate.legality import broken_rules
from tuner.estimate.measured import band_and_notes
from tuner.estimate.prices import SOFTWARE_OF, Bench, Priced, priced, uneven_bytes_of
from tuner.estimate.records import Estimate, ExposedRatios, RankMemory, Utilisation
from tuner.estimate.simulated import played_step_s
from tuner.estimate.unpriced import unpriced_notes
from tuner.planner.analytic.memory_risk import MemoryForecast, forecast_of, loss_prices
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec
from tuner.units import format_flop_per_s

LARGEST_BYTES: Final = 2.0**60
"""Of one device. What would hold more is a slip in the launch, and no whole number of a record."""

_NO_TIME = 1e9
"""Factor on link bandwidths that leaves their latency alone."""


def estimate(
    spec: Spec,
    launch: LaunchSettings,
    *,
    residuals: Residuals | None = None,
    measured: MeasuredProfile | None = None,
) -> Estimate:
    """Price a launch and look for the smallest change that beats it.

    Args:
        spec: model, cluster, and what the launch leaves open.
        launch: from tuner/estimate/registry.py.
        residuals: corrections and bands; None prices with the generic constants.
        measured: profile of the pool's machines; what it lacks is priced on the datasheet.

    Raises:
        SpecError: the launch contradicts itself, the model or the cluster.
        UnknownDeviceError: no description of the pool's device.
    """
    bench = bench_of(spec, residuals, measured=measured)
    configuration, notes = configuration_of(launch, spec)
    broken = next(broken_rules(configuration, spec.model, name=launch.name), None)
    if broken is not None:
        raise SpecError(f"{launch.source}: {broken}")
    at = (configuration, launch.environment, bench.sheet.generation)
    stopped = next(environment.refused(*at), None)
    if stopped is not None:
        raise SpecError(f"{launch.source}: Megatron-LM stops at {stopped}")
    (own,) = priced((configuration,), bench)
    most_bytes = float(own.peak_bytes_P.max())
    if most_bytes > LARGEST_BYTES:
        raise SpecError(
            f"{launch.source}: one device would hold {most_bytes:.1e} bytes, more than any"
            f" machine ({LARGEST_BYTES:.1e}); check its batch sizes and sequence length"
        )
    band, stretch, rests_on = band_and_notes(configuration, bench)
    ratios = bench.ratios(configuration).widened(stretch)
    changes = find_changes(launch, own, bench, limits=spec.search, ratios=ratios)
    tokens = configuration.global_batch * configuration.sequence
    low, high = (own.step_s * factor for factor in band)
    per_device = tokens / configuration.devices
    memory = _memory(own)
    peak = max(rank.total_bytes for rank in memory)
    return Estimate(
        source=launch.source,
        engine=launch.engine.value,
        model=spec.model.name,
        device=bench.sheet.name,
        devices=configuration.devices,
        sequence_length=configuration.sequence,
        global_batch_size=configuration.global_batch,
        num_microbatches=configuration.num_microbatches,
        rounds=configuration.rounds,
        precision=configuration.precision,
        decision=decision_of(configuration, spec.model),
        step_time_s=own.step_s,
        step_time_s_band=(low, high),
        played_step_time_s=played_step_s(own),
        tokens_per_s_per_device=per_device / own.step_s,
        tokens_per_s_per_device_band=(per_device / high, per_device / low),
        utilisation=_utilisation(own, bench),
        exposed=_exposed(own, bench),
        memory=memory,
        fullest_pipeline_rank=max(memory, key=lambda rank: rank.total_bytes).pipeline_rank,
        peak_memory_bytes=peak,
        memory_limit_bytes=int(bench.memory_limit_bytes),
        memory_capacity_bytes=int(bench.memory_capacity_bytes),
        **asdict(_risk(spec, own, bench)),
        assumed_run_s=loss_prices(spec.goal).assumed_run_s(own.step_s),
        fits=peak <= bench.memory_limit_bytes,
        smallest_change=changes.smallest,
        best_pair=changes.best_pair,
        changes=changes.by_knob,
        least_gain_ratio=LEAST_GAIN_RATIO,
        num_tried=changes.num_tried,
        flags_understood=launch.understood,
        flags_ignored=launch.ignored,
        flags_deprecated=launch.deprecated,
        refused_by=manifest_refusals(configuration, bench),
        notes=(
            *notes,
            *_notes(spec, configuration, bench, launch.environment),
            *unpriced_notes(launch, configuration, spec),
            *rests_on,
        ),
    )


def shipped_residuals() -> Residuals | None:
    """Return the residuals that come with the program, None where it has none."""
    return shipped()


def bench_of(
    spec: Spec, residuals: Residuals | None, *, measured: MeasuredProfile | None = None
) -> Bench:
    """Return what launches are priced on: model, pool, device, corrections, recorded routing.

    Raises:
        SpecError: not one pool with a device.
        UnknownDeviceError: no description of the pool's device.
    """
    pool = _pool(spec, measured)
    phase = spec.goal.routing.phase if spec.goal.routing else None
    busiest = (
        busiest_ratios(spec.model, spec.routing, phase)
        if spec.routing is not None and phase is not None
        else None
    )
    return Bench(
        model=spec.model,
        pool=pool,
        sheet=find_device(pool.device or "") if measured is None else measured.sheet(pool),
        residuals=(measured and measured.own_residuals) or residuals,
        busiest=busiest,
        measured=measured,
        engine=spec.goal.engine,
    )


def _pool(spec: Spec, measured: MeasuredProfile | None) -> Pool:
    if len(spec.cluster.pools) > 1:
        names = ", ".join(repr(pool.name) for pool in spec.cluster.pools)
        raise SpecError(
            f"cluster.pools: {names}: a launch is priced on one pool; keep the one it runs on"
        )
    (pool,) = spec.cluster.pools
    if pool.device is None and measured is None:
        raise SpecError(
            f"cluster.pools: {pool.name!r} has no 'device'; name the device description to price "
            "the launch on, e.g. device: h100-sxm"
        )
    return pool


def _memory(own: Priced) -> tuple[RankMemory, ...]:
    configuration, memory = own.configuration, own.memory

    def at(name: str, rank: int) -> int:
        return round(float(np.asarray(getattr(memory, name))[rank, 0]))

    return tuple(
        RankMemory(
            pipeline_rank=rank,
            layers=sum(
                stage.layers for stage in configuration.stages[rank :: configuration.pipeline]
            ),
            weight_bytes=at("weights_PC", rank),
            gradient_bytes=at("gradients_PC", rank),
            optimizer_bytes=at("optimizer_PC", rank),
            activation_bytes=at("activations_PC", rank),
            buffer_bytes=at("buffers_PC", rank),
            reserve_bytes=at("reserve_PC", rank) + at("context_PC", rank),
        )
        for rank in range(configuration.pipeline)
    )


def _risk(spec: Spec, own: Priced, bench: Bench) -> MemoryForecast:
    is_uneven = bench.busiest is None and bench.model.moe is not None
    return forecast_of(
        own.peak_bytes_P,
        uneven_bytes_of(own.configuration, bench) if is_uneven else 0.0,
        capacity_bytes=bench.memory_capacity_bytes,
        software=SOFTWARE_OF[own.configuration.engine].software,
        prices=loss_prices(spec.goal),
    )


def _utilisation(own: Priced, bench: Bench) -> Utilisation:
    configuration = own.configuration
    precision = PRECISION_OF[configuration.precision]
    kind = next(name for name in PEAK_OF[precision] if name in bench.sheet.flop_per_s)
    peak = bench.sheet.flop_per_s[kind]
    device_s = own.step_s * configuration.devices
    needed = model_flop(configuration, bench.model)
    again = recomputed_flop(configuration, bench.model)
    return Utilisation(
        mfu_ratio=needed / (device_s * peak),
        hfu_ratio=(needed + again) / (device_s * peak),
        convention=CONVENTION,
        peak_flop_per_s=peak,
        peak_name=f"{bench.sheet.name}, dense {kind}, {format_flop_per_s(peak)}",
        megatron_flop_per_s_per_device=megatron_flop(configuration, bench.model) / device_s,
    )


def _exposed(own: Priced, bench: Bench) -> ExposedRatios:
    def share(seconds: float) -> float:
        return max(0.0, seconds / own.step_s)

    return ExposedRatios(
        all_to_all_ratio=share(own.seconds("expert_s")),
        tensor_ratio=share(own.seconds("tensor_s")),
        context_ratio=share(own.seconds("context_s")),
        data_ratio=share(_data_s(own, bench)),
        bubble_ratio=share(own.seconds("bubble_s")),
        recompute_ratio=share(own.seconds("recompute_s")),
        host_ratio=share(own.seconds("host_s")),
    )


def _data_s(own: Priced, bench: Bench) -> float:
    """Seconds of a step in visible gradient sums and parameter gathers."""
    without = replace(
        bench,
        sheet=bench.sheet.model_copy(
            update={
                "scale_up_bytes_per_s": bench.sheet.scale_up_bytes_per_s * _NO_TIME,
                "scale_out_bytes_per_s": bench.sheet.scale_out_bytes_per_s * _NO_TIME,
            }
        ),
        pool=bench.pool.model_copy(update={"nic": None}),
        has_links=False,
    )
    (fast,) = priced((own.configuration,), without)
    once_s = own.seconds("once_s") - fast.seconds("once_s")
    if own.configuration.zero_stage < 2:
        return once_s
    (whole,) = priced((replace(own.configuration, zero_stage=1),), bench)
    passes_s = own.step_s - own.seconds("once_s") - (whole.step_s - whole.seconds("once_s"))
    return once_s + passes_s


def _notes(
    spec: Spec, own: Configuration, bench: Bench, variables: Mapping[str, str]
) -> tuple[str, ...]:
    notes = []
    if own.dispatcher is Dispatcher.ALLGATHER and own.expert > 1:
        notes.append("dispatcher allgather is priced as all-to-all, which moves less")
    if own.zero_stage >= 2 and own.rounds * own.num_microbatches > 1:
        notes.append("gradients are sharded, so every micro-batch sums them")
    if own.precision == "fp32":
        notes.append("fp32 products are priced at the bf16 rate: no constants are known for them")
    if said := bench.release(own).note:
        notes.append(said)
    if bench.residuals is None:
        notes.append("generic constants: no residuals were applied, so the band is wide")
    if bench.pool.link_matrix is not None:
        notes.append("link_matrix changes nothing here: every link is priced as the usual one")
    notes.extend(environment.notes(own, variables, bench.sheet.generation))
    if spec.goal.precision.value != own.precision:
        notes.append(f"precision {own.precision} replaces the spec's {spec.goal.precision.value}")
    return tuple(notes)
