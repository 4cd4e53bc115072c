"""From a spec on described devices to a plan: ask, search, refine the best, say what is proven.

The search ranks rows by the closed form of a step; the best of them are played pass by pass, and
the objective is the longer of the two (finalists.py). The integer program may move layers and
recomputation of the very best; what it finds is priced and played like everything else.
"""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from tuner.costs.analytic.calibration import Residuals, band_of, constants_of
from tuner.costs.analytic.columns_of import PRECISION_OF, hardware_of_pool, shape_of_model
from tuner.costs.analytic.constants import Constants, Precision
from tuner.costs.analytic.kernels import Kernels
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.costs.analytic.memory import price_memory
from tuner.costs.analytic.memory_constants import MemoryConstants, memory_constants
from tuner.costs.analytic.routing import busiest_ratios
from tuner.costs.analytic.shapes import Strategies
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import SpecError
from tuner.faults.forecast import Run, RunForecast, forecast
from tuner.faults.resolved import jobs_of, resolved
from tuner.plan import (
    Alternative,
    Band,
    ParetoPoint,
    Plan,
    Provenance,
    StagePrediction,
    TrainDecision,
    TrainPrediction,
)
from tuner.planner.analytic.answer import (
    CAUSES,
    Detail,
    certificate_of,
    cost_of_step,
    decision_of,
    detail_of,
    pareto_front,
)
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.extrapolation import provenance_of, weighed
from tuner.planner.analytic.finalists import Finalist, finalist, ranked
from tuner.planner.analytic.found import Found, Search
from tuner.planner.analytic.question import Question
from tuner.planner.analytic.regimes import regime_of
from tuner.planner.analytic.relaxing import relaxations, unlaunchable
from tuner.planner.analytic.search import Settings, search
from tuner.planner.reasons import binding_constraint, why_lost
from tuner.spec.accounting import num_parameters, training_flop_per_token
from tuner.spec.capabilities import intersection
from tuner.spec.cluster import Pool
from tuner.spec.goal import Reliability
from tuner.spec.search import Search as Limits
from tuner.spec.spec import Spec
from tuner.units import format_bytes

UNLIMITED_BYTES = 2.0**50
"""More memory than any device has."""

MEMORY_BAND_RATIO = 0.12
"""Largest error on published peaks without a pipeline, tests/benchmarks/training_memory.py."""

MOST_TIES = 16
"""Alternatives inside the error band that are listed; the certificate counts all of them."""

MOST_PARETO = 16

NEVER_FAILS = Reliability(device_mtbf=1e18, restart=0.0)
"""Stands in where the spec prices no failures."""

NUM_FINALISTS = 3
"""Rows whose layout the integer program looks at again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """What the plan rests on beside the spec."""

    pool: Pool
    sheet: Datasheet
    residuals: Residuals | None
    measured: MeasuredProfile | None = None
    """Kernels, collectives and memory; None: those of the datasheet."""

    @property
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one device."""
        measured = None if self.measured is None else self.measured.memory_bytes
        stated = self.pool.memory_per_device or measured or self.sheet.memory_bytes
        return stated * self.pool.usable_memory_ratio


def site_of(
    pool: Pool, *, residuals: Residuals | None, measured: MeasuredProfile | None = None
) -> Site:
    """Describe a pool from its datasheet, and from what was measured there.

    Residuals that were fitted on the machine itself go before those given.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    if measured is None:
        return Site(pool=pool, sheet=find_device(pool.device or ""), residuals=residuals)
    return Site(
        pool=pool,
        sheet=measured.sheet(pool),
        residuals=measured.own_residuals or residuals,
        measured=measured,
    )


def question_of(spec: Spec, site: Site) -> Question:
    """State what is searched.

    Raises:
        SpecError: spare nodes leave none, or the routing is of another model.
    """
    capabilities = intersection(spec.emit)
    precision = PRECISION_OF[spec.goal.precision.value]
    regime = regime_of(spec.emit, site.sheet, precision=spec.goal.precision.value)
    routing, record = spec.goal.routing, spec.routing
    is_low = precision is not Precision.BF16
    mtp = spec.model.mtp_num_layers if capabilities.mtp else 0
    _refuse_precision(spec, site.sheet)
    _refuse_dispatcher(spec)
    hardware = hardware_of_pool(site.sheet, site.pool, precision=precision)
    constants = _single(constants_of([regime], site.residuals))
    kernels: Kernels | None = None
    if site.measured is not None:
        kernels = site.measured.kernels(hardware, constants, precision=spec.goal.precision.value)
        hardware = site.measured.linked(hardware, constants)
    return Question(
        model=spec.model,
        shape=shape_of_model(spec.model, mtp_layers=mtp),
        hardware=hardware,
        constants=constants,
        memory_constants=_single(memory_constants([regime.software], [regime.family])),
        kernels=kernels,
        num_devices=_num_devices(spec, site.pool),
        memory_limit_bytes=site.memory_limit_bytes,
        sequence_length=spec.goal.sequence_length,
        global_batch_size=spec.goal.global_batch_size,
        capabilities=capabilities,
        limits=_limits(spec),
        precision=spec.goal.precision.value,
        element_bytes=4.0 if spec.goal.precision.value == "fp32" else 2.0,
        linear_bytes=1.0 if is_low else 0.0,
        gradient_bytes=_gradient_bytes(spec),
        busiest=(
            None
            if routing is None or record is None
            else busiest_ratios(spec.model, record, routing.phase)
        ),
        price_per_device_hour=site.pool.price_per_device_hour,
    )


def make_analytic_plan(
    spec: Spec, site: Site, *, settings: Settings, provenance: Provenance
) -> Plan:
    """Plan a training run from device descriptions.

    Raises:
        SpecError: the spec asks for what no device or target can do.
    """
    question = question_of(spec, site)
    band = band_of(
        regime_of(spec.emit, site.sheet, precision=spec.goal.precision.value), site.residuals
    )
    found = search(question, settings)
    notes: tuple[str, ...] = ()
    if found.found is None and spec.search != question.limits:
        found = search(replace(question, limits=spec.search), settings)
        if found.found is not None:
            notes = ("fits only with offloading or dropped tokens, which no published run prices",)
    best = None if found.found is None else _best(found, settings)
    if best is not None and (best.decision.optimizer_offload or best.decision.activation_offload):
        notes += (_host_note(question, best.detail, site.pool),)
    rests_on = None if best is None else weighed(found, best.candidate, best.detail.stages)
    band = band if rests_on is None else rests_on.widened(band)
    ties_ratio = (band[1] / band[0]) ** 0.5 - 1.0
    teller = _Teller(spec=spec, site=site, search=found, band=band)
    common = {
        "model": spec.model,
        "cluster": spec.cluster,
        "goal": spec.goal,
        "search": spec.search,
        "emit": spec.emit,
        "certificate": certificate_of(
            found,
            band_ratio=ties_ratio,
            objective_s=None if best is None else best.objective_s,
        ),
        "provenance": provenance_of(
            provenance.model_copy(update={"notes": provenance.notes + notes}), question, rests_on
        ),
    }
    if best is None:
        ways_out = relaxations(question, settings)
        return Plan.model_validate(
            common
            | {
                "decision": None,
                "predicted": None,
                "binding_constraint": ", ".join(one.limit for one in ways_out) or "no verdict",
                "alternatives": (),
                "relaxations": ways_out,
            }
        )
    predicted = teller.prediction(best.detail, played_s=best.played_s)
    unlimited = search(
        replace(question, memory_limit_bytes=UNLIMITED_BYTES),
        replace(settings, top=1, below_s=best.objective_s),
    )
    unlimited_s = None if unlimited.found is None else float(unlimited.found.step_s[0])
    return Plan.model_validate(
        common
        | {
            "decision": best.decision,
            "predicted": predicted,
            "binding_constraint": binding_constraint(
                predicted,
                unlimited_s=unlimited_s,
                memory_limit_bytes=int(question.memory_limit_bytes),
            ),
            "alternatives": teller.alternatives(best, top=settings.top),
            "pareto": teller.pareto(),
            "unlaunchable": unlaunchable(found, settings),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Teller:
    """Says columns in the words of a plan."""

    spec: Spec
    site: Site
    search: Search
    band: Band
    """Measured over predicted seconds."""

    def prediction(self, detail: Detail, *, played_s: float | None = None) -> TrainPrediction:
        """Say what is expected of one decision."""
        closed_s = _number(detail.step.step_s)
        step_s = max(closed_s, played_s or 0.0)
        tokens = self.spec.goal.tokens_per_step / self.search.question.num_devices
        peaks = tuple(round(float(peak)) for peak in detail.memory.total_PC[:, 0])
        low_s, high_s = step_s * self.band[0], step_s * self.band[1]
        seconds = {
            name.removesuffix("_s"): max(0.0, _number(getattr(detail.step, name)))
            for name in CAUSES
        }
        seconds["bubble"] += step_s - closed_s
        seconds = {"computation": max(0.0, step_s - sum(seconds.values()))} | seconds
        return TrainPrediction(
            step_time_s=step_s,
            step_time_s_band=(low_s, high_s),
            tokens_per_s_per_device=tokens / step_s,
            tokens_per_s_per_device_band=(tokens / high_s, tokens / low_s),
            peak_memory_bytes=peaks,
            peak_memory_bytes_band=tuple(
                (peak / (1.0 + MEMORY_BAND_RATIO), peak / (1.0 - MEMORY_BAND_RATIO))
                for peak in peaks
            ),
            activation_bytes=tuple(round(float(b)) for b in detail.memory.activations_PC[:, 0]),
            breakdown_s=seconds,
            communication_s=sum(
                seconds[name] for name in ("tensor", "context", "expert", "bubble")
            ),
            stages=_stages(detail),
            mfu_ratio=self._mfu(step_s),
            played_step_time_s=played_s,
            run=self._run(detail, step_s=step_s),
        )

    def alternatives(self, best: "_Best", *, top: int) -> tuple[Alternative, ...]:
        """Say which rows come next and why they lost."""
        found = self.search.found
        assert found is not None
        limit_s = best.objective_s * self.band[1] / self.band[0]
        others = [index for index in best.order if index != best.index]
        ties = sum(found.step_s[index] <= limit_s for index in others)
        return tuple(
            Alternative(
                decision=TrainDecision.model_validate(decision_of(self.search, index)),
                predicted=(predicted := self.prediction(detail_of(self.search, index))),
                within_band=predicted.step_time_s <= limit_s,
                lost_by=why_lost(self.prediction(best.detail, played_s=best.played_s), predicted),
            )
            for index in others[: max(top - 1, min(ties, MOST_TIES))]
        )

    def pareto(self) -> tuple[ParetoPoint, ...]:
        """Say what more time would save in memory."""
        found = self.search.found
        assert found is not None
        return tuple(
            ParetoPoint(
                decision=TrainDecision.model_validate(decision_of(self.search, index)),
                step_time_s=float(found.step_s[index]),
                peak_memory_bytes=round(float(found.peak_bytes[index])),
                cost_per_step=cost_of_step(self.search, index),
            )
            for index in pareto_front(self.search)[:MOST_PARETO]
        )

    def _mfu(self, step_s: float) -> float:
        goal, question = self.spec.goal, self.search.question
        flop = goal.tokens_per_step * training_flop_per_token(
            self.spec.model, sequence_length=goal.sequence_length
        )
        peak = question.num_devices * _number(question.hardware.matmul_flop_per_s)
        return flop / (peak * step_s)

    def _run(self, detail: Detail, *, step_s: float) -> RunForecast | None:
        goal, pool = self.spec.goal, self.site.pool
        if goal.reliability is None and goal.tokens is None:
            return None
        stated = goal.reliability
        jobs = jobs_of(
            _single(detail.strategies),
            parameters=float(num_parameters(self.spec.model)),
            pool=pool,
            stated=stated or NEVER_FAILS,
        )
        return forecast(
            Run(
                step_s=step_s,
                tokens_per_step=goal.tokens_per_step,
                tokens=goal.tokens,
                devices_per_node=pool.devices_per_node,
                price_per_device_hour=pool.price_per_device_hour,
            ),
            jobs=jobs,
            reliability=None
            if stated is None
            else resolved(
                stated,
                host_bytes_per_s=self.site.sheet.host_bytes_per_s,
                profile=None if self.site.measured is None else self.site.measured.profile,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Best:
    """The chosen decision; `order` ranks the rows of the search, `index` is its own."""

    decision: TrainDecision
    candidate: Candidates
    detail: Detail
    objective_s: float
    played_s: float
    order: tuple[int, ...]
    index: int


def _best(found: Search, settings: Settings) -> _Best:
    """Play the best rows, refine the layout of the very best and keep the fastest."""
    order = ranked(found, time_limit_s=settings.time_limit_s / 8.0, clock=settings.clock).order
    share_s = settings.time_limit_s / 8.0 / NUM_FINALISTS
    tried = {index: finalist(found, index, time_limit_s=share_s) for index in order[:NUM_FINALISTS]}
    index, chosen = min(tried.items(), key=lambda item: max(item[1].step_s, item[1].played_s))
    return _Best(
        decision=_decision_of(found, chosen),
        candidate=chosen.candidate,
        detail=chosen.detail,
        objective_s=max(chosen.step_s, chosen.played_s),
        played_s=chosen.played_s,
        order=order,
        index=index,
    )


def _refuse_precision(spec: Spec, sheet: Datasheet) -> None:
    """Refuse products that the device has no units for.

    fp8 needs fp8 units, block scales of 32 values (MXFP8) and fp4 those of Blackwell.
    """
    name = spec.goal.precision.value
    needs = "fp4" if name == "nvfp4" else "fp8" if "fp8" in name else "bf16"
    can = needs in sheet.flop_per_s and (
        name != "mxfp8" or sheet.generation is Generation.BLACKWELL
    )
    if not can:
        raise SpecError(
            f"goal.precision: {sheet.name} has no units for {name!r}; "
            f"{'fp8-tensorwise' if 'fp8' in sheet.flop_per_s else 'bf16'} works"
        )


def _host_note(question: Question, detail: Detail, pool: Pool) -> str:
    """Say what offloading asks of host memory, whose size no datasheet states."""
    kept = replace(detail.strategies, optimizer_offload=0.0, activation_offload=0.0)
    whole = price_memory(
        question.shape,
        kept,
        question.hardware,
        detail.stages,
        constants=question.memory_constants,
    )
    moved_PC = whole.optimizer_PC + whole.activations_PC
    moved_PC = moved_PC - detail.memory.optimizer_PC - detail.memory.activations_PC
    node_bytes = int(float(moved_PC.max()) * pool.devices_per_node)
    return (
        f"offloading needs {format_bytes(node_bytes)} of free host memory on each node, which the"
        " cluster does not state and the plan does not check"
    )


def _refuse_dispatcher(spec: Spec) -> None:
    """Refuse the one dispatcher that no formula prices."""
    if spec.search.dispatcher == ("allgather",):
        raise SpecError(
            "search.dispatcher: 'allgather' is not priced: it brings every token of the group to"
            " every rank, which pays off in small groups only; 'alltoall' works"
        )


def _gradient_bytes(spec: Spec) -> float:
    """Return 4 unless the user names 2, the faster and leaner of the two.

    Raises:
        SpecError: the targets have none of those named.
    """
    asked = spec.search.gradient_bytes or (4,)
    able = intersection(spec.emit).gradient_bytes
    launchable = sorted(set(asked) & able)
    if not launchable:
        raise SpecError(
            f"search.gradient_bytes: {', '.join(map(str, asked))} cannot be launched by"
            f" {', '.join(spec.emit)}; {', '.join(map(str, sorted(able))) or 'nothing'} can"
        )
    return float(launchable[0])


def _decision_of(found: Search, chosen: Finalist) -> TrainDecision:
    """Name what a finalist decides: the found row's degrees, its own layout and recomputation."""
    pipeline = int(chosen.candidate.rows["pipeline"][0])
    layers_S = np.array(chosen.layers_S)
    alone = Found(
        candidates=chosen.candidate,
        step_s=np.array([chosen.step_s]),
        peak_bytes=np.array([float(chosen.detail.memory.total_PC.max())]),
        layers_PC=layers_S.reshape(-1, pipeline).sum(axis=0)[:, None],
    )
    named = decision_of(replace(found, found=alone), 0)
    return TrainDecision.model_validate(named | {"pipeline_layout": chosen.layers_S})


def _limits(spec: Spec) -> Limits:
    """Leave out what no published run prices, unless the user names it.

    Offloading to host memory, and with experts graphs of a whole iteration, which need a capacity
    that may drop tokens.
    """
    asked = spec.search
    unasked: dict[str, object] = {
        name: (False,)
        for name in ("optimizer_offload", "activation_offload")
        if getattr(asked, name) is None
    }
    if spec.model.moe is not None and asked.cuda_graph is None:
        unasked["cuda_graph"] = ("none", "partial")
    return asked.model_copy(update=unasked)


def _num_devices(spec: Spec, pool: Pool) -> int:
    stated = spec.goal.reliability
    spare = 0 if stated is None else stated.spare_nodes
    if spare >= pool.nodes:
        raise SpecError(
            f"goal.reliability.spare_nodes: {spare} leaves none of the {pool.nodes} nodes of pool "
            f"{pool.name!r}; keep back {pool.nodes - 1} at most"
        )
    return (pool.nodes - spare) * pool.devices_per_node


def _stages(detail: Detail) -> tuple[StagePrediction, ...]:
    """Stages in execution order; the bytes of a pipeline rank are shared by its layers."""
    stages, memory = detail.stages, detail.memory
    layers_S = (stages.dense_SC + stages.moe_SC)[:, 0]
    ranks = len(memory.weights_PC)
    layers_P = np.array([layers_S[rank::ranks].sum() for rank in range(ranks)])
    of_rank = len(layers_S) // ranks

    def at(grid: np.ndarray, stage: int) -> int:
        rank = stage % ranks
        held = layers_P[rank]
        share = layers_S[stage] / held if held else 1.0 / of_rank
        return round(float(grid[rank, 0]) * share)

    other_PC = memory.buffers_PC + memory.reserve_PC + memory.context_PC
    return tuple(
        StagePrediction(
            layers=int(layers_S[stage]),
            forward_s=float(detail.step.forward_s_SC[stage, 0]),
            backward_s=float(detail.step.backward_s_SC[stage, 0]),
            parameter_bytes=at(memory.weights_PC, stage),
            gradient_bytes=at(memory.gradients_PC, stage),
            optimizer_bytes=at(memory.optimizer_PC, stage),
            activation_bytes=at(memory.activations_PC, stage),
            other_bytes=at(other_PC, stage),
        )
        for stage in range(len(layers_S))
    )


Columns = TypeVar("Columns", Constants, MemoryConstants, Strategies)


def _single(columns: Columns) -> Columns:
    """Turn a value of one column into one of numbers."""
    return type(columns)(
        **{field.name: _number(getattr(columns, field.name)) for field in fields(columns)}
    )


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).ravel()[0])
