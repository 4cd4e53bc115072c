"""Learns from the server that runs today: its launch and its logs, but no launch of a candidate."""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from profilers.store import holds_profile
from tuner.calibrate.server_records import NAME, HeldOut, ServerCalibration
from tuner.calibrate.step_corrections import (
    Evidence,
    FittedCorrections,
    fit_corrections,
    request_evidence,
    step_evidence,
)
from tuner.calibrate.stored import profile_files
from tuner.config.serve import Role
from tuner.costs.serve.residual import METRICS, LatencyResidual, ServeResidual, latency_residual
from tuner.engines.metrics.scrapes import GAPS, TOKENS, TTFT
from tuner.engines.metrics.server_log import ServerLog, read_server_logs, with_gaps
from tuner.errors import SpecError
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, price_option
from tuner.estimate.serving.registry import launch_text, read_serving_launch
from tuner.goals.profiles import stored_profile
from tuner.goals.serve_plan import price_serving_pool, with_residual
from tuner.goals.serve_spec import read_serve_spec
from tuner.output import write_directory
from tuner.paths import AnyPath, to_paths
from tuner.search.serve.options import Option
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_s

LEAST_STEPS: Final = 200
LEAST_REQUESTS: Final = 50
LEAST_LOGGED_RATIO: Final = 0.3
"""Least share of the time of steps that their records hold; vLLM's with asynchronous scheduling
hold next to nothing."""
MOST_FACTOR: Final = 8.0
"""Largest factor on the GEMMs of a server that the spec and the launch describe."""
SCRAPED_RATIO: Final = 1.25
"""Most tokens of the scrapes over those of the logs, and of the logs over those of the scrapes."""


def calibrate_server(
    spec_path: AnyPath,
    *,
    launch: str,
    observed: Sequence[Path],
    out: Path,
    profiles: AnyPath | Sequence[AnyPath] = (),
    pool: str | None = None,
) -> ServerCalibration:
    """Fit corrections to a server's logs, and write a profile of them.

    Args:
        spec_path: the YAML file: model, cluster, engine.
        launch: the server's launch file, or its command.
        observed: logs of the server.
        out: folder of the profile.
        profiles: that the steps are priced by, as plans are.
        pool: that the server runs on; None: the only one.

    Raises:
        SpecError: the spec, the launch or a log is unusable, or the logs identify nothing.
        OutputError: the folder cannot be written.
    """
    spec, folders = read_serve_spec(Path(spec_path), any_release=True), to_paths(profiles)
    named = pool_named(spec, pool)
    log = read_server_logs(observed)
    read = read_serving_launch(
        launch, surroundings(spec, named), engine=spec.goal.engine_on(named.name).name
    )
    if read.role is not Role.AGGREGATED:
        raise SpecError(f"{read.source}: a {read.role} server; logs of aggregated ones are read")
    priced = with_residual(price_serving_pool(named, folders, goal=spec.goal), None)
    stated = read.release or spec.release or spec.goal.engine_on(named.name).version
    release = stated or next(iter(log.releases), spec.releases[named.name].release)
    inputs = build_inputs(read, spec=spec, serving_pool=priced, release=stated)
    option = price_option(inputs, read.setting)
    _refuse_others(log, spec, release=release, launch=launch)
    ranks = read.copies * option.degrees.attention_data
    _refuse_several(log, option, ranks=ranks)
    notes = tuple(_checks(log))
    evidence = list(_evidence(log, option, ranks=ranks))
    minutes = _minutes(log)
    names = ["step", "linear", "attention", "prompt_attention"]
    names += ["links"] * (option.degrees.devices > 1) + ["request"] * bool(log.requests)
    fitted = fit_corrections(evidence, option, minutes=minutes, names=names)
    _refuse_useless(fitted)
    degrees = option.degrees
    sizes = {
        "TP": degrees.attention_tensor,
        "DP": ranks,
        "EP": degrees.expert,
        "PP": degrees.pipeline,
    }
    layout = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "TP 1"
    made = ServerCalibration(
        device=priced.machine.sheet.name,
        kernels=priced.source,
        steps=log.num_steps,
        requests=len(log.requests),
        minutes=minutes,
        coefficients=fitted.coefficients,
        errors=fitted.errors,
        residual=ServeResidual(
            engine=read.engine,
            release=release,
            num_deployments=1,
            model=spec.model.name,
            layout=layout,
            steps=fitted.corrections,
            **_spreads(fitted.errors),
        ),
        notes=notes,
    )
    kept = [folder for folder in map(stored_profile, folders) if holds_profile(folder)][:1]
    files = {name: content for folder in kept for name, content in profile_files(folder).items()}
    write_directory(out, {**files, NAME: (made.model_dump_json(indent=1) + "\n").encode()})
    return made


def _spreads(errors: HeldOut) -> dict[str, LatencyResidual]:
    """Return factors of one on the latencies, with the bands that a single server leaves."""
    spreads: dict[str, LatencyResidual] = {}
    for metric in METRICS:
        ratio = getattr(errors, f"{metric}_after")
        residual = latency_residual((1.0 / ratio,) if ratio else (), metric=metric, before=None)
        if residual is None:
            raise SpecError(
                f"--observed: {metric.upper()} of the last third is {1.0 / ratio:.3g} times what"
                " the first two thirds predict; something else ran, or was logged, there"
            )
        spreads[metric] = residual.model_copy(update={"factor": 1.0})
    return spreads


def _evidence(log: ServerLog, option: Option, *, ranks: int) -> Iterator[Evidence]:
    """Yield what can be fitted to.

    Raises:
        SpecError: it is too little.
    """
    if not log.steps and not log.requests:
        raise SpecError(
            "--observed: scrapes alone identify nothing; give a log of steps or of requests besides"
        )
    if log.num_steps < LEAST_STEPS and len(log.requests) < LEAST_REQUESTS:
        raise SpecError(
            f"--observed: {log.num_steps} steps and {len(log.requests)} requests are too little;"
            f" log {LEAST_STEPS} steps or {LEAST_REQUESTS} requests at least, some minutes of load"
        )
    if log.num_steps >= LEAST_STEPS:
        mean_s = log.step_s / log.num_steps
        if mean_s < LEAST_LOGGED_RATIO * (mean_s + log.gap_s):
            raise SpecError(
                f"--observed: the logged steps hold {format_s(mean_s)} of"
                f" {format_s(mean_s + log.gap_s)} each, as with asynchronous scheduling; log with"
                " --no-async-scheduling, or give a log of requests"
            )
        cache = float(log.cache_tokens or option.kv_tokens)
        yield step_evidence(with_gaps(log), cache_tokens=cache)
    if len(log.requests) >= LEAST_REQUESTS:
        yield request_evidence(log.requests, option, ranks=ranks)


def _refuse_others(log: ServerLog, spec: ServeSpec, *, release: str, launch: str) -> None:
    """Refuse logs of another model, or of another release.

    A name is known where the spec or the launch has it; a launch with variables may mean any.
    """
    _, given, _ = launch_text(launch)
    known = {_plain(word) for word in (spec.model.name, *re.split(r"[\s'\"=,]+", given))}
    for model, name in log.models.items():
        if "$" not in given and _plain(model) not in known:
            raise SpecError(
                f"--observed {name}: it is of model {model!r:.80}, which neither the launch nor the"
                f" spec ({spec.model.name}) names; give logs of the server that the launch starts"
            )
    for logged, name in log.releases.items():
        if logged != release:
            raise SpecError(
                f"--observed {name}: release {logged} ran, not {release}, which the launch or"
                " goal.engine.version states; give logs of that release"
            )


def _plain(name: str) -> str:
    """Return the last part of a model's path or repository, as names are compared."""
    return re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower())


def _refuse_several(log: ServerLog, option: Option, *, ranks: int) -> None:
    """Refuse logs of more than the launch's one instance, or of another model or launch."""
    if len(log.ranks) > ranks:
        raise SpecError(
            f"--observed: steps of {len(log.ranks)} ranks or servers, and the launch has {ranks};"
            " give the logs of one server"
        )
    running = max((step.running for step in log.steps), default=0)
    if running > option.running:
        raise SpecError(
            f"--observed: {running} sequences in a step, and the launch allows {option.running};"
            " give logs of the server that it starts"
        )
    times = [(record.arrival_s + record.ttft_s, 1) for record in log.requests]
    times += [(record.end_s, -1) for record in log.requests]
    at_once = max(itertools.accumulate(change for _, change in sorted(times)), default=0)
    if at_once > option.running * ranks:
        raise SpecError(
            f"--observed: {at_once} requests get tokens at once, and the launch runs"
            f" {option.running * ranks}: several instances are mixed; give the requests of one"
        )
    longest = max(
        (record.input_tokens + record.output_tokens for record in log.requests), default=0
    )
    positions = option.iteration.decoder.positions
    if longest > positions > 0:
        raise SpecError(
            f"--observed: a request of {longest} tokens, and the model has {positions} positions;"
            " the logs are of another model"
        )


def _refuse_useless(fitted: FittedCorrections) -> None:
    """Refuse logs that identify nothing, or that cannot be of this deployment."""
    known = [coefficient for coefficient in fitted.coefficients if coefficient.is_identified]
    if not known:
        wanted = min(fitted.coefficients, key=lambda coefficient: coefficient.minutes_needed or 1e9)
        raise SpecError(
            f"--observed: the logs identify nothing; log {wanted.wanted_load} for"
            f" {format_s(60.0 * (wanted.minutes_needed or 10.0))}"
        )
    for coefficient in known:
        is_like = 1.0 / MOST_FACTOR < coefficient.factor < MOST_FACTOR
        if coefficient.name == "linear" and not is_like:
            raise SpecError(
                f"--observed: GEMMs take {coefficient.factor:.3g} times what is predicted: logs of"
                " another model, device or launch than are given"
            )


def _minutes(log: ServerLog) -> float:
    """Return the minutes that the logs cover, of the longest one."""
    first_s = min((record.arrival_s for record in log.requests), default=0.0)
    span_s = max((record.end_s for record in log.requests), default=0.0) - first_s
    return max(span_s, log.step_s + log.num_steps * log.gap_s) / 60.0


def _checks(log: ServerLog) -> Iterator[str]:
    """Say what scrapes show of the same time.

    Raises:
        SpecError: they are of another time, or of another server.
    """
    if not log.scrapes.seen:
        return
    scraped = log.scrapes.growth(TOKENS)
    if not log.output_tokens / SCRAPED_RATIO <= scraped <= log.output_tokens * SCRAPED_RATIO:
        raise SpecError(
            f"--observed: the scrapes count {scraped:.0f} output tokens, the logs"
            f" {log.output_tokens}: a scrape is missing at the begin or the end, or other requests"
            " were served; give scrapes of the time of the logs, one before and one after"
        )
    spans_s = sum(record.end_s - record.arrival_s - record.ttft_s for record in log.requests)
    logged = {
        TTFT: sum(record.ttft_s for record in log.requests) / max(len(log.requests), 1),
        GAPS[0]: spans_s / max(log.output_tokens - len(log.requests), 1),
    }
    for name, *metrics in (("TTFT", TTFT), ("TPOT", *GAPS)):
        mean_s = log.scrapes.mean_s(*metrics)
        if mean_s is not None:
            said = f", {format_s(logged[metrics[0]])} in the requests" * bool(log.requests)
            yield f"mean {name}: {format_s(mean_s)} at the server by its scrapes{said}"
