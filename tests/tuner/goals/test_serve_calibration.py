"""Corrections of a server's steps from its logs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rows import Failures
from tests.tuner.goals.simulated_server import (
    LAUNCH,
    TRUE,
    LoggingRank,
    bench_result,
    drawn_requests,
    option_of,
    passed_steps,
    served_by,
    spec_text,
    vllm_steps,
)
from tuner import api
from tuner.calibrate.server_records import ServerCalibration
from tuner.cli.calibrate import command
from tuner.errors import SpecError
from tuner.goals.serve_calibration import calibrate_server
from tuner.search.serve.options import Option
from tuner.simulate.serving.load import Requests


@dataclass(frozen=True, kw_only=True)
class Server:
    """A simulated server, and a folder for its logs."""

    folder: Path
    option: Option
    requests: Requests
    rank: LoggingRank

    def log(self, name: str, text: str | list[str]) -> Path:
        path = self.folder / name
        path.write_text(text if isinstance(text, str) else "\n".join(text) + "\n")
        return path

    def passed(self) -> list[str]:
        return passed_steps(self.rank)

    def vllm(self) -> list[str]:
        return vllm_steps(self.rank, cache_tokens=int(self.option.kv_tokens), gap_s=0.8e-3)

    def bench(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(bench_result(self.option, TRUE, self.rank, self.requests))
        return made

    def calibrate(self, *logs: Path, launch: str = LAUNCH, spec: str = "") -> ServerCalibration:
        path = self.folder / "spec.yaml"
        path.write_text(spec or spec_text(version="0.33.0"))
        return calibrate_server(path, launch=launch, observed=logs, out=self.folder / "out")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("server")
    (folder / "spec.yaml").write_text(spec_text(version="0.33.0"))
    option = option_of(folder / "spec.yaml")
    requests = drawn_requests(1000, rate=3.5)
    rank = served_by(option, TRUE, requests)
    return Server(folder=folder, option=option, requests=requests, rank=rank)


def test_true_coefficients_are_recovered_from_steps_and_from_requests(server: Server) -> None:
    logs = {
        "messages": server.log("fpm.jsonl", server.passed()),
        "lines": server.log("server.log", server.vllm()),
        "requests": server.log("bench.json", json.dumps(server.bench())),
    }
    failures = Failures()
    for name, path in logs.items():
        with failures.of(name):
            made = server.calibrate(path)
            known = {one.name: one for one in made.coefficients if one.is_identified}
            wanted = {"step", "linear", "attention", *(("request",) if name == "requests" else ())}
            assert wanted <= set(known)
            for coefficient in known.values():
                true = getattr(TRUE, coefficient.name)
                assert coefficient.factor == pytest.approx(true, rel=0.1)
                assert coefficient.low < coefficient.factor < coefficient.high
            errors = made.errors
            assert errors.tpot_before is not None
            assert errors.tpot_before < 0.8
            assert errors.tpot_after == pytest.approx(1.0, abs=0.03)
            assert errors.ttft_after == pytest.approx(1.0, abs=0.1)
            left_out = [one for one in made.coefficients if not one.is_identified]
            assert all(one.factor == 1.0 and one.wanted_load for one in left_out)
    failures.check()


def test_plans_and_estimates_use_the_corrections_under_other_loads(server: Server) -> None:
    made = server.calibrate(server.log("fpm.jsonl", server.passed()))
    out, failures = server.folder / "out", Failures()
    for rate in (1.0, 4.0):
        with failures.of(rate):
            path = server.folder / "other.yaml"
            text = spec_text(version="0.33.0").replace("rate: 2/s", f"rate: {rate}/s")
            path.write_text(text)
            before = api.estimate_serving(path, launch=LAUNCH)
            after = api.estimate_serving(path, launch=LAUNCH, profiles=out)
            true = api.estimate_serving(path, launch=LAUNCH, profiles=_truth(made, server.folder))
            assert after.load is not None
            assert before.load is not None
            assert true.load is not None
            assert after.load.tpot_s is not None
            assert true.load.tpot_s is not None
            assert before.load.tpot_s is not None
            assert after.load.tpot_s.mean == pytest.approx(true.load.tpot_s.mean, rel=0.05)
            assert before.load.tpot_s.mean < 0.85 * after.load.tpot_s.mean
            assert after.load.capacity_per_s < before.load.capacity_per_s
            assert after.tpot_s_band is not None
            assert before.tpot_s_band is not None
            assert _width(after.tpot_s_band) < _width(before.tpot_s_band)
            assert any("steps corrected by logs of qwen3-30b-a3b" in note for note in after.notes)
    failures.check()


def _truth(made: ServerCalibration, folder: Path) -> Path:
    """Store the true coefficients in the place of the fitted ones."""
    true = made.model_copy(update={"residual": made.residual.model_copy(update={"steps": TRUE})})
    (folder / "truth").mkdir(exist_ok=True)
    (folder / "truth" / "corrections.json").write_text(true.model_dump_json())
    return folder / "truth"


def _width(band: tuple[float, float]) -> float:
    return band[1] / band[0]


def test_a_plan_uses_the_corrections_and_says_what_changed_since(server: Server) -> None:
    made = server.calibrate(server.log("fpm.jsonl", server.passed()))
    path = server.folder / "plan.yaml"
    slo = "  slo: {ttft: {p90: 2s}, tpot: {p90: 40ms}}\n"
    path.write_text(spec_text(model="olmoe-1b-7b", extra=slo))
    stored = server.folder / "out" / "corrections.json"
    stored.write_text(stored.read_text().replace('"0.33.0"', '"0.31.0"'))
    plan = api.deploy(path, profiles=server.folder / "out").plan
    residual = plan.provenance.residual
    assert residual is not None
    assert residual.steps == made.residual.steps
    # Of another release, so the band is that of no logs at all.
    assert residual.tpot.spread > made.residual.tpot.spread
    notes = " / ".join(plan.provenance.notes)
    assert "the logs are of release 0.31.0, not 0.33.0" in notes
    assert "the logs are of model qwen3-30b-a3b, not olmoe-1b-7b" in notes


def test_logs_that_cannot_be_used_are_refused_in_one_line(server: Server) -> None:
    bench, passed, vllm = server.bench(), server.passed(), server.vllm()
    summary = {key: value for key, value in bench.items() if not isinstance(value, list)}
    summary["mean_ttft_ms"] = 50.0
    backwards = {**bench, "itls": [[-1.0] for _ in bench["itls"]]}
    at_once = {**bench, "start_times": [100.0] * len(bench["ttfts"])}
    scrape = 'vllm:generation_tokens_total{{engine="0",model_name="qwen3-30b-a3b"}} {}'
    scrapes = [[scrape.format(total) for total in totals] for totals in ((9, 3), (9, 19), (9,))]

    def changed(lines: list[str], before: str, after: str) -> list[str]:
        return [line.replace(before, after) for line in lines]

    rows: dict[str, list[str]] = {
        "falls from": scrapes[0],
        "a scrape is missing": [*scrapes[1]],
        "scrapes alone identify nothing": scrapes[2],
        "it is of model '/models/Llama-8B'": changed(vllm, "Qwen3-30B-A3B", "Llama-8B"),
        "release 0.31.0 ran": changed(vllm, "(v0.33.0)", "(v0.31.0)"),
        "another release": changed(passed, '"version": 1', '"version": 2'),
        "steps without the cache's usage": [line.partition(", GPU KV")[0] for line in vllm],
        "are too little": passed[:50],
        "steps of 2 ranks or servers": passed + changed(passed, '"w"', '"v"'),
        "the steps of several servers": vllm + vllm[2:],
        "several instances are mixed": [json.dumps(at_once)],
        "times go back": [json.dumps(backwards)],
        "run the client with --save-detailed": [json.dumps(summary)],
        "as with asynchronous scheduling": [
            re.sub(r"[0-9.]+ ms", "0.03 ms", line) for line in vllm
        ],
        "lacks 'sum_prefill_tokens'": changed(passed, "sum_prefill_tokens", "sum"),
    }
    failures = Failures()
    for words, lines in rows.items():
        with failures.of(words):
            logs = [server.log("log", lines)]
            if words == "a scrape is missing":
                logs.append(server.log("bench.json", json.dumps(bench)))
            with pytest.raises(SpecError) as caught:
                server.calibrate(*logs)
            assert words in str(caught.value)
            assert "\n" not in str(caught.value)
    failures.check()


def test_the_command_prints_what_was_fitted_and_what_scrapes_say(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, spec = server.bench(), server.folder / "spec.yaml"
    spec.write_text(spec_text(version="0.33.0"))
    labels = '{engine="0",model_name="qwen3-30b-a3b"}'
    totals = {
        "generation_tokens_total": sum(bench["output_lens"]),
        "time_to_first_token_seconds_sum": 100.0,
        "time_to_first_token_seconds_count": 1000,
    }
    scraped = [
        f"vllm:{name}{labels} {by * total}" for by in (0, 1) for name, total in totals.items()
    ]
    logs = [server.log("requests.json", json.dumps(bench)), server.log("scrapes", scraped)]
    given: dict[str, Any] = {"launch": LAUNCH, "observed": logs, "out": server.folder / "printed"}
    command(str(spec), **given)
    text = capsys.readouterr().out
    assert "1000 requests in" in text
    assert "linear            x 1.2" in text
    assert "mean TTFT: 100 ms at the server" in text
    for lacking in ("launch", "observed"):
        with pytest.raises(SpecError, match="need --launch with its command, and --observed"):
            command(str(spec), **{name: value for name, value in given.items() if name != lacking})
    with pytest.raises(SpecError, match="give a table of measured runs, or --launch"):
        command(str(spec), out=server.folder / "none")


def test_a_launch_with_other_limits_is_noticed(server: Server) -> None:
    path = server.log("fpm.jsonl", server.passed())
    with pytest.raises(SpecError, match="the launch allows 4"):
        server.calibrate(path, launch="vllm serve qwen3-30b-a3b --max-num-seqs 4")
