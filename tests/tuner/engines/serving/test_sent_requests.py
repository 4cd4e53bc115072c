"""The jobs that are emitted send the traffic that was planned, as their clients read arguments."""

import itertools
import shlex
from typing import Any

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.engines.serving.sent_requests import SENT_BY, SentRequests, positive_normal
from tests.tuner.engines.serving.testing import aggregated, sample_serving
from tuner.engines.launchers.benchmark import benchmark_files
from tuner.engines.launchers.benchmark_requests import session_turns
from tuner.spec.model import ModelSpec
from tuner.spec.serving.lengths import LengthLaw, sample_tokens

LAWS: dict[str, Any] = {
    "fixed": {"kind": "fixed", "mean": 4000},
    "uniform": {"kind": "uniform", "low": 2000, "high": 6000},
    "lognormal": {"kind": "lognormal", "mean": 4000, "cv": 0.8},
    "pareto_tailed": {
        "kind": "pareto_tailed",
        "mean": 2000,
        "cv": 1.0,
        "tail_ratio": 0.05,
        "tail_index": 2.5,
    },
    "empirical": {"kind": "empirical", "values": [500, 900, 8000], "weights": [2.0, 1.0, 1.0]},
}
LOADS: tuple[dict[str, Any], ...] = ({"rate": 3.0}, {"concurrency": 32})
CLOSE = 0.05
"""Share by which means may differ; those of uncached tokens at least by that of an eighth of the
prompt, as blocks are whole."""


def _sent(model: ModelSpec, client: str, traffic: dict[str, Any], engine: str) -> SentRequests:
    goal = {"traffic": traffic, "max_model_len": 100_000}
    verified = sample_serving(model, aggregated(), goal=goal, engine=engine)
    files = {str(file.path): file.text for file in benchmark_files(verified)}
    _, _, command = files[client].partition("\nexec ")
    words = shlex.split(command.replace("\\\n", " "))
    return SENT_BY[client](words, files.get("requests.jsonl", ""))


def _drawn(law: dict[str, Any]) -> Any:
    return sample_tokens(
        LengthLaw.model_validate(law), count=50_000, rng=np.random.default_rng(7)
    ).astype(float)


def _problems(
    sent: SentRequests, traffic: dict[str, Any], *, hit: float, has_laws: bool
) -> list[str]:
    """Compare the means, and where the client draws distributions the deviations."""
    inputs, outputs = _drawn(traffic["input_tokens"]), _drawn(traffic["output_tokens"])
    fresh = sent.uncached()
    least = CLOSE * inputs.mean() / 8.0
    figures = {
        "uncached input": (fresh.mean(), inputs.mean() * (1.0 - hit)),
        "whole input": (sent.input.mean(), inputs.mean()),
        "output": (sent.output.mean(), outputs.mean()),
        "rate": (sent.rate, traffic.get("rate", np.inf)),
    }
    if has_laws and traffic["input_tokens"]["kind"] != "pareto_tailed":
        figures["deviation of input"] = (sent.input.std(), inputs.std())
    found = [
        f"{name} {is_now:.0f}, planned {planned:.0f}"
        for name, (is_now, planned) in figures.items()
        if is_now != planned and not abs(is_now - planned) <= max(CLOSE * planned, least)
    ]
    if not (has_laws and hit):
        return found
    # The first request of a session shares nothing; the others as much more, in whole blocks.
    later = fresh[fresh < sent.input]
    planned = sent.input.std() * later.mean() / sent.input.mean()
    if abs(later.std() - planned) > 0.2 * planned + 0.05 * inputs.mean():
        found.append(f"deviation of uncached input {later.std():.0f}, planned {planned:.0f}")
    return found


@pytest.mark.parametrize("client", list(SENT_BY))
def test_a_job_sends_the_lengths_and_the_rate_of_the_plan(deepseek: ModelSpec, client: str) -> None:
    problems = []
    cases = (("session", 0.85, LOADS[0]), ("common", 0.6, LOADS[1]), ("session", 0.0, LOADS[1]))
    for name, (scope, hit, load) in itertools.product(LAWS, cases):
        traffic = {
            **load,
            "input_tokens": LAWS[name],
            "output_tokens": {"kind": "lognormal", "mean": 500, "cv": 1.0},
            "prefix_hit": hit,
            "prefix_scope": scope,
        }
        sent = _sent(deepseek, client, traffic, "vllm")
        problems += [
            f"{name} {load} {scope} {hit}: {problem}"
            for problem in _problems(sent, traffic, hit=hit, has_laws=True)
        ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("client", "engine"), [*((one, "vllm") for one in SENT_BY), ("bench_vllm.sh", "sglang")]
)
def test_sessions_are_sent_as_sessions_and_a_common_prefix_as_one(
    deepseek: ModelSpec, client: str, engine: str
) -> None:
    for hit, load in itertools.product((0.3, 0.6, 0.85), LOADS):
        traffic = {
            **load,
            "input_tokens": LAWS["fixed"],
            "output_tokens": {"kind": "fixed", "mean": 500},
        }
        apart = _sent(deepseek, client, {**traffic, "prefix_hit": hit}, engine)
        assert not _problems(
            apart, {**traffic, "prefix_scope": "session"}, hit=hit, has_laws=engine == "vllm"
        )
        turns = session_turns(hit)
        assert 0.6 * turns <= len(apart.prompts) / len(apart.prefixes) <= turns, (hit, load)
        assert max(apart.prefixes.values()) <= turns
        # Caches that get requests in turn lose most of it.
        in_turn = 1.0 - apart.uncached(caches=24).mean() / apart.input.mean()
        assert in_turn < 0.4 * hit, (hit, load)
        together = {**traffic, "prefix_hit": hit, "prefix_scope": "common"}
        common = _sent(deepseek, client, together, engine)
        assert len(common.prefixes) == 1
        in_turn = 1.0 - common.uncached(caches=24).mean() / common.input.mean()
        assert in_turn > 0.9 * hit


def test_a_session_comes_again_when_its_request_before_has_about_ended(
    deepseek: ModelSpec,
) -> None:
    traffic = {"concurrency": 128, "input_tokens": 4000, "output_tokens": 500, "prefix_hit": 0.6}
    sent = _sent(deepseek, "bench_aiperf.sh", traffic, "vllm")
    last: dict[Any, int] = {}
    gaps = []
    for number, own in enumerate(sent.prompts):
        gaps += [number - last[own[0][0]]] if own[0][0] in last else []
        last[own[0][0]] = number
    # Out of 128 that are under way, drawn within half of them.
    assert 0.4 * 128 <= min(gaps) <= np.mean(gaps) <= 1.1 * 128
    # No cache of several is hit by counting: every second of two gets half of them.
    assert np.mean(np.array(gaps) % 2) == pytest.approx(0.5, abs=0.05)


@each_row("client", SENT_BY)
def test_on_off_arrivals_are_sent_at_the_times_of_the_file(
    deepseek: ModelSpec, client: Any
) -> None:
    arrival = {"kind": "on_off", "on": 5.0, "off": 5.0}
    traffic = {"rate": 20.0, "arrival": arrival, "input_tokens": 400, "output_tokens": 50}
    sent = _sent(deepseek, client, traffic, "vllm")
    # 300 s hold 30 cycles: their mean rate is known to a fifth.
    assert sent.rate == pytest.approx(20.0, rel=0.3)
    assert sent.input.mean() == 400


def test_an_engine_behind_a_router_of_text_gets_means(deepseek: ModelSpec) -> None:
    traffic = {
        "rate": 20.0,
        "input_tokens": LAWS["lognormal"],
        "output_tokens": LAWS["uniform"],
        "prefix_hit": 0.6,
        "prefix_scope": "session",
    }
    sent = _sent(deepseek, "bench_vllm.sh", traffic, "sglang")
    assert not _problems(sent, traffic, hit=0.6, has_laws=False)
    assert len(set(sent.input)) == 1
    # AIPerf sends text.
    sent = _sent(deepseek, "bench_aiperf.sh", traffic, "sglang")
    assert not _problems(sent, traffic, hit=0.6, has_laws=True)


def test_a_normal_distribution_cut_at_zero_has_another_mean() -> None:
    # 15 % of 10,000 tokens with the deviation of the whole prompt, cv 0.8:
    # m + s phi(m/s) / Phi(m/s) = 1,500 + 8,000 * 0.392 / 0.574 = 6,960, not 1,500.
    drawn = positive_normal(1500.0, 8000.0, 100_000, rng=np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(6960.0, rel=0.02)
