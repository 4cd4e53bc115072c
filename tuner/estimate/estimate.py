"""Predicts a launch on the machines of a spec, and finds the smallest change that beats it.

    launch + spec -> Configuration -> analytic price -> Estimate

The analytic model prices production engines on datasheet devices (tuner/costs/train); residuals
that ship with the program, or that the caller fitted, correct it and give the error band.

The exposed time of data parallelism comes from pricing again with links that take no time: the
difference of the once-a-step part is exposed gradient reduction and parameter all-gather. What
ZeRO-2 and 3 move inside the passes is a part of the step's price.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Final

import numpy as np

from tuner.config.host_memory import COPIES, host_memory
from tuner.costs.train.calibration import Residuals, shipped
from tuner.costs.train.columns_of import PRECISION_OF, matmul_peak, matmul_peak_type
from tuner.costs.train.expert_imbalance import expert_imbalances
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.engines.reading.launch import LaunchSettings, TokenDispatcher, TrainingEngine
from tuner.engines.reading.mistakes import joined
from tuner.errors import SpecError
from tuner.estimate import environment
from tuner.estimate.changes import LEAST_GAIN_RATIO, Changes, find_changes, manifest_refusals
from tuner.estimate.checkpoints import copies_of_launch, failure_notes, price_checkpoints
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.flop_counts import (
    CONVENTION,
    FROZEN,
    frozen_flop,
    megatron_flop,
    model_flop,
    recomputed_flop,
)
from tuner.estimate.legality import broken_rules
from tuner.estimate.measured import band_and_notes
from tuner.estimate.prices import (
    PricedConfiguration,
    PricingSetup,
    fits_devices,
    host_parts,
    memory_forecast,
    price_configurations,
)
from tuner.estimate.records import Estimate, ExposedRatios, PipelineRankMemory, Utilisation
from tuner.estimate.stated_model import with_stated_tune
from tuner.estimate.unpriced import unpriced_notes, unpriced_settings
from tuner.search.train.memory_risk import loss_prices
from tuner.simulate.pipeline import Pipeline, can_simulate, simulate_step
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec
from tuner.spec.tune import adapters_words
from tuner.units import format_bytes, format_flop_per_s, format_ratio

Advise = Callable[..., Changes]

FP32_NOTE: Final = (
    "fp32: GEMMs are priced on vector units (PyTorch allows no TF32 unless the program does; those"
    " of Transformer Engine may use it), and parameters are their own master"
)
LARGEST_BYTES: Final = 2.0**60
"""Most bytes of one device; more is a typing error in the launch and would overflow a record's
integers."""

_NO_TIME = 1e9
"""Factor on link bandwidths that leaves only their latency."""


def estimate(
    spec: Spec,
    launch: LaunchSettings,
    *,
    residuals: Residuals | None = None,
    measured: MeasuredProfile | None = None,
    advise: Advise = find_changes,
) -> Estimate:
    """Price a launch and look for the smallest change that beats it.

    Args:
        spec: model, cluster, and what the launch leaves open.
        launch: from tuner/estimate/registry.py.
        residuals: corrections and bands; None: generic constants.
        measured: profile of the pool's machines; what it lacks is priced from the datasheet.
        advise: looks for changes of the launch, which takes most of the time.

    Raises:
        SpecError: the launch contradicts itself, the model or the cluster.
        UnknownDeviceError: no description of the pool's device.
    """
    spec, tune_notes = with_stated_tune(launch, spec)
    setup = pricing_setup(spec, residuals, measured=measured)
    configuration, notes = build_configuration(launch, spec)
    _refuse_quantised(spec, configuration)
    at = (configuration, launch.environment, setup.sheet.generation)
    broken = [*broken_rules(configuration, spec.model, name=launch.name)]
    broken += [f"Megatron-LM stops at {stopped}" for stopped in environment.refusals(*at)]
    if broken:
        said = [f"{launch.source}: {reason}" for reason in broken]
        raise SpecError(joined(said, source=launch.source))
    (priced,) = price_configurations((configuration,), setup)
    most_bytes = float(priced.peak_bytes_P.max())
    if most_bytes > LARGEST_BYTES:
        raise SpecError(
            f"{launch.source}: one device would hold {most_bytes:.1e} bytes, more than any"
            f" machine ({LARGEST_BYTES:.1e}); check its batch sizes and sequence length"
        )
    memory = _memory(priced)
    peak = max(rank.total_bytes for rank in memory)
    risk, on_device = memory_forecast(priced, setup), fits_devices(priced, setup)
    band, stretch, rests_on = band_and_notes(configuration, setup)
    ratios = setup.ratios(configuration).widened(stretch)
    checkpoints = price_checkpoints(spec, launch, priced, setup)
    copies = copies_of_launch(spec, launch, priced, setup)
    changes = advise(launch, priced, setup, limits=spec.search, ratios=ratios, host_copies=copies)
    host = host_memory(
        {
            **{what: float(size[0]) for what, size in host_parts((configuration,), setup).items()},
            COPIES: copies,
        },
        limit_bytes=setup.host_limit_bytes,
    )
    tokens = configuration.global_batch * configuration.sequence
    low, high = (priced.step_s * factor for factor in band)
    per_device = tokens / configuration.devices
    return Estimate(
        source=launch.source,
        engine=launch.engine,
        model=spec.model.name,
        device=setup.sheet.name,
        devices=configuration.devices,
        sequence_length=configuration.sequence,
        global_batch_size=configuration.global_batch,
        num_microbatches=configuration.num_microbatches,
        rounds=configuration.rounds,
        precision=configuration.priced_precision,
        decision=to_decision(configuration, spec.model),
        step_time_s=priced.step_s,
        step_time_s_band=(low, high),
        played_step_time_s=_simulated_step_s(priced),
        tokens_per_s_per_device=per_device / priced.step_s,
        tokens_per_s_per_device_band=(per_device / high, per_device / low),
        utilisation=launch_utilisation(priced, setup),
        breakdown_s=priced.step.by_cause(simulated_s=priced.step_s),
        exposed=_exposed(priced, setup),
        memory=memory,
        fullest_pipeline_rank=max(memory, key=lambda rank: rank.total_bytes).pipeline_rank,
        peak_memory_bytes=peak,
        memory_limit_bytes=max(int(setup.memory_limit_bytes), peak if on_device else 0),
        memory_capacity_bytes=int(setup.memory_capacity_bytes),
        **asdict(risk),
        assumed_run_s=setup.loss_prices.assumed_run_s(priced.step_s),
        fits=on_device and (host is None or host.fits),
        host_memory=host,
        rests_on_samples=None if on_device else _longest_samples(launch, configuration, setup),
        unpriced=tuple(unpriced_settings(launch, configuration, spec)),
        smallest_change=changes.smallest,
        best_pair=changes.best_pair,
        changes=changes.by_knob,
        checkpoints=checkpoints,
        least_gain_ratio=LEAST_GAIN_RATIO,
        num_tried=changes.num_tried,
        flags_understood=launch.understood,
        flags_ignored=launch.ignored,
        flags_deprecated=launch.deprecated,
        refused_by=manifest_refusals(configuration, setup),
        notes=(
            *tune_notes,
            *notes,
            *_longest_note(launch, configuration, setup),
            *_notes(spec, configuration, setup, launch.environment),
            *unpriced_notes(launch, configuration, spec),
            *failure_notes(spec, launch),
            *rests_on,
        ),
    )


def _longest_samples(
    launch: LaunchSettings, configuration: Configuration, setup: PricingSetup
) -> str | None:
    """Say what a refusal rests on where samples of one token would fit, None where none does."""
    if not launch.samples_vary or configuration.sequence != launch.sequence:
        return None
    (shortest,) = price_configurations((configuration.changed(sequence=1),), setup)
    if not fits_devices(shortest, setup):
        return None
    return (
        f"every sample is taken to have {launch.name('sequence')} {launch.sequence} tokens, the"
        " longest of one; state their usual length as goal.sequence_length"
    )


def _longest_note(
    launch: LaunchSettings, configuration: Configuration, setup: PricingSetup
) -> Iterator[str]:
    """Say what the longest sample needs where the spec gives the length of a usual one."""
    longest = launch.sequence or 0
    if launch.samples_vary and configuration.sequence < longest:
        (priced,) = price_configurations((configuration.changed(sequence=longest),), setup)
        peak = float(priced.peak_bytes_P.max())
        fits = "fits" if fits_devices(priced, setup) else "does not fit"
        yield f"a step of {longest} tokens a sample needs {format_bytes(peak)}, which {fits}"


def shipped_residuals() -> Residuals | None:
    """Return the residuals that come with the program, None where it has none."""
    return shipped()


def pricing_setup(
    spec: Spec, residuals: Residuals | None, *, measured: MeasuredProfile | None = None
) -> PricingSetup:
    """Return what launches are priced with: model, pool, device, residuals, recorded routing.

    Raises:
        SpecError: not one pool with a device.
        UnknownDeviceError: no description of the pool's device.
    """
    pool = _pool(spec, measured)
    phase = spec.goal.routing.phase if spec.goal.routing else None
    expert_imbalance = (
        expert_imbalances(spec.model, spec.routing, phase)
        if spec.routing is not None and phase is not None
        else None
    )
    return PricingSetup(
        model=spec.model,
        pool=pool,
        sheet=pool.sheet if measured is None else measured.sheet(pool),
        residuals=(measured and measured.own_residuals) or residuals,
        expert_imbalance=expert_imbalance,
        measured=measured,
        engine=spec.goal.engine,
        adapters=spec.goal.adapters,
        documents=spec.documents,
        too_long=spec.goal.too_long,
        loss_prices=loss_prices(spec.goal),
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


def _memory(priced: PricedConfiguration) -> tuple[PipelineRankMemory, ...]:
    configuration, memory = priced.configuration, priced.memory

    def at(name: str, rank: int) -> int:
        return round(float(np.asarray(getattr(memory, name))[rank, 0]))

    return tuple(
        PipelineRankMemory(
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


def _refuse_quantised(spec: Spec, configuration: Configuration) -> None:
    adapters = spec.goal.adapters
    on_replicas = (
        configuration.engine is TrainingEngine.TRANSFORMERS and configuration.zero_stage == 0
    )
    if adapters is not None and adapters.is_quantised and not on_replicas:
        raise SpecError(
            f"{configuration.source}: frozen weights in 4 bits (qlora) are priced on replicas of"
            " Transformers alone, not in this launch; price method: lora, or replicas"
        )


def launch_utilisation(priced: PricedConfiguration, setup: PricingSetup) -> Utilisation:
    """Return how much of the devices' peaks a configuration uses."""
    configuration = priced.configuration
    precision = PRECISION_OF[configuration.priced_precision]
    kind, peak = matmul_peak_type(setup.sheet, precision), matmul_peak(setup.sheet, precision)
    device_s = priced.step_s * configuration.devices
    rows, columns = setup.rows(configuration) or (None, {})
    needed = model_flop(configuration, setup.model, rows=rows)
    if setup.adapters is not None:
        needed -= frozen_flop(configuration, setup.model)
    recomputed = recomputed_flop(configuration, setup.model, document=columns.get("document"))
    return Utilisation(
        mfu_ratio=needed / (device_s * peak),
        hfu_ratio=(needed + recomputed) / (device_s * peak),
        convention=CONVENTION + (FROZEN if setup.adapters is not None else ""),
        peak_flop_per_s=peak,
        peak_name=f"{setup.sheet.name}, dense {kind}, {format_flop_per_s(peak)}",
        megatron_flop_per_s_per_device=megatron_flop(configuration, setup.model) / device_s,
    )


def _exposed(priced: PricedConfiguration, setup: PricingSetup) -> ExposedRatios:
    def share(seconds: float) -> float:
        return max(0.0, seconds / priced.step_s)

    return ExposedRatios(
        all_to_all_ratio=share(priced.seconds("expert_s")),
        tensor_ratio=share(priced.seconds("tensor_s")),
        context_ratio=share(priced.seconds("context_s")),
        data_ratio=share(_data_s(priced, setup)),
        bubble_ratio=share(priced.seconds("bubble_s")),
        recompute_ratio=share(priced.seconds("recompute_s")),
        host_ratio=share(priced.seconds("host_s")),
    )


def _data_s(priced: PricedConfiguration, setup: PricingSetup) -> float:
    """Seconds of a step in exposed gradient reduction and parameter all-gather."""
    without = replace(
        setup,
        sheet=setup.sheet.model_copy(
            update={
                "scale_up_bytes_per_s": setup.sheet.scale_up_bytes_per_s * _NO_TIME,
                "scale_out_bytes_per_s": setup.sheet.scale_out_bytes_per_s * _NO_TIME,
            }
        ),
        pool=setup.pool.model_copy(update={"nic": None}),
        has_links=False,
    )
    (fast,) = price_configurations((priced.configuration,), without)
    return priced.seconds("once_s") - fast.seconds("once_s") + priced.seconds("sharding_s")


def _rows_note(configuration: Configuration, setup: PricingSetup) -> str:
    """Say how the documents of the goal lie in the launch's sequences."""
    packed = setup.rows(configuration)
    if packed is None:
        return (
            "goal.sequence_lengths has no effect: the launch pads documents, or lets those of a"
            " sequence attend to each other, so that every sequence is priced as one document"
        )
    rows, columns = packed
    return (
        f"a row holds {rows.documents_per_row:.1f} documents and is {format_ratio(rows.fill_ratio)}"
        f" full ({rows.rule}), a token in a document of {columns['document']:,.0f} tokens on"
        " average; what ranks wait for each other's rows is not priced here, but by moetune plan"
    )


def _notes(
    spec: Spec, configuration: Configuration, setup: PricingSetup, variables: Mapping[str, str]
) -> tuple[str, ...]:
    notes = []
    if configuration.dispatcher is TokenDispatcher.ALLGATHER and configuration.expert > 1:
        notes.append("dispatcher allgather is priced as all-to-all, which moves fewer bytes")
    if configuration.zero_stage >= 2 and configuration.rounds * configuration.num_microbatches > 1:
        notes.append("gradients are sharded, so every micro-batch reduces them")
    if configuration.priced_precision == "fp32":
        notes.append(FP32_NOTE)
    if setup.documents is not None:
        notes.append(_rows_note(configuration, setup))
    if said := setup.release(configuration).note:
        notes.append(said)
    if setup.residuals is None:
        notes.append("generic constants: no residuals were applied, so the band is wide")
    if setup.pool.link_matrix is not None:
        notes.append("link_matrix has no effect here: every link is priced as the pool's usual one")
    notes.extend(environment.notes(configuration, variables, setup.sheet.generation))
    if spec.goal.adapters is not None:
        whose = "spec" if configuration.tune is None else "launch"
        notes.append(
            f"priced with {adapters_words(spec.goal.adapters)} of the {whose}; MFU counts the"
            " weight gradients that they save"
        )
    if spec.goal.precision.value != configuration.priced_precision:
        notes.append(
            f"precision {configuration.priced_precision} replaces the spec's "
            f"{spec.goal.precision.value}"
        )
    return tuple(notes)


def _simulated_step_s(priced: PricedConfiguration) -> float | None:
    """Simulate one step pass by pass, to check the closed form; None where that is not possible.

    Not covered: zero-bubble schedules, interleaving in groups other than the pipeline's ranks.
    """
    configuration = priced.configuration
    count = configuration.num_microbatches
    is_interleaved = configuration.virtual_pipeline > 1
    if configuration.zero_bubble or (is_interleaved and count % configuration.pipeline):
        return None
    pipeline = Pipeline(
        forward_s_S=priced.stage_seconds("forward_s_SC"),
        backward_s_S=priced.stage_seconds("backward_s_SC"),
        num_devices=configuration.pipeline,
        num_microbatches=count,
        send_s=priced.seconds("boundary_s"),
    )
    if not can_simulate(pipeline):
        return None
    return simulate_step(pipeline).step_s * configuration.rounds + priced.seconds("once_s")
