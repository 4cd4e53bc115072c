"""Logs of a running server, whatever wrote them; a format is recognised by its content.

    steps      vLLM's server log with iteration details; forward-pass metrics as lines of JSON
    requests   `vllm bench serve --save-detailed`; AIPerf's profile_export.jsonl; SGLang's exported
               requests; a CSV with the columns arrival, input, output, ttft, end (seconds, tokens)
    scrapes    the text of Prometheus, one scrape after the other, in one file or in several

Files are read line by line. Of the steps every second, then every fourth and so on is dropped as
there are more than `MOST_STEPS`; counts and clocks are of all of them.

vLLM logs how long it waited for a step, not how long after the last it was. While sequences run,
one step follows another, so the clock between two lines says what all steps between took: what it
says beyond their waits is spread over them (`gap_s`). It has whole seconds, whose errors are as
often up as down: of many stretches between two pauses they cancel.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from profilers.files import open_regular
from tuner.engines.metrics import aiperf
from tuner.engines.metrics.benchmark_result import MAX_RESULT_BYTES
from tuner.engines.metrics.forward_pass import passed_step
from tuner.engines.metrics.observed import RequestRecord, StepRecord
from tuner.engines.metrics.scrapes import Scrapes
from tuner.engines.sglang import metrics as sglang
from tuner.engines.vllm import metrics as vllm
from tuner.errors import SpecError
from tuner.spec.files import shown_path

MOST_STEPS: Final = 8192
MOST_REQUESTS: Final = 200_000
MOST_LINE_BYTES: Final = 2**20
MOST_STEP_S: Final = 1e4
CSV_COLUMNS: Final = ("arrival", "input", "output", "ttft", "end")


@dataclass(slots=True, kw_only=True)
class _Rank:
    """Steps of a rank so far."""

    last: StepRecord
    stretch_s: float = 0.0
    """Clock at the beginning of the steps under way without a pause."""
    waited_s: float = 0.0
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class ServerLog:
    """Content of all files together."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    scrapes: Scrapes = field(default_factory=Scrapes)
    models: dict[str, str] = field(default_factory=dict)
    """Names of what was served, with the file that says so."""
    releases: dict[str, str] = field(default_factory=dict)
    cache_tokens: int | None = None
    """Tokens of a rank's cache; None: not said."""
    num_steps: int = 0
    output_tokens: int = 0
    """Tokens that steps, or else requests, gave."""
    step_s: float = 0.0
    """Seconds of all steps together."""
    ranks: dict[str, _Rank] = field(default_factory=dict)
    clock_s: float = 0.0
    """Seconds by the clock of stretches of steps without a pause."""
    clocked_s: float = 0.0
    """Seconds that the steps of these stretches say that they took."""
    clocked_steps: int = 0
    keep_every: int = 1

    @property
    def gap_s(self) -> float:
        """Return the seconds of a step that its record leaves out, as the clock shows."""
        return max(self.clock_s - self.clocked_s, 0.0) / max(self.clocked_steps, 1)

    def add_step(self, step: StepRecord) -> None:
        """Take in the next step of a log.

        Raises:
            ValueError: it is before the last one, or takes no time that a step takes.
        """
        if not 0.0 <= step.seconds <= MOST_STEP_S:
            raise ValueError(f"a step of {step.seconds} s")
        rank = self.ranks.setdefault(step.rank, _Rank(last=step, stretch_s=step.at_s or 0.0))
        last = rank.last
        if step.number < last.number or (step.at_s or 0.0) < (last.at_s or 0.0):
            raise ValueError(
                f"step {step.number} comes after step {last.number}: the steps of several servers,"
                " or of one that was started again; give those of one"
            )
        if step.running and step is not last:
            rank.waited_s += step.seconds
            rank.steps += 1
        else:
            self.end_stretch(rank, begins_s=step.at_s or 0.0)
        rank.last = step
        self.num_steps += 1
        self.step_s += step.seconds
        self.output_tokens += step.running
        if self.num_steps % self.keep_every == 0:
            self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            self.steps, self.keep_every = self.steps[1::2], 2 * self.keep_every

    def end_stretch(self, rank: _Rank, *, begins_s: float = 0.0) -> None:
        """Count steps without a pause."""
        self.clock_s += (rank.last.at_s or 0.0) - rank.stretch_s
        self.clocked_s += rank.waited_s
        self.clocked_steps += rank.steps
        rank.stretch_s, rank.waited_s, rank.steps = begins_s, 0.0, 0

    def add_request(self, request: RequestRecord) -> None:
        """Take in a request.

        Raises:
            ValueError: its numbers contradict each other, or there are too many.
        """
        if not request.is_possible:
            raise ValueError(f"times go back, or tokens are missing, in {request}")
        if len(self.requests) >= MOST_REQUESTS:
            raise ValueError(f"more than {MOST_REQUESTS} requests; give a part of them")
        self.requests.append(request)


def read_server_logs(paths: Sequence[Path]) -> ServerLog:
    """Read all files of one server.

    Raises:
        SpecError: a file cannot be read, is of no known format, or contradicts itself.
    """
    log = ServerLog()
    for path in paths:
        try:
            with open_regular(path) as file:
                _read(file, log, name=shown_path(path))
        except OSError as error:
            raise SpecError(f"--observed {shown_path(path)}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise SpecError(f"--observed {shown_path(path)}: {what:.300}") from error
    for rank in log.ranks.values():
        log.end_stretch(rank)
    log.requests.sort(key=lambda request: request.arrival_s)
    if not log.steps:
        log.output_tokens = sum(request.output_tokens for request in log.requests)
    return log


def _read(file: BufferedReader, log: ServerLog, *, name: str) -> None:
    """Read one file by what its first line looks like."""
    first = file.readline(MAX_RESULT_BYTES + 1)
    start = first.lstrip()
    if start.startswith(b"{"):
        _read_json(first, file, log, name=name)
    elif start.startswith(b"#") or start.startswith((b"vllm:", b"sglang:")):
        log.scrapes.read(_text_lines(first, file))
        log.models.update(dict.fromkeys(log.scrapes.models, name))
    elif _columns(first):
        _read_csv(first, file, log)
    else:
        before = log.num_steps
        for line in _text_lines(first, file):
            _read_text_line(line, log, name=name)
        if log.num_steps == before:
            raise ValueError(
                "neither steps, requests nor scrapes; `moetune calibrate --help` lists what is read"
            )


def _text_lines(first: bytes, file: BufferedReader) -> Iterator[str]:
    line = first
    while line:
        yield line.decode(errors="replace")
        line = file.readline(MOST_LINE_BYTES)


def _read_text_line(line: str, log: ServerLog, *, name: str) -> None:
    """Read a line of vLLM's log."""
    if (step := vllm.logged_step(line)) is not None:
        log.add_step(step)
    elif match := vllm.STARTED.search(line):
        log.models[match["model"]] = name
        log.releases[match["release"].partition("+")[0]] = name
    elif match := vllm.CACHE.search(line):
        log.cache_tokens = int(match["tokens"].replace(",", ""))


def _columns(first: bytes) -> list[str]:
    """Return the names of a CSV's columns, without units; empty where it is none of requests."""
    row = next(csv.reader([first[:MOST_LINE_BYTES].decode(errors="replace")]), [])
    names = [
        word.strip()
        .lower()
        .removesuffix("_s")
        .removesuffix("_tokens")
        .replace("arrived", "arrival")
        for word in row
    ]
    return names if set(CSV_COLUMNS) <= set(names) else []


def _read_csv(first: bytes, file: BufferedReader, log: ServerLog) -> None:
    names = _columns(first)
    for row in csv.DictReader(_text_lines(file.readline(MOST_LINE_BYTES), file), names):
        said = {name: float(row[name]) for name in CSV_COLUMNS}
        log.add_request(
            RequestRecord(
                arrival_s=said["arrival"],
                input_tokens=int(said["input"]),
                output_tokens=int(said["output"]),
                ttft_s=said["ttft"],
                end_s=said["end"],
            )
        )


def _read_json(first: bytes, file: BufferedReader, log: ServerLog, *, name: str) -> None:
    """Read lines of JSON, or one document over many lines."""
    try:
        values = json.loads(first)
    except ValueError:
        values = json.loads(first + file.read(MAX_RESULT_BYTES))
    line: bytes = first
    while line:
        if line.strip():
            _read_object(values if line is first else json.loads(line), log, name=name)
        line = file.readline(MAX_RESULT_BYTES + 1)


_OF_KEY: Final[Mapping[str, Callable[[Mapping[str, Any]], StepRecord | RequestRecord | None]]] = {
    "scheduled_requests": passed_step,
    "metadata": aiperf.exported_request,
    "request_parameters": sglang.exported_request,
}
"""Readers of an object by a key that no other format has."""


def _read_object(values: Mapping[str, Any], log: ServerLog, *, name: str) -> None:
    if not isinstance(values, dict):
        raise TypeError("JSON that is no object")
    reader = next((reader for key, reader in _OF_KEY.items() if key in values), None)
    if reader is not None:
        record = reader(values)
        if isinstance(record, StepRecord):
            log.add_step(record)
        elif record is not None:
            log.add_request(record)
    elif "ttfts" in values or "mean_ttft_ms" in values:
        for request in vllm.detailed_requests(values):
            log.add_request(request)
        if model := values.get("model_id"):
            log.models[model] = name
    elif "time_to_first_token" in values:
        raise ValueError("a summary of AIPerf; its requests are in profile_export.jsonl")
    else:
        raise ValueError("JSON of no known format; `moetune calibrate --help` lists what is read")


def with_gaps(log: ServerLog) -> tuple[StepRecord, ...]:
    """Return the steps with what the clock says that their records leave out."""
    return tuple(replace(step, seconds=step.seconds + log.gap_s) for step in log.steps)
