"""Log parsers of the engines, by the name that users type.

An adapter reads one line of a log at a time: `read(line, job) -> Reading | None`. Lines are cut at
MAX_LINE characters and logs at MAX_LOG_BYTES, so no output takes long to read.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from tuner.engines.metrics.interface import Adapter, TrialWork
from tuner.engines.metrics.regex import adapter as regex_adapter
from tuner.engines.registry import metrics_folders
from tuner.errors import SpecError
from tuner.verify.launcher import COLOUR, EngineMetrics

ADAPTERS: Final[Mapping[str, str]] = {
    **{name: f"tuner.engines.{folder}.metrics" for name, folder in metrics_folders()},
    "jsonl": "tuner.engines.metrics.jsonl",
}
"""The module of each name, with its `read`."""

REGEX_PREFIX: Final = "regex:"
MAX_LINE: Final = 4096
MAX_LOG_BYTES: Final = 256 * 2**20
CHUNK_BYTES: Final = 2**20


def find_adapter(name: str) -> Adapter:
    """Return the adapter of a name, or of a regular expression after `regex:`.

    Raises:
        SpecError: neither.
    """
    if name.startswith(REGEX_PREFIX):
        return regex_adapter(name.removeprefix(REGEX_PREFIX))
    if name not in ADAPTERS:
        known = ", ".join(ADAPTERS)
        raise SpecError(f"--metrics {name!r} is not one of {known}, {REGEX_PREFIX}EXPRESSION")
    return cast(Adapter, import_module(ADAPTERS[name]).read)


class LogReader:
    """Reads a growing log; a resource with a position in the file."""

    def __init__(self, file: Path, *, adapter: Adapter, job: TrialWork) -> None:
        """Start at the beginning of a file that need not exist yet."""
        self._file = file
        self._adapter = adapter
        self._job = job
        self._offset = 0
        self._begun = b""
        self._steps_s: dict[int, float] = {}
        self._peak_bytes: int | None = None
        self._activation_bytes: tuple[int, ...] = ()

    def metrics(self, *, warmup_steps: int, most_steps: int) -> EngineMetrics:
        """Return the metrics so far, without the warm-up steps."""
        steps = sorted(self._steps_s)
        # An engine that prints every step from the third on (DeepSpeed) has done two warm-up steps
        # already; step numbers of a resumed job start anywhere.
        is_each = len(steps) < 2 or steps[1] == steps[0] + 1
        unprinted = steps[0] - 1 if steps and is_each and 1 <= steps[0] <= warmup_steps + 1 else 0
        timed = [self._steps_s[step] for step in steps[warmup_steps - unprinted :]]
        return EngineMetrics(
            steps_s=tuple(timed[:most_steps]),
            activation_bytes=self._activation_bytes,
            peak_bytes=self._peak_bytes,
        )

    def read_on(self, *, to_end: bool = False) -> None:
        """Read every complete line; with `to_end` also an unfinished last one."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            while self._offset < MAX_LOG_BYTES and (chunk := stream.read(CHUNK_BYTES)):
                self._offset += len(chunk)
                *whole, begun = (self._begun + chunk).split(b"\n")
                # The rest of an overlong line is dropped.
                self._begun = begun[: MAX_LINE * 4]
                for line in whole:
                    self._take(line)
        if to_end:
            self._take(self._begun)
            self._begun = b""

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        text = line[: MAX_LINE * 4].decode("utf-8", errors="replace")
        reading = self._adapter(COLOUR.sub("", text)[:MAX_LINE], self._job)
        if reading is None:
            return
        if reading.samples_per_step:
            self._job = replace(self._job, samples_per_step=reading.samples_per_step)
        if reading.step_s is not None and reading.step_s > 0.0:
            step = len(self._steps_s) if reading.step is None else reading.step
            # Several ranks may print a step; the first line counts.
            self._steps_s.setdefault(step, reading.step_s)
        if reading.peak_bytes is not None:
            self._peak_bytes = max(self._peak_bytes or 0, reading.peak_bytes)
        self._activation_bytes = reading.activation_bytes or self._activation_bytes
