"""Prices configurations on the analytic model, many at a time: seconds by cause, bytes by rank.

All configurations of one call share model, machine and software, so they become columns of one
call of `price_step` and one of `price_memory`. Different precisions or rank orders are priced
separately: the former sets the constants, the latter which groups lie inside a server.

Approximations: dispatcher `allgather` is priced as all-to-all; a recompute method `uniform` with
several layers per unit keeps fewer inputs than is counted; graphs by `--cuda-graph-modules` are
priced the same whichever modules they cover.

Letters: C configurations, P pipeline ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from tuner.catalog.target import Target
from tuner.config.candidates import recompute_columns, strategies_of
from tuner.config.columns import Strategies
from tuner.config.knobs import OFFLOADS
from tuner.config.shapes import Hardware, ModelShape, Stages, stacked
from tuner.config.tune_columns import stack_of, tune_columns
from tuner.costs.train.attention import packed_columns
from tuner.costs.train.calibration import Regime, Residuals, StepBand, constants_of
from tuner.costs.train.columns_of import (
    PRECISION_OF,
    StageLayers,
    hardware_of_pool,
    shape_of_model,
    stages_of_layouts,
)
from tuner.costs.train.expert_capacity import kept_ratio
from tuner.costs.train.expert_imbalance import ExpertImbalance
from tuner.costs.train.host_memory import offloaded_bytes, pipeline_inside
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import OF_FAMILY, MemoryConstants, memory_constants
from tuner.costs.train.packing import PackedRows, pack_rows
from tuner.costs.train.prices import CAUSES_IN_PASSES, MemoryPrice, StepPrice
from tuner.costs.train.step import price_step
from tuner.devices.datasheet import Datasheet
from tuner.engines.reading.launch import TokenDispatcher, TrainingEngine
from tuner.engines.reading.variables import ALLOCATOR
from tuner.engines.targets import PROGRAMS, programs
from tuner.estimate.configuration import Configuration
from tuner.estimate.decision import to_decision
from tuner.prices.measured import MeasuredPrices
from tuner.prices.train.collective_ratios import MeasuredHardware
from tuner.prices.train.constants import GemmPrecision, Software
from tuner.search.ratios import Ratios, ratios_for
from tuner.search.train.memory_risk import (
    LossPrices,
    MemoryForecast,
    forecast_memory,
    uneven_bytes,
)
from tuner.search.train.regimes import (
    PricedRelease,
    priced_release,
    regime_of,
    step_band,
)
from tuner.spec.cluster import Pool
from tuner.spec.documents import Documents, TooLong
from tuner.spec.goal import TrainEngine
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

TARGET_OF: Final[Mapping[TrainingEngine, str]] = {
    TrainingEngine.MEGATRON: "megatron-lm",
    TrainingEngine.MS_SWIFT: "ms-swift",
    TrainingEngine.TORCHTITAN: "torchtitan",
    TrainingEngine.DEEPSPEED: "deepspeed",
    TrainingEngine.TRANSFORMERS: "transformers-peft",
}
"""The launch target whose manifest and releases apply to an engine's launches."""
SOFTWARE_OF: Final[Mapping[TrainingEngine, Target]] = {
    engine: PROGRAMS[target] for engine, target in TARGET_OF.items()
}
"""The engine's name in the residuals, and the generation whose constants it starts from."""

MOST_RISK: Final = 0.5
"""Probability of running out of memory up to which a launch is said to fit."""

Price = TypeVar("Price", StepPrice, MemoryPrice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricingSetup:
    """Inputs that all configurations of one estimate share: model, pool, datasheet, residuals."""

    model: ModelSpec
    pool: Pool
    sheet: Datasheet
    residuals: Residuals | None
    expert_imbalance: ExpertImbalance | None
    """Uneven load of the experts, from recorded routing; None: balanced experts."""
    loss_prices: LossPrices
    """Costs of running out of memory."""
    measured: MeasuredProfile | None = None
    """Measured profile of the pool; None: priced on the datasheet."""
    adapters: Adapters | None = None
    """Adapters that the goal trains; None: all weights."""
    engine: TrainEngine | None = None
    """Software and release that the goal names; None: the newest known."""
    has_links: bool = True
    """The collectives that the profile measured are used."""
    stretch: float = 1.0
    """Factor on extrapolated times, to measure their weight."""
    documents: Documents | None = None
    """Documents of the goal; None: every sequence is one."""
    too_long: TooLong = TooLong.CUT
    packed: dict[tuple[str, int], tuple[PackedRows, dict[str, float]]] = field(default_factory=dict)
    """Filled while pricing: rows and their columns, by rule and capacity."""
    extrapolation_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Filled while pricing: number of extrapolated shapes and of all shapes, by operation."""
    extrapolated_collectives: dict[str, str] = field(default_factory=dict)
    """Filled while pricing: descriptions of the extrapolated collectives."""

    @property
    def memory_capacity_bytes(self) -> float:
        """All that one device has."""
        measured = None if self.measured is None else self.measured.memory_bytes
        return float(self.pool.memory_per_device or measured or self.sheet.memory_bytes)

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes that a plan may use of one device."""
        return self.memory_capacity_bytes * self.pool.usable_memory_ratio

    @property
    def host_limit_bytes(self) -> float | None:
        """Bytes that a job may use of a node's memory beside the devices'; None: not known."""
        return self.pool.host_limit_bytes(None if self.measured is None else self.measured.profile)

    def regime(self, configuration: Configuration) -> Regime:
        """Return the regime of a configuration's kernels and host."""
        regime = regime_of(
            SOFTWARE_OF[configuration.engine],
            self.sheet,
            precision=configuration.priced_precision,
            has_experts=self.model.moe is not None,
            release=self.release(configuration).release,
        )
        if not configuration.has_eager_layers:
            return regime
        return replace(regime, software=Software.TORCH_EAGER)

    def release(self, configuration: Configuration) -> PricedRelease:
        """Return the release of its engine that a configuration is priced for."""
        target = programs((TARGET_OF[configuration.engine],))
        return priced_release(target, self.engine, self.residuals)

    def band(self, configuration: Configuration) -> StepBand:
        """Return the band of a configuration's step."""
        return step_band(
            SOFTWARE_OF[configuration.engine],
            self.sheet,
            self.residuals,
            precision=configuration.priced_precision,
            has_experts=self.model.moe is not None,
            release=self.release(configuration).stated,
        )

    def ratios(self, configuration: Configuration) -> Ratios:
        """Return the bands of ratios of a configuration's time to another's."""
        return ratios_for(
            self.residuals,
            generation=str(self.sheet.generation),
            has_experts=self.model.moe is not None,
            band=self.band(configuration).edges,
        )

    def rows(self, configuration: Configuration) -> tuple[PackedRows, dict[str, float]] | None:
        """Return the rows of a configuration and their columns; None: a sequence is a document."""
        if self.documents is None or not configuration.packing:
            return None
        key = configuration.packing, configuration.sequence
        if key not in self.packed:
            rule, capacity = key
            rows = pack_rows(self.documents, rule=rule, capacity=capacity, too_long=self.too_long)
            self.packed[key] = rows, packed_columns(model_shape(configuration, self), rows)
        return self.packed[key]

    def hardware(self, precision: GemmPrecision) -> Hardware:
        """Return the machine, with the peak that the linear layers run at."""
        return hardware_of_pool(self.sheet, self.pool, precision=precision)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedConfiguration:
    """One configuration with its price."""

    configuration: Configuration
    step: StepPrice
    """Price of a step, one column."""
    memory: MemoryPrice
    """Price of memory, one column and as many ranks as the pipeline has."""
    host_bytes: float = 0.0
    """Bytes offloaded to a node's memory; 0 where its limit is not known."""

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return float(np.asarray(self.step.step_s).ravel()[0])

    @property
    def peak_bytes_P(self) -> npt.NDArray[np.float64]:
        """Peak bytes of one device of every pipeline rank, the highest of its devices."""
        ranks: npt.NDArray[np.float64] = self.memory.total_PC[: self.configuration.pipeline, 0]
        return ranks

    def stage_seconds(self, name: str) -> tuple[float, ...]:
        """Return seconds of every stage by their name in `StepPrice`."""
        grid = np.asarray(getattr(self.step, name))[: self.configuration.num_stages, 0]
        return tuple(float(value) for value in grid)

    def seconds(self, name: str) -> float:
        """Return a part of the step by its name in `StepPrice`."""
        return float(np.asarray(getattr(self.step, name)).ravel()[0])


def price_configurations(
    configurations: Sequence[Configuration], setup: PricingSetup
) -> tuple[PricedConfiguration, ...]:
    """Price every configuration, in the order given."""
    priced_by_index: dict[int, PricedConfiguration] = {}
    kinds = dict.fromkeys(_kind(config, setup) for config in configurations)
    for kind in kinds:
        chosen = [
            index for index, config in enumerate(configurations) if _kind(config, setup) == kind
        ]
        uniform = [configurations[index] for index in chosen]
        priced_by_index |= dict(zip(chosen, _price_uniform(uniform, setup), strict=True))
    return tuple(priced_by_index[index] for index in range(len(configurations)))


def _kind(config: Configuration, setup: PricingSetup) -> tuple[str, int, str, str]:
    """Return what all configurations of one call must share."""
    return (
        config.priced_precision,
        config.mtp_layers,
        config.rank_order,
        _memory_family(config, setup),
    )


_FAMILY_OF_COMPILED: Final[Mapping[frozenset[str], str]] = {
    frozenset(): "torchtitan-eager",
    frozenset({"loss"}): "torchtitan-loss-compiled",
    frozenset({"model"}): "torchtitan-layers-compiled",
    frozenset({"loss", "model"}): "torchtitan-compiled",
}


def launch_memory_constants(config: Configuration, setup: PricingSetup) -> MemoryConstants:
    """Return what is known of the memory of a configuration's software."""
    software = Software(SOFTWARE_OF[config.engine].software)
    known = memory_constants([software], [_memory_family(config, setup)])
    known = replace(known, keeps_exchanged=0.0) if config.drops_exchanged else known
    has_segments = "expandable_segments:True" in config.environment.get(ALLOCATOR, "")
    if has_segments and not config.engine.is_megatron:
        unused = OF_FAMILY["torchtitan"].unused_ratio
        known = replace(known, unused_ratio=unused, recompute_unused_ratio=0.0)
    # Without the fused kernel, what the activation returns is a tensor of its own.
    is_fused = "bias_swiglu_fusion" not in config.differing_settings
    return known if is_fused else replace(known, keeps_activations=1.0)


def _price_uniform(
    uniform: Sequence[Configuration], setup: PricingSetup
) -> list[PricedConfiguration]:
    shape = shape_of_model(setup.model, mtp_layers=uniform[0].mtp_layers)
    precision = PRECISION_OF[uniform[0].priced_precision]
    hardware = setup.hardware(precision)
    strategies = stacked([to_strategies(config, setup) for config in uniform])
    stages = stages_of_layouts(setup.model, [stage_layout(config) for config in uniform])
    constants = constants_of([setup.regime(uniform[0])], setup.residuals)
    prices, machine = prices_and_hardware(uniform[0], setup)
    step = price_step(
        shape,
        strategies,
        machine,
        constants,
        stages,
        prices=prices,
        order=tuple(uniform[0].rank_order.split("-")),
    )
    memory = price_memory(
        shape, strategies, hardware, stages, constants=launch_memory_constants(uniform[0], setup)
    )
    host_C = np.zeros(len(uniform))
    if setup.host_limit_bytes is not None:
        host_C = host_C + sum(_host_parts(uniform, setup, strategies, stages).values())
    return [
        PricedConfiguration(
            configuration=config,
            step=_repeated(_column(step, index), config.rounds),
            memory=_column(memory, index),
            host_bytes=float(host_C[index]),
        )
        for index, config in enumerate(uniform)
    ]


def uneven_load_bytes(config: Configuration, setup: PricingSetup) -> npt.NDArray[np.float64]:
    """Growth of each pipeline rank's peak when the most-loaded expert rank's load doubles."""
    return uneven_bytes(
        model_shape(config, setup),
        stacked([to_strategies(config, setup)]),
        setup.hardware(PRECISION_OF[config.priced_precision]),
        stages_of_layouts(setup.model, [stage_layout(config)]),
        constants=launch_memory_constants(config, setup),
    )[: config.pipeline]


def host_parts(
    uniform: Sequence[Configuration], setup: PricingSetup
) -> Mapping[str, npt.NDArray[np.float64]]:
    """Bytes of a node's memory by what each configuration offloads there."""
    strategies = stacked([to_strategies(config, setup) for config in uniform])
    stages = stages_of_layouts(setup.model, [stage_layout(config) for config in uniform])
    return _host_parts(uniform, setup, strategies, stages)


def _host_parts(
    uniform: Sequence[Configuration], setup: PricingSetup, strategies: Strategies, stages: Stages
) -> Mapping[str, npt.NDArray[np.float64]]:
    """Return `host_parts` of configurations whose columns are there already."""
    first = uniform[0]
    return offloaded_bytes(
        model_shape(first, setup),
        strategies,
        setup.hardware(PRECISION_OF[first.priced_precision]),
        stages,
        constants=launch_memory_constants(first, setup),
        devices_per_node=setup.pool.devices_per_node,
        inside_C=np.array([pipeline_inside(config.rank_order) for config in uniform]),
    )


def prices_and_hardware(
    config: Configuration, setup: PricingSetup
) -> tuple[MeasuredPrices | None, Hardware]:
    """Return prices and hardware: from the profile if there is one, else from the datasheet."""
    hardware = setup.hardware(PRECISION_OF[config.priced_precision])
    if setup.measured is None:
        return None, hardware
    constants = constants_of([setup.regime(config)], setup.residuals)
    prices = setup.measured.prices(hardware, constants, precision=config.priced_precision)
    if setup.has_links:
        hardware = setup.measured.linked(hardware, constants)
    if isinstance(hardware, MeasuredHardware):
        ratios = replace(
            hardware.collectives, stretch=setup.stretch, outside=setup.extrapolated_collectives
        )
        hardware = replace(hardware, collectives=ratios)
    return replace(
        prices, stretch=setup.stretch, extrapolation_counts=setup.extrapolation_counts
    ), hardware


def model_shape(configuration: Configuration, setup: PricingSetup) -> ModelShape:
    """Return the model as the configuration trains it."""
    return shape_of_model(setup.model, mtp_layers=configuration.mtp_layers)


def to_strategies(config: Configuration, setup: PricingSetup) -> Strategies:
    """Return one configuration as a column of numbers."""
    is_low = PRECISION_OF[config.priced_precision].is_narrow
    wide = 4.0 if config.priced_precision == "fp32" else 2.0
    relative = SOFTWARE_OF[config.engine]
    mean, p99 = (1.0, 1.0)
    if setup.expert_imbalance is not None and config.expert in setup.expert_imbalance.degrees:
        mean, p99 = setup.expert_imbalance.of_degree(config.expert)
    mean, p99 = _kept_loads(config, setup, mean, p99)
    return replace(
        strategies_of(
            to_decision(config, setup.model),
            sequence_length=config.sequence,
            global_batch_size=config.global_batch // config.rounds,
        ),
        element_bytes=wide,
        linear_bytes=1.0 if is_low else 0.0,
        master_bytes=float(config.master_bytes or 0),
        moments_bytes=float(config.moments_bytes or 0),
        updates_weights=float(wide > 2.0 and not _copies_weights(config)),
        reference_forwards=float(config.reference_forwards),
        reference_bytes=wide if config.reference_forwards and setup.adapters is None else 0.0,
        **recompute_columns(config.recompute_modules, full_ratio=config.recompute_ratio),
        recompute_by_op=float(config.recompute_by_op),
        buffered_ratio=config.buffered_ratio * (config.dispatcher is TokenDispatcher.HYBRIDEP),
        opaque_gemm_ratio=config.opaque_gemm_ratio,
        has_flash_attention=float(config.has_fused_attention),
        logit_bytes=config.logit_bytes,
        dropout=float(config.dropout),
        overlap_tensor=float(config.overlap_tensor),
        parameter_offload=float(config.parameter_offload),
        **{name: getattr(config, f"{name}_ratio") for name in OFFLOADS},
        sequential_experts=float(config.sequential_experts and config.has_experts),
        expert_imbalance=mean,
        expert_imbalance_p99=p99,
        **({} if (rows := setup.rows(config)) is None else rows[1]),
        **{
            # Megatron keeps 8-bit weights twice, as they are and transposed.
            "weight_bytes": 2.0 if is_low else wide,
            **tune_columns(
                setup.adapters, setup.model, stack_of(relative.software, relative.family)
            ),
            **_stored_columns(config, setup.adapters),
        },
    )


def _kept_loads(
    config: Configuration, setup: PricingSetup, mean: float, p99: float
) -> tuple[float, float]:
    """Return both loads after tokens beyond the experts' capacity are dropped."""
    capacity = config.expert_capacity
    if capacity is None or setup.model.moe is None:
        return mean, p99
    if config.pads_to_capacity:
        return capacity, capacity
    if setup.expert_imbalance is not None:
        return min(mean, capacity), min(p99, capacity)
    return min(1.0, capacity), kept_ratio(capacity, num_experts=setup.model.moe.num_experts)


def _copies_weights(config: Configuration) -> bool:
    """Return whether the optimizer copies even fp32 parameters (DeepSpeed, stage_1_and_2.py)."""
    return config.engine is TrainingEngine.DEEPSPEED and config.zero_stage > 0


def _stored_columns(config: Configuration, adapters: Adapters | None) -> dict[str, float]:
    """Return columns of parameters in the type that Transformers loads, computing in bf16."""
    if config.engine is not TrainingEngine.TRANSFORMERS:
        return {}
    whole = {} if adapters is not None else {"gradient_bytes": float(config.gradient_bytes)}
    if config.priced_precision == "fp32":
        return whole
    # FSDP casts what it gathers; replicas compute under autocast.
    columns = whole | {"autocast": float(config.zero_stage == 0)}
    if config.stored_bytes == 2:
        return columns
    if adapters is None:
        return columns | ({} if config.zero_stage else {"weight_bytes": 4.0})
    if config.zero_stage:
        return columns | {"frozen_master_bytes": 4.0}
    frozen = {} if adapters.is_quantised else {"frozen_bytes": 4.0}
    return columns | frozen | {"unquantised_bytes": 4.0}


def _memory_family(config: Configuration, setup: PricingSetup) -> str:
    """Return the family whose memory constants hold for a configuration."""
    if config.compiled is not None:
        return _FAMILY_OF_COMPILED[frozenset(config.compiled)]
    if config.engine is TrainingEngine.TRANSFORMERS and setup.adapters is None:
        return "transformers-fp32" if config.gradient_bytes == 4 else "transformers"
    if config.engine is TrainingEngine.DEEPSPEED and config.has_transformers_loss:
        return "deepspeed-transformers"
    target = SOFTWARE_OF[config.engine]
    return target.memory_family or target.family


def stage_layout(config: Configuration) -> tuple[StageLayers, ...]:
    """Return the contents of every stage."""
    return tuple(
        StageLayers(
            layers=stage.layers,
            embedding=stage.embedding,
            head=stage.loss,
            mtp_layers=stage.mtp_layers,
        )
        for stage in config.stages
    )


def _repeated(step: StepPrice, rounds: int) -> StepPrice:
    """Return the price of a step that flushes the pipeline `rounds` times."""
    if rounds == 1:
        return step
    return replace(
        step,
        step_s=(step.step_s - step.once_s) * rounds + step.once_s,
        **{name: getattr(step, name) * rounds for name in ("bubble_s", *CAUSES_IN_PASSES)},
    )


def _column(price: Price, index: int) -> Price:
    """Keep one column of every field."""
    kept = {}
    for price_field in fields(price):
        value = np.asarray(getattr(price, price_field.name))
        column = min(index, value.shape[-1] - 1) if value.ndim else 0
        kept[price_field.name] = value[..., column : column + 1] if value.ndim else value
    return replace(price, **kept)


def memory_forecast(priced: PricedConfiguration, setup: PricingSetup) -> MemoryForecast:
    """Return the chance that a configuration runs out of memory, and what that costs."""
    is_uneven = setup.expert_imbalance is None and setup.model.moe is not None
    return forecast_memory(
        priced.peak_bytes_P,
        uneven_load_bytes(priced.configuration, setup) if is_uneven else 0.0,
        capacity_bytes=setup.memory_capacity_bytes,
        software=Software(SOFTWARE_OF[priced.configuration.engine].software),
        prices=setup.loss_prices,
    )


def leaves_reserve(priced: PricedConfiguration, setup: PricingSetup) -> bool:
    """Say whether a configuration needs no more than a plan may use."""
    return float(priced.peak_bytes_P.max()) <= setup.memory_limit_bytes


def fits_devices(priced: PricedConfiguration, setup: PricingSetup) -> bool:
    """Say whether every device has the memory that a configuration needs.

    A plan leaves memory for what it cannot foresee; a launch that runs needs none, so it fits where
    it is likelier to run than to run out. A share that the spec states is kept.
    """
    if leaves_reserve(priced, setup):
        return True
    is_stated = "usable_memory_ratio" in setup.pool.model_fields_set
    if is_stated or float(priced.peak_bytes_P.max()) > setup.memory_capacity_bytes:
        return False
    return memory_forecast(priced, setup).out_of_memory_probability < MOST_RISK
