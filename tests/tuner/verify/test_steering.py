"""What Optuna proposes: the model's order first, then what launches say of the model."""

import math
import random

import optuna

from tuner.verify.records import PricedPoint
from tuner.verify.search import METRICS, POINT, PriorSampler

SIZES = (128, 256, 512, 1024)
GRID = tuple(
    PricedPoint(
        knobs={"tokens": tokens, "running": running, "page": page},
        predicted=(1.0 + abs(math.log2(tokens / 256)) / 8 + running / 64, running / 24),
    )
    for tokens in SIZES
    for running in (4, 8, 16)
    for page in ("small", "large")
)
"""Priced by tokens and sequences; the model knows nothing of pages."""


def launched(sampler: PriorSampler, *, trials: int, slow_page: str, seed: int) -> list[int]:
    draw, measured = random.Random(seed), dict[int, tuple[float, ...]]()
    for _ in range(trials):
        place = sampler.choose(measured)
        point = GRID[place]
        factor = 1.4 if point.knobs["page"] == slow_page else 1.0
        measured[place] = (
            2.0 * point.predicted[0] * factor * draw.lognormvariate(0.0, 0.01),
            point.predicted[1],
        )
    return list(measured)


def test_what_the_model_misses_of_a_knob_is_learnt_from_few_launches() -> None:
    sampler = PriorSampler(GRID, errors=(0.7, 0.05))
    best = min(point.predicted[0] for point in GRID)
    for slow in ("small", "large"):
        found = 0
        for seed in range(20):
            order = launched(sampler, trials=6, slow_page=slow, seed=seed)
            assert len(set(order)) == 6
            pages = [GRID[place].knobs["page"] for place in order]
            found += pages[2:].count(slow) <= 2
            reached = min(
                GRID[place].predicted[0] for place in order if GRID[place].knobs["page"] != slow
            )
            assert reached <= 1.05 * best
        assert found >= 15


def test_points_that_are_likely_to_exceed_a_limit_are_left_out() -> None:
    points = tuple(
        PricedPoint(knobs={"size": size}, predicted=(1.0 / size, size / 10.0))
        for size in range(1, 11)
    )
    sampler = PriorSampler(points, errors=(0.7, 0.5))
    # The latency of size 4 is twice the predicted one, over its limit.
    order = [sampler.choose({3: (0.25, 1.1)})]
    measured = {3: (0.25, 1.1), order[0]: (1.0 / (order[0] + 1), 0.275 * (order[0] + 1))}
    order.append(sampler.choose(measured))
    assert max(order) < 3


def test_a_failed_or_running_trial_is_not_proposed_again() -> None:
    sampler = PriorSampler(GRID, errors=(0.7, 0.05))
    study = optuna.create_study(sampler=sampler)
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.RUNNING)
    for place in range(len(GRID) - 1):
        state = states[place % 2]
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=1.0 if state is states[0] else None,
                params={POINT: place},
                distributions=sampler.space,
                user_attrs={METRICS: (None, None)} if state is states[0] else {},
            )
        )
    assert study.ask(sampler.space).params == {POINT: len(GRID) - 1}
