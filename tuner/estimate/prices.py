"""Prices configurations on the analytic model, many at a time: seconds by cause, bytes by rank.

All configurations of one call share model, machine and software, so they become columns of one
call of `price_step` and one of `price_memory`. Those of unlike precision or order of ranks are
priced apart: the first decides the constants, the second which groups lie inside a server.

Approximations: dispatcher `allgather` is priced as all-to-all; a recompute method `uniform` with
several layers per unit keeps fewer inputs than is counted; graphs by `--cuda-graph-modules` are
priced alike whichever modules they cover.

Letters: C configurations, P pipeline ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.calibration import Regime, Residuals, constants_of
from tuner.costs.analytic.collective_ratios import MeasuredHardware
from tuner.costs.analytic.columns_of import (
    PRECISION_OF,
    StageLayers,
    hardware_of_pool,
    shape_of_model,
    stages_of_layouts,
)
from tuner.costs.analytic.constants import Precision
from tuner.costs.analytic.measured_kernels import MeasuredKernels
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.costs.analytic.memory import price_memory
from tuner.costs.analytic.memory_constants import memory_constants
from tuner.costs.analytic.prices import MemoryPrice, StepPrice
from tuner.costs.analytic.routing import BusiestRatios
from tuner.costs.analytic.shapes import Hardware, ModelShape, Strategies, stacked
from tuner.costs.analytic.step import price_step
from tuner.devices.datasheet import Datasheet
from tuner.estimate.configuration import Configuration
from tuner.estimate.launch import Dispatcher, Engine, Graphs
from tuner.planner.analytic.axes import COLUMN_OF_MODULE
from tuner.planner.analytic.memory_risk import uneven_bytes
from tuner.planner.analytic.regimes import OF_TARGET, Relative, band_as, regime_as
from tuner.planner.analytic.releases import PricedRelease, priced_release
from tuner.planner.ratios import Ratios, ratios_for
from tuner.spec.cluster import Pool
from tuner.spec.goal import TrainEngine
from tuner.spec.model import ModelSpec

TARGET_OF: Final[Mapping[Engine, str]] = {
    Engine.MEGATRON: "megatron-lm",
    Engine.TORCHTITAN: "torchtitan",
    Engine.DEEPSPEED: "deepspeed",
}
"""The launch target whose manifest and releases an engine's launches are judged by."""
SOFTWARE_OF: Final[Mapping[Engine, Relative]] = {
    engine: OF_TARGET[target] for engine, target in TARGET_OF.items()
}
"""How residuals know an engine, and which generation's constants it starts from."""

Price = TypeVar("Price", StepPrice, MemoryPrice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """What every configuration of one estimate is priced on."""

    model: ModelSpec
    pool: Pool
    sheet: Datasheet
    residuals: Residuals | None
    busiest: BusiestRatios | None
    """From recorded routing; None: balanced experts."""
    measured: MeasuredProfile | None = None
    """Of the pool; None: priced on the datasheet."""
    engine: TrainEngine | None = None
    """Whose release the goal names; None: the newest that is known."""
    has_links: bool = True
    """Whether collectives that the profile measured count."""
    stretch: float = 1.0
    """Factor on what lies beyond the profile, to see what it weighs."""
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Filled while pricing: shapes of an operation beyond the profile, and all of them."""
    beyond: dict[str, str] = field(default_factory=dict)
    """Filled while pricing: collectives beyond the profile, in words."""

    @property
    def memory_capacity_bytes(self) -> float:
        """All that one device has."""
        measured = None if self.measured is None else self.measured.memory_bytes
        return float(self.pool.memory_per_device or measured or self.sheet.memory_bytes)

    @property
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one device."""
        return self.memory_capacity_bytes * self.pool.usable_memory_ratio

    def regime(self, configuration: Configuration) -> Regime:
        """Return what a configuration's kernels and host depend on."""
        return self._regime(configuration, release=self.release(configuration).release)

    def release(self, configuration: Configuration) -> PricedRelease:
        """Return the release of its engine that a configuration is priced for."""
        target = TARGET_OF[configuration.engine]
        return priced_release((target,), self.engine, self.residuals)

    def _regime(self, configuration: Configuration, *, release: str) -> Regime:
        return regime_as(
            SOFTWARE_OF[configuration.engine],
            self.sheet,
            precision=configuration.precision,
            release=release,
        )

    def band(self, configuration: Configuration) -> tuple[float, float]:
        """Return measured over predicted seconds, lowest and highest."""
        relative = SOFTWARE_OF[configuration.engine]
        regime = self._regime(configuration, release=self.release(configuration).stated)
        return band_as(relative, regime, self.residuals)

    def ratios(self, configuration: Configuration) -> Ratios:
        """Return the bands of ratios of a configuration's time to another's."""
        return ratios_for(
            self.residuals,
            generation=str(self.sheet.generation),
            has_experts=self.model.moe is not None,
            band=self.band(configuration),
        )

    def hardware(self, precision: Precision) -> Hardware:
        """Return the machine, with the peak that the linear layers run at."""
        return hardware_of_pool(self.sheet, self.pool, precision=precision)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """One configuration with its price."""

    configuration: Configuration
    step: StepPrice
    """One column."""
    memory: MemoryPrice
    """One column, as many ranks as the pipeline has."""

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return float(np.asarray(self.step.step_s).ravel()[0])

    @property
    def peak_bytes_P(self) -> npt.NDArray[np.float64]:
        """Bytes on the fullest device of every pipeline rank."""
        ranks: npt.NDArray[np.float64] = self.memory.total_PC[: self.configuration.pipeline, 0]
        return ranks

    def stage_seconds(self, name: str) -> tuple[float, ...]:
        """Return seconds of every stage by their name in `StepPrice`."""
        grid = np.asarray(getattr(self.step, name))[: self.configuration.num_stages, 0]
        return tuple(float(value) for value in grid)

    def seconds(self, name: str) -> float:
        """Return a part of the step by its name in `StepPrice`."""
        return float(np.asarray(getattr(self.step, name)).ravel()[0])


def priced(configurations: Sequence[Configuration], bench: Bench) -> tuple[Priced, ...]:
    """Price every configuration, in the order given."""
    found: dict[int, Priced] = {}
    kinds = dict.fromkeys(_kind(one) for one in configurations)
    for kind in kinds:
        chosen = [index for index, one in enumerate(configurations) if _kind(one) == kind]
        alike = [configurations[index] for index in chosen]
        found |= dict(zip(chosen, _priced_alike(alike, bench), strict=True))
    return tuple(found[index] for index in range(len(configurations)))


def _kind(one: Configuration) -> tuple[str, int, str]:
    """Return what all configurations of one call must share."""
    return one.precision, one.mtp_layers, one.rank_order


def _priced_alike(alike: Sequence[Configuration], bench: Bench) -> list[Priced]:
    shape = shape_of_model(bench.model, mtp_layers=alike[0].mtp_layers)
    precision = PRECISION_OF[alike[0].precision]
    hardware = bench.hardware(precision)
    strategies = stacked([strategies_of(one, bench) for one in alike])
    stages = stages_of_layouts(bench.model, [_layout(one) for one in alike])
    constants = constants_of([bench.regime(alike[0])] * len(alike), bench.residuals)
    kernels, machine = measured_at(alike[0], bench)
    step = price_step(
        shape,
        strategies,
        machine,
        constants,
        stages,
        kernels=kernels,
        order=tuple(alike[0].rank_order.split("-")),
    )
    relative = SOFTWARE_OF[alike[0].engine]
    memory = price_memory(
        shape,
        strategies,
        hardware,
        stages,
        constants=memory_constants([relative.software], [relative.family]),
    )
    return [
        Priced(
            configuration=one,
            step=_repeated(_column(step, index), one.rounds),
            memory=_column(memory, index),
        )
        for index, one in enumerate(alike)
    ]


def uneven_bytes_of(one: Configuration, bench: Bench) -> npt.NDArray[np.float64]:
    """What each pipeline rank's peak grows by when the busiest expert rank's load doubles."""
    relative = SOFTWARE_OF[one.engine]
    return uneven_bytes(
        model_shape(one, bench),
        stacked([strategies_of(one, bench)]),
        bench.hardware(PRECISION_OF[one.precision]),
        stages_of_layouts(bench.model, [_layout(one)]),
        constants=memory_constants([relative.software], [relative.family]),
    )[: one.pipeline]


def measured_at(one: Configuration, bench: Bench) -> tuple[MeasuredKernels | None, Hardware]:
    """Return kernels and machine of the profile, if there is one, else of the datasheet."""
    hardware = bench.hardware(PRECISION_OF[one.precision])
    if bench.measured is None:
        return None, hardware
    constants = constants_of([bench.regime(one)], bench.residuals)
    kernels = bench.measured.kernels(hardware, constants, precision=one.precision)
    if bench.has_links:
        hardware = bench.measured.linked(hardware, constants)
    if isinstance(hardware, MeasuredHardware):
        ratios = replace(hardware.collectives, stretch=bench.stretch, outside=bench.beyond)
        hardware = replace(hardware, collectives=ratios)
    return replace(kernels, stretch=bench.stretch, asked=bench.asked), hardware


def model_shape(configuration: Configuration, bench: Bench) -> ModelShape:
    """Return the model as the configuration trains it."""
    return shape_of_model(bench.model, mtp_layers=configuration.mtp_layers)


def strategies_of(own: Configuration, bench: Bench) -> Strategies:
    """Return one configuration as a column of numbers."""
    is_low = PRECISION_OF[own.precision] is not Precision.BF16
    wide = 4.0 if own.precision == "fp32" else 2.0
    mean, p99 = (1.0, 1.0)
    if bench.busiest is not None and own.expert in bench.busiest.degrees:
        mean, p99 = bench.busiest.of_degree(own.expert)
    return Strategies(
        sequence=float(own.sequence),
        micro_batch=float(own.micro_batch),
        num_microbatches=float(own.num_microbatches),
        tensor=float(own.tensor),
        context=float(own.context),
        pipeline=float(own.pipeline),
        virtual_pipeline=float(own.virtual_pipeline),
        data=float(own.data),
        expert=float(own.expert),
        expert_tensor=float(own.expert_tensor) if bench.model.moe else 1.0,
        sequence_parallel=float(own.sequence_parallel),
        zero_stage=float(own.zero_stage),
        shard_ranks=float(own.shard_ranks),
        element_bytes=wide,
        gradient_bytes=float(own.gradient_bytes),
        # Megatron keeps 8-bit weights twice, as they are and transposed.
        weight_bytes=2.0 if is_low else wide,
        linear_bytes=1.0 if is_low else 0.0,
        recompute_full=own.recompute_ratio,
        recompute_products=float(own.recompute_products),
        **{COLUMN_OF_MODULE[module]: 1.0 for module in own.recompute_modules},
        chunks=float(own.chunks),
        has_flash_attention=float(own.flash_attention),
        dropout=float(own.dropout),
        a2a_overlap=float(own.a2a_overlap),
        is_deepep=float(own.dispatcher is Dispatcher.DEEPEP),
        is_hybridep=float(own.dispatcher is Dispatcher.HYBRIDEP),
        overlap_gradients=float(own.overlap_gradients),
        bucket_parameters=float(own.ddp_bucket_size or 0),
        overlap_parameters=float(own.overlap_parameters),
        overlap_tensor=float(own.overlap_tensor),
        partial_graph=float(own.graphs is Graphs.PARTIAL),
        full_graph=float(own.graphs is Graphs.FULL),
        ends_as_layers=float(any(own.ends)),
        zero_bubble=float(own.zero_bubble),
        optimizer_offload=own.optimizer_offload_ratio,
        activation_offload=own.activation_offload_ratio,
        busiest_ratio=mean,
        busiest_ratio_p99=p99,
    )


def _layout(own: Configuration) -> tuple[StageLayers, ...]:
    return tuple(
        StageLayers(
            layers=stage.layers,
            embedding=stage.embedding,
            head=stage.loss,
            mtp_layers=stage.mtp_layers,
        )
        for stage in own.stages
    )


def _repeated(step: StepPrice, rounds: int) -> StepPrice:
    """Run the pipeline several times before the update."""
    if rounds == 1:
        return step
    return replace(
        step,
        step_s=(step.step_s - step.once_s) * rounds + step.once_s,
        **{
            name: getattr(step, name) * rounds
            for name in ("bubble_s", "tensor_s", "context_s", "expert_s", "recompute_s", "host_s")
        },
    )


def _column(price: Price, index: int) -> Price:
    """Keep one column of every field."""
    kept = {}
    for one in fields(price):
        value = np.asarray(getattr(price, one.name))
        column = min(index, value.shape[-1] - 1) if value.ndim else 0
        kept[one.name] = value[..., column : column + 1] if value.ndim else value
    return replace(price, **kept)
