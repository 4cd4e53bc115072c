"""A search outcome as fields of a plan: predictions, runner-ups, the Pareto front, the run.

A band of (low, high) around a prediction p holds measurements from low p to high p.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from profilers.records import Profile
from tuner.catalog.programs import background_checkpoint_obstacle
from tuner.config.columns import Strategies
from tuner.config.host_memory import COPIES, STATED_AS, HostMemory, host_memory
from tuner.config.shapes import number, single
from tuner.config.train import TrainDecision
from tuner.costs.train.attention import packed_columns
from tuner.costs.train.host_memory import offloaded_bytes, pipeline_inside
from tuner.costs.train.packing import pack_rows
from tuner.errors import SpecError
from tuner.faults.forecast import RunForecast, TrainingRun, copies_on_hosts, forecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.level_seconds import copied_bytes
from tuner.faults.reliability import FailureModel, Jobs
from tuner.faults.resolved import host_level, jobs_on_pool, resolved
from tuner.plans.train import (
    Alternative,
    Band,
    ParetoPoint,
    Preference,
    Roomier,
    RowPrediction,
    StagePrediction,
    TrainPrediction,
    WiderRows,
)
from tuner.search.layout_groups import layout_of, num_runners_up
from tuner.search.ratios import Ratios
from tuner.search.to_plan import to_alternative
from tuner.search.train.build_problem import PricedPool, adapter_parameters
from tuner.search.train.candidates import Candidates
from tuner.search.train.finalists import row_steps, simulated_s
from tuner.search.train.gradient_buckets import saved_s, with_best_bucket
from tuner.search.train.headroom_search import NO_HEADROOM, Headroom
from tuner.search.train.memory_risk import (
    SMALL,
    MemoryForecast,
    fallback_forecast,
    forecast_memory,
    loss_prices,
    tried_in_turn_s,
    uneven_bytes,
)
from tuner.search.train.peak_errors import peak_band
from tuner.search.train.preference import fastest_with_headroom, is_excluded
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import (
    Detail,
    SearchOutcome,
    cost_of_step,
    pareto_front,
    price_in_layout,
    price_solution,
    solution_fields,
)
from tuner.search.train.ties import tied_rows
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool
from tuner.spec.documents import histogram
from tuner.spec.goal import NEVER_FAILS, TrainGoal
from tuner.spec.spec import Spec
from tuner.units import format_s

MOST_TIES = 16
"""Alternatives inside the error band that are listed, where there are as many."""

MOST_PARETO = 16

WIDER = (2, 4, 8)
"""Multiples of a row's tokens that are tried for the same documents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedDecision:
    """A decision with its price."""

    decision: TrainDecision
    candidate: Candidates
    detail: Detail
    objective_s: float
    """The larger of closed form and simulation, with the engine's own gradient buckets."""
    simulated_s: float
    """Simulated seconds of a step, with the decision's own buckets, as `detail` is."""
    note: str = ""
    """Gain of the decision's own gradient buckets, in words."""

    @property
    def step_s(self) -> float:
        """Return the seconds of `objective_s` with the decision's own buckets."""
        return max(number(self.detail.step.step_s), self.simulated_s)

    @property
    def saved_s(self) -> float:
        """Return the seconds of a step that the decision's own buckets save."""
        return self.objective_s - self.step_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenDecision:
    """The chosen decision, and the fastest one where that is another."""

    chosen: PricedDecision
    fastest: PricedDecision
    order: tuple[int, ...]
    """Rows of the search, best first."""
    index: int
    """Row of the fastest decision."""
    reasons: tuple[str, ...] = ()
    """Advantages of the chosen decision."""
    expected_s: float | None = None
    """Seconds of a step of the chosen decision with the expected cost of running out of memory; the
    next field is that of the fastest. None where both are the same decision."""
    fastest_expected_s: float | None = None
    headroom: Headroom = NO_HEADROOM
    """Searches for decisions with headroom, where those near the fastest have too little."""

    @property
    def searched_ratio(self) -> float | None:
        """Share by which searched steps exceed the chosen one, up to which headroom was sought."""
        if self.headroom.complete_s is None:
            return None
        ratio = self.headroom.complete_s / self.chosen.objective_s - 1.0
        return ratio if 0.0 < ratio < math.inf else None

    @property
    def has_searched_all(self) -> bool:
        """Return whether every decision was searched for headroom, however slow."""
        return self.headroom.complete_s is not None and math.isinf(self.headroom.complete_s)

    @property
    def is_fastest(self) -> bool:
        """Nothing was preferred to the fastest."""
        return self.chosen is self.fastest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFormatter:
    """Formats a search outcome as fields of a plan."""

    spec: Spec
    priced_pool: PricedPool
    search: SearchOutcome
    band: Band
    """Error band: measured over predicted seconds."""
    ratios: Ratios
    """Error bands of the ratio of two decisions' seconds."""

    def prediction(self, detail: Detail, *, simulated_s: float | None = None) -> TrainPrediction:
        """Predict one decision."""
        step_s = max(number(detail.step.step_s), simulated_s or 0.0)
        problem = self.search.problem
        seconds = detail.step.by_cause(simulated_s=step_s)
        rows = predict_rows(problem, detail, step_s=step_s)
        if rows is not None:
            lost_s = max(0.0, min(rows.waiting_s + rows.order_s, seconds["bubble"]))
            seconds |= {"bubble": seconds["bubble"] - lost_s, "rows": lost_s}
        jobs, reliability = failure_model(self.spec, self.priced_pool, detail.strategies)
        pool = self.priced_pool.pool
        run = forecast_run(
            self.spec.goal,
            jobs,
            reliability,
            step_s=step_s,
            devices_per_node=pool.devices_per_node,
            price_per_device_hour=pool.price_per_device_hour,
        )
        return predict_step(
            problem,
            step_s=step_s,
            simulated_s=simulated_s,
            band=self.band,
            devices=problem.num_devices,
            flop_per_s=problem.num_devices * number(problem.hardware.matmul_flop_per_s),
            peak_bytes=detail.memory.total_PC[:, 0],
            memory_limit_bytes=int(problem.memory_limit_bytes),
            memory_capacity_bytes=int(problem.capacity_bytes),
            risk=self.risk(detail),
            activation_bytes=tuple(round(float(b)) for b in detail.memory.activations_PC[:, 0]),
            breakdown_s=seconds,
            communication_s=sum(
                seconds[name] for name in ("tensor", "context", "expert", "sharding", "bubble")
            ),
            stages=stage_predictions(detail),
            run=run,
            host_memory=self._host_memory(detail, copies_on_hosts(run, jobs)),
            rows=rows,
        )

    def _host_memory(self, detail: Detail, copies: float) -> HostMemory | None:
        """Count what a decision and its checkpoints take of a node's memory."""
        problem, piece = self.search.problem, detail.piece
        offloaded = offloaded_bytes(
            problem.shape,
            detail.strategies,
            problem.hardware,
            detail.stages,
            constants=problem.memory_constants,
            devices_per_node=problem.devices_per_node,
            inside_C=np.array([piece is not None and pipeline_inside("-".join(piece.order))]),
        )
        parts = {what: float(size_C[0]) for what, size_C in offloaded.items()}
        return host_memory({**parts, COPIES: copies}, limit_bytes=problem.host_limit_bytes)

    def risk(self, detail: Detail) -> MemoryForecast:
        """Forecast the memory risk of one decision."""
        problem = self.search.problem
        is_recorded = problem.expert_imbalance is not None or problem.model.moe is None
        return forecast_memory(
            detail.memory.total_PC[:, 0],
            0.0
            if is_recorded
            else uneven_bytes(
                problem.shape,
                detail.strategies,
                problem.hardware,
                detail.stages,
                constants=problem.memory_constants,
            ),
            capacity_bytes=problem.capacity_bytes,
            software=problem.software,
            prices=loss_prices(self.spec.goal),
        )

    def roomier(self, choice: ChosenDecision) -> Roomier | None:
        """Compare with the fastest safe decision, where the chosen one may run out of memory."""
        best = choice.chosen
        chosen = self.simulated_prediction(best)
        if (chosen.out_of_memory_probability or 0.0) <= SMALL:
            return None
        row = fastest_with_headroom(
            self.search, step_s=best.objective_s, headroom=choice.headroom.searches
        )
        if row is None:
            return None
        single = replace(self.search, solutions=row)
        decision, predicted = replace(self, search=single)._predict_row(0)
        slower_ratio = max(0.0, predicted.step_time_s / chosen.step_time_s - 1.0)
        return Roomier(
            decision=decision,
            step_time_s=predicted.step_time_s,
            slower_ratio=slower_ratio,
            slower_s=slower_ratio * loss_prices(self.spec.goal).run_s(chosen.step_time_s),
            peak_memory_bytes=max(predicted.peak_memory_bytes),
            out_of_memory_probability=predicted.out_of_memory_probability or 0.0,
        )

    def alternatives(self, choice: ChosenDecision, *, top: int) -> tuple[Alternative, ...]:
        """Return the next rows and why they lost; the fastest first where it was not chosen.

        As many as hold `top` layouts with the chosen one's, and the ties.
        """
        solutions = self.search.solutions
        assert solutions is not None
        best = choice.chosen
        tied = tied_rows(self.search, self.ratios, chosen=best.decision, step_s=best.objective_s)
        others = [index for index in choice.order if index != choice.index]
        ties = sum(tied[index] for index in others)
        chosen = self.simulated_prediction(best)
        runners_up = []
        if not choice.is_fastest:
            runners_up.append((choice.fastest.decision, self.simulated_prediction(choice.fastest)))
        layouts = list(solutions.layouts())
        ranked = [layout_of(best.decision), *(layouts[index] for index in others)]
        for index in others[: max(num_runners_up(ranked, top=top), min(ties, MOST_TIES))]:
            decision, predicted = self._predict_row(index)
            if decision != best.decision:
                runners_up.append((decision, predicted))
        return tuple(
            to_alternative(
                decision,
                predicted,
                chosen=chosen,
                band=self.ratios.between(
                    best.decision, decision, ratio=predicted.step_time_s / chosen.step_time_s
                ),
            )
            for decision, predicted in runners_up
        )

    def preference(self, choice: ChosenDecision, room: Roomier | None) -> Preference | None:
        """Say why the fastest was not chosen; None where it was.

        Args:
            choice: that was made.
            room: the fallback of the chosen one.
        """
        if choice.is_fastest:
            return None
        tries = (choice.fastest, choice.chosen)
        risks = [self.risk(decision.detail) for decision in tries]
        fastest_chance, chosen_chance = (risk.out_of_memory_probability for risk in risks)
        tried_first_s = None
        if is_excluded(fastest_chance, beside=chosen_chance):
            step_s = [decision.step_s for decision in tries]
            if room is not None:
                step_s.append(room.step_time_s)
                risks.append(fallback_forecast(room.out_of_memory_probability))
            tried_first_s = tried_in_turn_s(loss_prices(self.spec.goal), step_s, risks)

        def with_buckets_s(expected_s: float | None, best: PricedDecision) -> float | None:
            return None if expected_s is None else expected_s - best.saved_s

        return Preference(
            fastest=choice.fastest.decision,
            fastest_step_s=choice.fastest.step_s,
            slower_ratio=max(0.0, choice.chosen.step_s / choice.fastest.step_s - 1.0),
            reasons=choice.reasons,
            expected_step_s=with_buckets_s(choice.expected_s, choice.chosen),
            fastest_expected_step_s=with_buckets_s(choice.fastest_expected_s, choice.fastest),
            fastest_out_of_memory_probability=fastest_chance,
            fastest_tried_first_step_s=tried_first_s,
        )

    def with_wider_rows(self, predicted: TrainPrediction, best: PricedDecision) -> TrainPrediction:
        """Add the fastest longer rows for the same documents, in the layout of a decision."""
        problem, at = self.search.problem, best.decision
        if predicted.rows is None or problem.rows is None:
            return predicted
        documents = histogram(problem.rows.tokens_D, np.ones(len(problem.rows.tokens_D)))
        wider, step_s = None, predicted.step_time_s
        turn = at.micro_batch_size * at.data_parallel_size
        if at.virtual_pipeline_model_parallel_size > 1:
            turn *= at.pipeline_model_parallel_size
        for factor in WIDER:
            exact = problem.global_batch_size / factor
            batch = max(1, round(exact / turn)) * turn
            tokens = factor * problem.sequence_length
            rows = pack_rows(documents, rule=problem.rows.rule, capacity=tokens)
            changed = replace(
                problem,
                sequence_length=tokens,
                global_batch_size=batch,
                rows=rows,
                packed=packed_columns(problem.shape, rows),
            )
            search = replace(self.search, problem=changed)
            detail = price_in_layout(search, best.candidate, best.detail.stages)
            peak, took_s = detail.memory.total_PC.max(), number(detail.step.step_s)
            took_s = exact / batch * max(took_s, simulated_s(detail))
            if peak <= problem.memory_limit_bytes and took_s < step_s:
                step_s = took_s
                wider = WiderRows(
                    tokens=tokens, rows=batch, step_time_s=took_s, peak_memory_bytes=round(peak)
                )
        return predicted.model_copy(
            update={"rows": predicted.rows.model_copy(update={"wider": wider})}
        )

    def simulated_prediction(self, best: PricedDecision) -> TrainPrediction:
        """Predict a priced and simulated decision."""
        return self.prediction(best.detail, simulated_s=best.simulated_s)

    def _predict_row(self, index: int) -> tuple[TrainDecision, TrainPrediction]:
        """Predict a row's decision with gradient buckets of its own.

        Its schedule is simulated like the chosen one's.
        """
        usual = price_solution(self.search, index)
        bucket, detail = with_best_bucket(self.search.problem, usual)
        decision = TrainDecision.model_validate(
            solution_fields(self.search, index) | {"ddp_bucket_size": bucket}
        )
        simulated = simulated_s(usual) - saved_s(usual, detail)
        return decision, self.prediction(detail, simulated_s=simulated)

    def pareto(self) -> tuple[ParetoPoint, ...]:
        """Return what more time would save in memory."""
        solutions = self.search.solutions
        assert solutions is not None
        return tuple(
            ParetoPoint(
                decision=TrainDecision.model_validate(solution_fields(self.search, index)),
                step_time_s=float(solutions.step_s[index]),
                peak_memory_bytes=round(float(solutions.peak_bytes[index])),
                cost_per_step=cost_of_step(self.search, index),
            )
            for index in pareto_front(self.search)[:MOST_PARETO]
        )


def predict_rows(problem: TrainProblem, detail: Detail, *, step_s: float) -> RowPrediction | None:
    """Predict the rows of a step; None where every sequence is one document."""
    rows, steps = problem.rows, row_steps(detail)
    in_order = row_steps(detail, are_sorted=True)
    if rows is None or steps is None or in_order is None:
        return None
    even_s = step_s - steps.lost_s
    p10_s, p90_s = even_s + np.quantile(steps.lost_s_B, (0.1, 0.9))
    return RowPrediction(
        rule=rows.rule,
        fill_ratio=rows.fill_ratio,
        documents_per_row=rows.documents_per_row,
        document_tokens=float(rows.total_R(np.square).sum() / rows.tokens_D.sum()),
        step_time_s_p10=float(p10_s),
        step_time_s_p90=float(p90_s),
        padding_s=step_s * (1.0 - rows.fill_ratio),
        waiting_s=steps.waiting_s,
        order_s=steps.order_s,
        sorted_step_time_s=even_s + in_order.lost_s,
    )


def predict_step(
    problem: TrainProblem,
    *,
    step_s: float,
    simulated_s: float | None,
    band: Band,
    devices: int,
    flop_per_s: float,
    peak_bytes: Iterable[float],
    risk: MemoryForecast,
    **fields: Any,
) -> TrainPrediction:
    """Predict a step.

    Args:
        problem: of the search; of any pool where there are several.
        step_s: its seconds.
        simulated_s: the same by simulation.
        band: measured over predicted seconds.
        devices: that it runs on.
        flop_per_s: peak of all of them together.
        peak_bytes: of every pipeline rank.
        risk: of running out of memory.
        fields: others of the prediction.
    """
    tokens = problem.sequence_length * problem.global_batch_size
    per_device = tokens / devices
    low_s, high_s = step_s * band[0], step_s * band[1]
    peaks = tuple(round(float(peak)) for peak in peak_bytes)
    flop = tokens * problem.flop_per_token
    return TrainPrediction(
        step_time_s=step_s,
        step_time_s_band=(low_s, high_s),
        tokens_per_s_per_device=per_device / step_s,
        tokens_per_s_per_device_band=(per_device / high_s, per_device / low_s),
        peak_memory_bytes=peaks,
        peak_memory_bytes_band=tuple(peak_band(peak) for peak in peaks),
        **asdict(risk),
        # Its convention counts weight gradients, which adapters skip.
        mfu_ratio=None if problem.tuned.get("adapter_rank") else flop / (flop_per_s * step_s),
        played_step_time_s=simulated_s,
        **fields,
    )


def forecast_run(
    goal: TrainGoal,
    jobs: Jobs,
    reliability: FailureModel | None,
    *,
    step_s: float,
    devices_per_node: float,
    price_per_device_hour: float | None,
) -> RunForecast | None:
    """Forecast the run; None where neither its length nor failures are stated."""
    if goal.reliability is None and goal.tokens is None:
        return None
    run = TrainingRun(
        step_s=step_s,
        tokens_per_step=goal.tokens_per_step,
        tokens=goal.tokens,
        devices_per_node=devices_per_node,
        price_per_device_hour=price_per_device_hour,
    )
    return forecast(run, jobs=jobs, reliability=reliability)


def refuse_impossible_checkpoints(goal: TrainGoal, predicted: TrainPrediction) -> None:
    """Refuse stated checkpoints for which the chosen decision leaves no room.

    Raises:
        SpecError: its step is longer than the stated interval, or copies on hosts have no room.
    """
    stated, run = goal.reliability, predicted.run
    if stated is None or run is None:
        return
    interval_s, step_s = stated.checkpoint.interval, predicted.step_time_s
    if interval_s is not None and interval_s < step_s:
        raise SpecError(
            f"goal.reliability.checkpoint.interval: {format_s(interval_s)} is shorter than a step"
            f" of the plan, {format_s(step_s)}; state a longer one, or leave it out"
        )
    if run.checkpoint_levels is not None and not run.checkpoint_levels.levels:
        raise SpecError(f"goal.reliability.checkpoint: {run.reason}")
    host = predicted.host_memory
    if host is not None and not host.fits:
        raise SpecError(
            f"goal.reliability.checkpoint: a node has no memory for copies beside what is offloaded"
            f" there: {host.words}; state more ({STATED_AS}), or save without copies on hosts"
        )


def effective_step_s(
    spec: Spec, priced_pool: PricedPool, detail: Detail, *, step_s: float
) -> float:
    """Seconds of wall clock per step with failures; the step itself where none are priced."""
    jobs, reliability = failure_model(spec, priced_pool, detail.strategies)
    return number(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def failure_model(
    spec: Spec, priced_pool: PricedPool, strategies: Strategies
) -> tuple[Jobs, FailureModel | None]:
    """Jobs of one decision that can fail, and how often they do."""
    pool, sheet = priced_pool.pool, priced_pool.sheet
    return failures_on_pool(
        spec,
        strategies,
        pool=pool,
        profile=None if priced_pool.measured is None else priced_pool.measured.profile,
        nic_bytes_per_s=sheet.scale_out_bytes_per_s if pool.nic is None else pool.nic,
        host_bytes_per_s=sheet.host_bytes_per_s,
    )


def failures_on_pool(
    spec: Spec,
    strategies: Strategies,
    *,
    pool: Pool,
    profile: Profile | None,
    nic_bytes_per_s: float,
    host_bytes_per_s: float,
) -> tuple[Jobs, FailureModel | None]:
    """Jobs of one decision that can fail, and how often they do.

    Args:
        spec: of the plan.
        strategies: the decision as a column.
        pool: that runs it.
        profile: of the pool.
        nic_bytes_per_s: of one NIC.
        host_bytes_per_s: between a device and the memory of its host.
    """
    stated = spec.goal.reliability
    zero_stage = round(number(strategies.zero_stage))
    jobs = jobs_on_pool(
        single(strategies),
        parameters=float(num_parameters(spec.model)),
        pool=pool,
        stated=stated or NEVER_FAILS,
        adapters=adapter_parameters(spec),
        saved=spec.programs.saved_bytes(
            adapters=spec.goal.adapters,
            zero_stage=zero_stage,
            precision=spec.goal.precision.value,
        ),
    )
    if stated is None:
        return jobs, None
    engines, may_wait = spec.programs.capabilities(), stated.checkpoint.asynchronous == "auto"
    limit = pool.host_limit_bytes(profile)
    host = host_level(
        stated,
        strategies=strategies,
        programs=spec.programs,
        pool=pool,
        nic_bytes_per_s=nic_bytes_per_s,
        profile=profile,
    )
    return jobs, resolved(
        stated,
        host_bytes_per_s=host_bytes_per_s,
        profile=profile,
        host=host,
        has_background=not background_checkpoint_obstacle(engines, zero_stage=zero_stage)
        and (limit is None or copied_bytes(jobs) <= limit or not may_wait),
        has_pinned=engines.pinned_checkpoints
        and (profile is None or profile.header.machine.device_kind == "cuda"),
        restarts_in_process=not spec.programs.in_process_restart_obstacle(zero_stage=zero_stage),
        loading_ranks=spec.programs.loading_ranks(devices_per_node=pool.devices_per_node),
    )


def stage_predictions(detail: Detail) -> tuple[StagePrediction, ...]:
    """Stages in execution order; the bytes of a pipeline rank are shared by its layers."""
    stages, memory = detail.stages, detail.memory
    layers_S = (stages.dense_SC + stages.moe_SC)[:, 0]
    ranks = len(memory.weights_PC)
    layers_P = np.array([layers_S[rank::ranks].sum() for rank in range(ranks)])
    of_rank = len(layers_S) // ranks

    def at(grid: np.ndarray, stage: int) -> int:
        rank = stage % ranks
        layers = layers_P[rank]
        share = layers_S[stage] / layers if layers else 1.0 / of_rank
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
