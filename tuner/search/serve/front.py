"""Throughput of a device against the speed of one request: options that none dominates.

    n sequences of a rank    T(n) seconds per token    d data ranks    g devices of an instance

    speed of a user      1 / T(n)
    speed of a device    d n / (g T(n)), prefill elsewhere not counted
    disaggregated        d n / ((g + m g_p) T(n)), m prefill instances of g_p devices for each one
                         that decodes: as many, in fractions, as keep it busy; one in all at least,
                         and no more of either than the pools hold

Every batch of every option that the search priced is a candidate, those that miss the target of the
time per token included; of prefill the fastest one a device whose caches reach the instance and
whose transfers the release accepts. Options whose single prompt misses the TTFT target were
not priced and are not here. Modes that multiplex devices or offload prompts have the batches of
their program only. A release must launch what counts.

Source: the chart is that of published serving benchmarks (InferenceX; aiconfigurator's frontier).

Not covered: queueing, whole instances, the bytes that links carry: a plan reaches its own point
only.

Letters: N batches, P points.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.config.serve_words import short_group
from tuner.plans.serve import FrontPoint
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.search.serve.instances import to_instance_group
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import BatchCurve, Option
from tuner.search.serve.problem import ModeSolution, ModeSolutions, ServeProblem
from tuner.search.serve.program import program_roles
from tuner.spec.serving.goal import Mode

MOST_POINTS: Final = 50
"""Largest number of points of one mode; more are thinned evenly, the ends kept."""
SLACK: Final = 1e-9
"""Share of a device that is ignored as rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """An option at its batches, with the prefill instance that it needs."""

    option: Option
    prefill: Option | None
    running_N: Floats
    tpot_s_N: Floats
    rate_N: Floats
    """Requests a second of one instance."""
    output_tokens: float
    """Output tokens of a mean request."""

    @property
    def user_N(self) -> Floats:
        """Tokens a second of one request."""
        return 1.0 / self.tpot_s_N

    @property
    def prefill_N(self) -> Floats:
        """Prefill instances per decode instance; infinite where the pools hold too few."""
        if self.prefill is None:
            return np.zeros_like(self.running_N)
        busy_N = self.rate_N / self.prefill.rate_per_s
        decode_pool, prefill_pool = self.option.serving_pool.pool, self.prefill.serving_pool.pool
        is_one = decode_pool.name == prefill_pool.name
        left = decode_pool.num_devices - (self.prefill.devices if is_one else 0)
        most_decodes = left // self.option.devices
        if most_decodes < 1:
            return np.full_like(busy_N, np.inf)
        # With less than one prefill instance for each, several share it.
        sharing_N = np.clip(1.0 / busy_N, 1.0, float(most_decodes))
        reading_N = np.maximum(sharing_N * busy_N, 1.0)
        taken_N = reading_N * self.prefill.devices
        taken_N = taken_N + (sharing_N * self.option.devices if is_one else 0.0)
        return np.where(taken_N <= prefill_pool.num_devices + SLACK, reading_N / sharing_N, np.inf)

    @property
    def device_N(self) -> Floats:
        """Tokens a second of a device, those that read its prompts counted; 0 where none can."""
        devices_N = np.full_like(self.running_N, float(self.option.devices))
        if self.prefill is not None:
            devices_N = devices_N + self.prefill_N * self.prefill.devices
        return np.asarray(self.output_tokens * self.rate_N / devices_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FrontPoint:
    """One batch of one offer."""

    mode: Mode
    offer: Offer
    place: int
    user: float
    device: float


def pareto_front(
    problem: ServeProblem, solutions: ModeSolutions, *, most_points: int = MOST_POINTS
) -> tuple[FrontPoint, ...]:
    """Return the front of every mode that was priced and can be launched.

    Args:
        problem: that was solved, with every priced option.
        solutions: of its modes.
        most_points: of one mode.
    """
    fronts = [_front(mode, offers) for mode, offers in _offers(problem, solutions)]
    points = [point for front in fronts for point in front]
    joint = {id(point) for point in _undominated(points)}
    return tuple(
        _front_point(point, problem.demand, on_joint_front=id(point) in joint)
        for front in fronts
        for point in _thinned(front, most_points)
    )


def _offers(problem: ServeProblem, solutions: ModeSolutions) -> Iterator[tuple[Mode, list[Offer]]]:
    launched = {solution.mode: solution for solution in solutions.launchable}
    for name in problem.modes:
        if load_mode(name).is_routed:
            yield name, list(_priced_offers(problem, program_roles(name)))
        elif load_mode(name).makes_options and name in launched:
            yield name, list(_program_offers(launched[name], problem))


def _priced_offers(problem: ServeProblem, roles: tuple[Role, ...]) -> Iterator[Offer]:
    """Yield every option that decodes, with the prefill instance, if any, that costs it least."""
    prefills = [
        candidate for candidate in problem.options.options if candidate.role is Role.PREFILL
    ]
    best: dict[object, Option | None] = {}
    for curve in problem.options.curves:
        option = curve.option
        if option.role is roles[-1] and len(roles) == 1:
            yield offer_of(curve, None, problem.demand)
        elif option.role is roles[-1]:
            degrees = option.degrees
            pool = option.serving_pool.pool.name
            key = pool, degrees.attention_tensor, degrees.pipeline, option.devices
            if key not in best:
                best[key] = _sender(option, prefills, problem.kv_transfers)
            sender = best[key]
            if sender is not None:
                yield offer_of(curve, sender, problem.demand)


def _sender(option: Option, prefills: Iterable[Option], kv_transfers: KvTransfers) -> Option | None:
    """Return the prefill option with the most requests a device that may send KV caches to one.

    The pool holds an instance of both.
    """
    pool = option.serving_pool.pool
    reachable = (
        prefill
        for prefill in prefills
        if kv_transfers.reach(prefill.serving_pool, option.serving_pool)
        and not kv_transfers.refusals(prefill, option)
        and (
            prefill.serving_pool.pool.name != pool.name
            or prefill.devices + option.devices <= pool.num_devices
        )
    )
    return max(reachable, key=lambda prefill: prefill.rate_per_s / prefill.devices, default=None)


def _program_offers(solution: ModeSolution, problem: ServeProblem) -> Iterator[Offer]:
    """Yield the options that a mode's program chose from, each at its own batch."""
    options = solution.solved.program.options
    prefills = [candidate for candidate in options if candidate.role is Role.PREFILL]
    for option in options:
        if option.role is Role.PREFILL:
            continue
        sender = None
        if solution.threshold is not None:
            # Only instances of another pool read long prompts.
            others = [
                prefill for prefill in prefills if prefill.serving_pool is not option.serving_pool
            ]
            sender = _sender(option, others, problem.kv_transfers)
        if solution.threshold is None or sender is not None:
            yield Offer(
                option=option,
                prefill=sender,
                running_N=np.array([float(option.running)]),
                tpot_s_N=np.array([option.tpot_s]),
                rate_N=np.array([option.rate_per_s]),
                output_tokens=problem.demand.output_tokens,
            )


def offer_of(curve: BatchCurve, prefill: Option | None, demand: Demand) -> Offer:
    """Return a curve's batches with the prefill instance that it needs."""
    return Offer(
        option=curve.option,
        prefill=prefill,
        running_N=curve.running_N,
        tpot_s_N=curve.tpot_s_N,
        rate_N=curve.rate_N,
        output_tokens=demand.output_tokens,
    )


def _front(mode: Mode, offers: Sequence[Offer]) -> list[_FrontPoint]:
    """Return the mode's non-dominated points, the fastest for a device first."""
    points = [
        _FrontPoint(mode=mode, offer=offer, place=place, user=float(user), device=float(device))
        for offer in offers
        for place, (user, device) in enumerate(zip(offer.user_N, offer.device_N, strict=True))
        if device > 0.0
    ]
    return _undominated(points)


def _undominated(points: Sequence[_FrontPoint]) -> list[_FrontPoint]:
    """Return those that no other dominates in both speeds; of equal ones the first."""
    kept: list[_FrontPoint] = []
    for point in sorted(points, key=lambda candidate: (-candidate.user, -candidate.device)):
        if not kept or point.device > kept[-1].device:
            kept.append(point)
    return kept[::-1]


def _thinned(points: Sequence[_FrontPoint], limit: int) -> list[_FrontPoint]:
    if len(points) <= limit:
        return list(points)
    places = np.unique(np.round(np.linspace(0, len(points) - 1, limit)).astype(int))
    return [points[place] for place in places]


def _front_point(point: _FrontPoint, demand: Demand, *, on_joint_front: bool) -> FrontPoint:
    offer, running = point.offer, int(point.offer.running_N[point.place])
    reader = offer.option if offer.prefill is None else offer.prefill
    first_s = max(reader.ttft_s, offer.option.ttft_s)
    return FrontPoint(
        mode=point.mode,
        tokens_per_s_per_user=point.user,
        tokens_per_s_per_device=point.device,
        running=running,
        instance=_instance_words(replace(offer.option, running=running)),
        prefill="" if offer.prefill is None else _instance_words(offer.prefill),
        prefill_per_instance=None if offer.prefill is None else float(offer.prefill_N[point.place]),
        ttft_s=first_s,
        within_targets=(
            float(offer.tpot_s_N[point.place]) <= demand.tpot_s and first_s <= demand.ttft_s
        ),
        on_joint_front=on_joint_front,
    )


def _instance_words(option: Option) -> str:
    """Name one instance, its cache left out, which another batch would change."""
    return short_group(to_instance_group(replace(option, kv_tokens=0.0), count=1))
