"""DistServe's placements (arXiv:2401.09670), as far as its published constants determine them.

    prefill    D = a + b l + c l^2 ms of a prompt of l tokens; Poisson arrivals at R, no batching:
               TTFT = D + R D^2 / (2 p (p - R D)) on p stages
    decode     T = a + b (tokens in context) + c (sequences) ms of a step, an equal part of it on
               each of p stages, each of which has a batch; 2 ms + 1e-4 ms a sequence to start one

Constants are those of the simulator's fits on A100-80GB. Prompts have 755 tokens and outputs 200.
Not among them: how long the prompts of its traces are, by which TTFT P90 made it choose two tensor
ranks for OPT-13B's prefill, and what a pipeline of unequal prompts loses, so that prefill is
unpipelined here.
"""

from collections.abc import Mapping

import pytest

from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstanceRole,
    InstancesProblem,
    Route,
)
from solvers.registry import INSTANCES
from tests.expect import present

Fit = tuple[float, float, float]
Degrees = tuple[int, int]

PREFILL: Mapping[str, Mapping[int, Fit]] = {
    "OPT-13B": {1: (18.10, 0.1019, 7.12e-6), 2: (14.74, 0.0686, 2.45e-6)},
    "OPT-66B": {
        2: (43.06, 0.2742, 2.25e-5),
        4: (29.44, 0.1514, 8.32e-6),
        8: (25.49, 0.1066, 3.39e-6),
    },
}
DECODE: Mapping[str, Mapping[int, Fit]] = {
    "OPT-13B": {
        1: (19.93, 6.27e-4, 0.0385),
        2: (13.29, 3.41e-4, 0.0630),
        4: (10.26, 1.88e-4, 0.0327),
    },
    "OPT-66B": {
        2: (48.29, 9.42e-4, 0.1276),
        4: (30.76, 4.52e-4, 0.0633),
        8: (23.16, 2.27e-4, 0.0480),
    },
}
"""By tensor ranks, of batches below 95 sequences."""
WEIGHT_BYTES = {"OPT-13B": 26e9, "OPT-66B": 132e9}
CACHE_BYTES = {"OPT-13B": 2 * 2 * 40 * 5120, "OPT-66B": 1.13e9 / 512}
"""Of a token."""
DEVICE_BYTES, MOST_TOKENS = 80e9, 50_000
"""Of a batch's context, in the released simulator."""
INPUT, OUTPUT, TPOT_MS = 755, 200, 100.0


def prompt_s(model: str, ranks: int, tokens: float) -> float:
    a, b, c = PREFILL[model][ranks]
    return (a + b * tokens + c * tokens**2) / 1e3


def most_prompts_per_s(prompt_time_s: float, *, ttft_s: float, stages: int = 1) -> float:
    """Solve TTFT = D + R D^2 / (2 p (p - R D)) for R."""
    if prompt_time_s >= ttft_s:
        return 0.0
    waits = 2.0 * stages * (ttft_s - prompt_time_s) / prompt_time_s
    return stages * waits / (1.0 + waits) / prompt_time_s


def decoded_per_s(model: str, ranks: int, stages: int) -> float:
    a, b, c = DECODE[model][ranks]
    room = (DEVICE_BYTES * ranks * stages - WEIGHT_BYTES[model]) / CACHE_BYTES[model]
    best = 0.0
    for batch in range(1, int(min(MOST_TOKENS, room / stages) / (INPUT + OUTPUT)) + 1):
        step_ms = a + b * batch * (INPUT + OUTPUT / 2) + c * batch
        token_ms = step_ms + stages * (2.0 + 1e-4 * batch)
        if token_ms <= TPOT_MS:
            best = max(best, 1e3 * stages * batch / token_ms / OUTPUT)
    return best


def fewest_devices(
    prefill: Mapping[Degrees, float],
    decode: Mapping[Degrees, float],
    *,
    devices: int,
) -> tuple[dict[Degrees, int], dict[Degrees, int], float]:
    """Return the instances of each phase, and the objective."""
    options = [(0, *one) for one in prefill.items()] + [(1, *one) for one in decode.items()]
    options = [option for option in options if option[2] > 0.0]
    problem = InstancesProblem(
        pools=(DevicePool(name="a100", devices=devices),),
        groups=(
            ColumnGroup(name="p", role=InstanceRole.PREFILL),
            ColumnGroup(name="d", role=InstanceRole.DECODE),
        ),
        columns=tuple(
            Column(
                name=f"{phase} {ranks}x{stages}",
                group=phase,
                devices_P=(ranks * stages,),
                rate_per_s=rate,
            )
            for phase, (ranks, stages), rate in options
        ),
        routes=(Route(sender=0, receiver=1),),
        objective=InstanceObjective.RATE,
        max_kinds=1,
    )
    outcome = INSTANCES.solve(problem, time_limit_s=60.0)
    chosen: tuple[dict[Degrees, int], dict[Degrees, int]] = ({}, {})
    for (phase, degrees, _), count in zip(options, present(outcome.solution).count_J, strict=True):
        if count:
            chosen[phase][degrees] = count
    return *chosen, outcome.objective


def test_the_fits_give_the_published_prompt_of_512_tokens() -> None:
    assert prompt_s("OPT-13B", 1, 512) == pytest.approx(72.1e-3, abs=0.05e-3)
    assert prompt_s("OPT-13B", 2, 512) == pytest.approx(50.5e-3, abs=0.05e-3)


def test_tensor_ranks_win_below_the_load_that_the_formulas_cross_at() -> None:
    # D = 1: two stages wait R / (4 (2 - R)), two ranks of speed-up K take 1/K + R / (2 K (K - R)).
    for speed_up, crossing in ((1.2, 0.434), (1.5, 0.936), (1.7, 1.257), (1.9, 1.626)):

        def gain(load: float, speed_up: float = speed_up) -> float:
            ranks = 1.0 / speed_up + load / (2.0 * speed_up * (speed_up - load))
            return 1.0 + load / (4.0 * (2.0 - load)) - ranks

        assert gain(crossing - 0.002) > 0.0 > gain(crossing + 0.002)


def test_its_example_is_split_two_to_one() -> None:
    prefill, decode, seconds = fewest_devices({(1, 1): 5.6}, {(1, 1): 10.0}, devices=3)
    assert (prefill, decode) == ({(1, 1): 2}, {(1, 1): 1})
    assert 1.0 / seconds / 3 == pytest.approx(3.3, abs=0.05)


def test_its_placements_come_out_of_its_constants() -> None:
    # Published: OPT-13B decodes on one device; OPT-66B prefills on 4 x 1, decodes on 2 x 2.
    for model, ttft_s, stages in (("OPT-13B", 0.2, (1, 2, 4, 5)), ("OPT-66B", 0.4, (1, 2, 4, 8))):
        prefill = {
            (ranks, 1): most_prompts_per_s(prompt_s(model, ranks, INPUT), ttft_s=ttft_s)
            for ranks in PREFILL[model]
        }
        decode = {
            (ranks, deep): decoded_per_s(model, ranks, deep)
            for ranks in DECODE[model]
            for deep in stages
        }
        many = fewest_devices(prefill, decode, devices=4096)
        assert set(many[1]) == {{"OPT-13B": (1, 1), "OPT-66B": (2, 2)}[model]}
        if model == "OPT-66B":
            assert set(many[0]) == {(4, 1)}
            # Low node affinity: a pair on each machine of eight, and no cache on a NIC.
            assert fewest_devices(prefill, decode, devices=8)[:2] == ({(4, 1): 1}, {(2, 2): 1})
