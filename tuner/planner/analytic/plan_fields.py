"""What a search found, in the words of a plan: predictions, runner-ups, the Pareto front, the run.

A band of (low, high) around a prediction p holds measurements from low p to high p.
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from tuner.costs.analytic.shapes import number, single
from tuner.faults.forecast import Run, RunForecast, forecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.reliability import Jobs, Reliability
from tuner.faults.resolved import jobs_of, resolved
from tuner.plan import (
    Alternative,
    Band,
    ParetoPoint,
    Preference,
    Roomier,
    StagePrediction,
    TrainDecision,
    TrainPrediction,
)
from tuner.planner.analytic.build_problem import Site
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.finalists import played_s
from tuner.planner.analytic.gradient_buckets import saved_s, with_best_bucket
from tuner.planner.analytic.headroom_search import NO_ROOMS, Rooms
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.memory_band import peak_band
from tuner.planner.analytic.memory_risk import (
    SMALL,
    MemoryForecast,
    forecast_of,
    hardly,
    loss_prices,
    tried_in_turn_s,
    uneven_bytes,
)
from tuner.planner.analytic.preference import is_excluded, roomier
from tuner.planner.analytic.search_result import (
    CAUSES,
    Detail,
    cost_of_step,
    decision_of,
    detail_of,
    pareto_front,
)
from tuner.planner.analytic.ties import tied_rows
from tuner.planner.layout_groups import layout_of, rows_of_layouts
from tuner.planner.ratios import Ratios, is_tie
from tuner.planner.reasons import why_lost
from tuner.spec.accounting import num_parameters, training_flop_per_token
from tuner.spec.goal import Reliability as StatedReliability
from tuner.spec.spec import Spec

MOST_TIES = 16
"""Alternatives inside the error band that are listed, where there are as many."""

MOST_PARETO = 16

NEVER_FAILS = StatedReliability(device_mtbf=1e18, restart=0.0)
"""Stands in where the spec prices no failures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Best:
    """A decision with its price."""

    decision: TrainDecision
    candidate: Candidates
    detail: Detail
    objective_s: float
    """The larger of closed form and play, with the engine's own buckets of gradients."""
    played_s: float
    """With the decision's own buckets, as `detail` is."""
    note: str = ""
    """What those buckets save."""

    @property
    def step_s(self) -> float:
        """Like `objective_s`, with the decision's own buckets."""
        return max(number(self.detail.step.step_s), self.played_s)

    @property
    def saved_s(self) -> float:
        """Seconds of a step that those buckets save."""
        return self.objective_s - self.step_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What is chosen, and the fastest that was found where that is another."""

    chosen: Best
    fastest: Best
    order: tuple[int, ...]
    """Rows of the search, best first."""
    index: int
    """The fastest one's row."""
    reasons: tuple[str, ...] = ()
    """What is better about the chosen one."""
    expected_s: float | None = None
    """Seconds of a step of the chosen one with what running out of memory costs on average; of the
    fastest the next. Absent where they are the same."""
    fastest_expected_s: float | None = None
    rooms: Rooms = NO_ROOMS
    """Searches for decisions with more room, where the fastest near the best asked for them."""

    @property
    def searched_ratio(self) -> float | None:
        """How much longer than the chosen one's are steps that were searched for more room."""
        if self.rooms.complete_s is None:
            return None
        ratio = self.rooms.complete_s / self.chosen.objective_s - 1.0
        return ratio if 0.0 < ratio < math.inf else None

    @property
    def has_searched_all(self) -> bool:
        """Whether every decision was searched for one with more room, however slow."""
        return self.rooms.complete_s is not None and math.isinf(self.rooms.complete_s)

    @property
    def is_fastest(self) -> bool:
        """Nothing was preferred to the fastest."""
        return self.chosen is self.fastest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Teller:
    """Says columns in the words of a plan."""

    spec: Spec
    site: Site
    search: Search
    band: Band
    """Measured over predicted seconds."""
    ratios: Ratios
    """The same of the ratio of two decisions' seconds."""

    def prediction(self, detail: Detail, *, played_s: float | None = None) -> TrainPrediction:
        """Say what is expected of one decision."""
        closed_s = number(detail.step.step_s)
        step_s = max(closed_s, played_s or 0.0)
        tokens = self.spec.goal.tokens_per_step / self.search.question.num_devices
        peaks = tuple(round(float(peak)) for peak in detail.memory.total_PC[:, 0])
        low_s, high_s = step_s * self.band[0], step_s * self.band[1]
        seconds = {
            name.removesuffix("_s"): max(0.0, number(getattr(detail.step, name))) for name in CAUSES
        }
        seconds["bubble"] += step_s - closed_s
        seconds = {"computation": max(0.0, step_s - sum(seconds.values()))} | seconds
        return TrainPrediction(
            step_time_s=step_s,
            step_time_s_band=(low_s, high_s),
            tokens_per_s_per_device=tokens / step_s,
            tokens_per_s_per_device_band=(tokens / high_s, tokens / low_s),
            peak_memory_bytes=peaks,
            peak_memory_bytes_band=tuple(peak_band(peak) for peak in peaks),
            memory_limit_bytes=int(self.search.question.memory_limit_bytes),
            memory_capacity_bytes=int(self.search.question.capacity_bytes),
            **asdict(self.risk(detail)),
            activation_bytes=tuple(round(float(b)) for b in detail.memory.activations_PC[:, 0]),
            breakdown_s=seconds,
            communication_s=sum(
                seconds[name] for name in ("tensor", "context", "expert", "bubble")
            ),
            stages=stage_predictions(detail),
            mfu_ratio=self._mfu(step_s),
            played_step_time_s=played_s,
            run=self._run(detail, step_s=step_s),
        )

    def risk(self, detail: Detail) -> MemoryForecast:
        """Say how likely one decision runs out of memory."""
        question = self.search.question
        is_recorded = question.busiest is not None or question.model.moe is None
        return forecast_of(
            detail.memory.total_PC[:, 0],
            0.0
            if is_recorded
            else uneven_bytes(
                question.shape,
                detail.strategies,
                question.hardware,
                detail.stages,
                constants=question.memory_constants,
            ),
            capacity_bytes=question.capacity_bytes,
            software=question.software,
            prices=loss_prices(self.spec.goal),
        )

    def roomier(self, choice: Choice) -> Roomier | None:
        """Say what hardly running out of memory would cost, where the chosen one may."""
        best = choice.chosen
        chosen = self.told(best)
        if (chosen.out_of_memory_probability or 0.0) <= SMALL:
            return None
        row = roomier(self.search, step_s=best.objective_s, rooms=choice.rooms.searches)
        if row is None:
            return None
        alone = replace(self.search, found=row)
        decision, predicted = replace(self, search=alone)._decided(0)
        slower_ratio = max(0.0, predicted.step_time_s / chosen.step_time_s - 1.0)
        return Roomier(
            decision=decision,
            step_time_s=predicted.step_time_s,
            slower_ratio=slower_ratio,
            slower_s=slower_ratio * loss_prices(self.spec.goal).run_s(chosen.step_time_s),
            peak_memory_bytes=max(predicted.peak_memory_bytes),
            out_of_memory_probability=predicted.out_of_memory_probability or 0.0,
        )

    def alternatives(self, choice: Choice, *, top: int) -> tuple[Alternative, ...]:
        """Say which rows come next and why they lost; the fastest first where it was not chosen.

        As many as hold `top` layouts with the chosen one's, and the ties.
        """
        found = self.search.found
        assert found is not None
        best = choice.chosen
        tied = tied_rows(self.search, self.ratios, chosen=best.decision, step_s=best.objective_s)
        others = [index for index in choice.order if index != choice.index]
        ties = sum(tied[index] for index in others)
        chosen = self.told(best)
        told = []
        if not choice.is_fastest:
            told.append((choice.fastest.decision, self.told(choice.fastest)))
        layouts = list(found.layouts())
        ranked = [layout_of(best.decision), *(layouts[index] for index in others)]
        enough = (rows_of_layouts(ranked, top=top) or len(ranked)) - 1
        for index in others[: max(enough, min(ties, MOST_TIES))]:
            decision, predicted = self._decided(index)
            if decision != best.decision:
                told.append((decision, predicted))
        return tuple(
            self._alternative(best.decision, chosen, decision, predicted)
            for decision, predicted in told
        )

    def _alternative(
        self,
        chosen: TrainDecision,
        expected: TrainPrediction,
        decision: TrainDecision,
        predicted: TrainPrediction,
    ) -> Alternative:
        """Say how a runner-up compares with the chosen decision."""
        ratio = predicted.step_time_s / expected.step_time_s
        band = self.ratios.between(chosen, decision, ratio=ratio)
        return Alternative(
            decision=decision,
            predicted=predicted,
            within_band=is_tie(band),
            ratio_band=band,
            lost_by=why_lost(expected, predicted),
        )

    def preference(self, choice: Choice, room: Roomier | None) -> Preference | None:
        """Say why the fastest was not chosen; None where it was.

        Args:
            choice: that was made.
            room: what a run of the chosen one goes on with.
        """
        if choice.is_fastest:
            return None
        tries = (choice.fastest, choice.chosen)
        risks = [self.risk(one.detail) for one in tries]
        chance, own = (risk.out_of_memory_probability for risk in risks)
        tried_first_s = None
        if is_excluded(chance, beside=own):
            step_s = [one.step_s for one in tries]
            if room is not None:
                step_s.append(room.step_time_s)
                risks.append(hardly(room.out_of_memory_probability))
            tried_first_s = tried_in_turn_s(loss_prices(self.spec.goal), step_s, risks)

        def with_buckets_s(expected_s: float | None, best: Best) -> float | None:
            return None if expected_s is None else expected_s - best.saved_s

        return Preference(
            fastest=choice.fastest.decision,
            fastest_step_s=choice.fastest.step_s,
            slower_ratio=max(0.0, choice.chosen.step_s / choice.fastest.step_s - 1.0),
            reasons=choice.reasons,
            expected_step_s=with_buckets_s(choice.expected_s, choice.chosen),
            fastest_expected_step_s=with_buckets_s(choice.fastest_expected_s, choice.fastest),
            fastest_out_of_memory_probability=chance,
            fastest_tried_first_step_s=tried_first_s,
        )

    def told(self, best: Best) -> TrainPrediction:
        """Say what is expected of a priced and played decision."""
        return self.prediction(best.detail, played_s=best.played_s)

    def _decided(self, index: int) -> tuple[TrainDecision, TrainPrediction]:
        """Say a found row's decision with buckets of its own, and what is expected of it.

        Its schedule is played like the chosen one's.
        """
        usual = detail_of(self.search, index)
        bucket, detail = with_best_bucket(self.search.question, usual)
        decision = TrainDecision.model_validate(
            decision_of(self.search, index) | {"ddp_bucket_size": bucket}
        )
        played = played_s(usual) - saved_s(usual, detail)
        return decision, self.prediction(detail, played_s=played)

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
        peak = question.num_devices * number(question.hardware.matmul_flop_per_s)
        return flop / (peak * step_s)

    def _run(self, detail: Detail, *, step_s: float) -> RunForecast | None:
        goal, pool = self.spec.goal, self.site.pool
        if goal.reliability is None and goal.tokens is None:
            return None
        jobs, reliability = failures_of(self.spec, self.site, detail)
        return forecast(
            Run(
                step_s=step_s,
                tokens_per_step=goal.tokens_per_step,
                tokens=goal.tokens,
                devices_per_node=pool.devices_per_node,
                price_per_device_hour=pool.price_per_device_hour,
            ),
            jobs=jobs,
            reliability=reliability,
        )


def effective_step_s(spec: Spec, site: Site, detail: Detail, *, step_s: float) -> float:
    """Seconds of wall clock per step with failures; the step itself where none are priced."""
    jobs, reliability = failures_of(spec, site, detail)
    return number(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def failures_of(spec: Spec, site: Site, detail: Detail) -> tuple[Jobs, Reliability | None]:
    """What decides the failures of one decision, and how often there are any."""
    stated = spec.goal.reliability
    jobs = jobs_of(
        single(detail.strategies),
        parameters=float(num_parameters(spec.model)),
        pool=site.pool,
        stated=stated or NEVER_FAILS,
    )
    if stated is None:
        return jobs, None
    profile = None if site.measured is None else site.measured.profile
    host_bytes_per_s = site.sheet.host_bytes_per_s
    return jobs, resolved(stated, host_bytes_per_s=host_bytes_per_s, profile=profile)


def stage_predictions(detail: Detail) -> tuple[StagePrediction, ...]:
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
