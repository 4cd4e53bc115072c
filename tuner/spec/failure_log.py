"""Failure logs: what stopped jobs on a cluster, and how much was observed for how long.

    table    CSV with a header: `component` (device, node, link, software), and `time` (seconds, or
             dates of ISO 8601), `count` (1 where absent), or both
    sacct    sacct --allusers --duplicates --parsable2
                 --format=JobID,State,Start,End,NNodes,AllocTRES
             NODE_FAIL and BOOT_FAIL are of nodes; FAILED and OUT_OF_MEMORY of software, unless the
             job was younger than `LEAST_RUN_S`: it never got going. All other states count as
             time without a failure; jobs that still run and steps of jobs are left out.

Further columns and lines are ignored. A table does not say how much was observed:
`goal.reliability.log` states devices, devices of a node, and the period where there are no times.
Of sacct's jobs it is the sum over jobs; devices are those of `gres/gpu`, else `devices_per_node`,
which is the cluster's (tuner/spec/read.py) unless it is stated.

Source: sacct(1) of Slurm 24.05.

Not covered: compressed files; what failed while no job ran there.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, ValidationError

from profilers.records import Record
from tuner.errors import SpecError
from tuner.spec.fields import Count, FilePath, PositiveSeconds
from tuner.spec.files import one_line, read_small_text, shown_path, shown_value

Component = Literal["device", "node", "link", "software"]
COMPONENTS: Final[tuple[Component, ...]] = get_args(Component)
LARGEST_LOG_BYTES: Final = 256_000_000
MOST_EVENTS: Final = 1_000_000
LEAST_RUN_S: Final = 600.0
"""Shortest run of a job, seconds; one that failed earlier failed in starting."""

SACCT_COLUMNS: Final = ("JobID", "State", "Start", "End", "NNodes")
OF_STATE: Final[Mapping[str, Component]] = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "FAILED": "software",
    "OUT_OF_MEMORY": "software",
}
_GPUS: Final = re.compile(r"(?:^|,)gres/gpu=(\d+)")

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class StatedLog(Record):
    """A failure log, with the devices and the time that it covers."""

    path: FilePath
    """Path of a table or of the output of sacct; formats in tuner/spec/failure_log.py."""
    devices: Count | None = None
    """Devices that the log covers; absent: taken from sacct's jobs. A table needs it."""
    devices_per_node: Count | None = None
    """Devices of one machine in the log: for tables, and for jobs of sacct whose AllocTRES names no
    GPUs; absent: as in all pools of the cluster."""
    period: PositiveSeconds | None = None
    """Time that the log covers, seconds; absent: N / (N - 1) times the span of its N times. Not
    used for sacct's output, whose jobs have start and end."""
    components: Annotated[tuple[Component, ...], Field(min_length=1)] = COMPONENTS
    """Components whose failures count; without `software`, only failures of machines."""


class FailureLog(Record):
    """Failures by component, and the time that was observed."""

    counts: dict[Component, Annotated[int, Field(ge=0)]]
    """Number of failures of each component that counts."""
    device_s: Positive
    """Observed device time: devices times seconds."""
    node_s: Positive
    clock_s: Any = Field(default=None, exclude=True)
    """Times of failures, in plans of former releases; read by nothing."""
    period_s: Positive
    """Observed time of the whole cluster, seconds."""
    left_out: Annotated[int, Field(ge=0)] = 0
    """Jobs that failed in starting."""

    @property
    def device_mtbf_s(self) -> float | None:
        """Mean time between failures of one device; None: none was seen."""
        return self.mtbf_s("device")

    @property
    def node_mtbf_s(self) -> float | None:
        """Mean seconds between failures of one node or its links, which take it out of its job."""
        num = self.counts.get("node", 0) + self.counts.get("link", 0)
        return self.node_s / num if num else None

    def mtbf_s(self, component: Component) -> float | None:
        """Mean time between failures of a component, a device's or a node's."""
        num = self.counts.get(component, 0)
        return self.observed_s(component) / num if num else None

    def observed_s(self, component: Component) -> float:
        """Devices or nodes times seconds."""
        return self.device_s if component == "device" else self.node_s


class _Event(Record):
    """One line of a table."""

    component: Component
    count: Annotated[int, Field(ge=1, le=10**9)] = 1


def read_failure_log(stated: StatedLog) -> FailureLog:
    """Read a failure log.

    Raises:
        SpecError: one line that names the file, the line, its value and the rule.
    """
    source = shown_path(stated.path)
    text = read_small_text(stated.path, what="failure log", most_bytes=LARGEST_LOG_BYTES)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.startswith("{"):
        try:
            return FailureLog.model_validate_json(text)
        except ValidationError as error:
            raise SpecError(
                f"{source}: not a failure log: JSON lines are no longer read; write a table with"
                " columns component and time or count"
            ) from error
    if set(SACCT_COLUMNS) <= set(first.split("|")):
        log = _of_jobs(text, stated, source)
    elif "component" in first.lower().split(","):
        log = _of_table(_csv_rows(text, source), stated, source)
    else:
        raise SpecError(
            f"{source}: not a failure log: neither a table with a column component nor sacct's"
            f" columns {'|'.join(SACCT_COLUMNS)}; of another program's log, write such a table"
        )
    if not sum(log.counts.values()):
        raise SpecError(
            f"{source}: no failure of {', '.join(stated.components)} in it; leave the log out, or"
            " state device_mtbf or node_mtbf"
        )
    return log


def _csv_rows(text: str, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    for number, row in _numbered(reader, source):
        yield (
            f"line {number}",
            {name.strip().lower() if name else name: value for name, value in row.items() if value},
        )


def _numbered(
    reader: "csv.DictReader[str]", source: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rows with the numbers of their lines."""
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise SpecError(f"{source}: line {reader.line_num}: {error}") from error


def _of_table(
    rows: Iterator[tuple[str, Mapping[str, Any]]], stated: StatedLog, source: str
) -> FailureLog:
    counts = dict.fromkeys(stated.components, 0)
    times: list[float] = []
    for number, (where, row) in enumerate(rows):
        if number >= MOST_EVENTS:
            raise SpecError(f"{source}: more than {MOST_EVENTS:,} failures")
        try:
            event = _Event.model_validate(
                {key: row[key] for key in ("component", "count") if key in row}, strict=False
            )
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"]))
            raise SpecError(
                one_line(f"{source}: {where}: {field}: {problem['msg']}, not {problem['input']!r}")
            ) from error
        if number and ("time" in row) != bool(times):
            has, others = ("a", "none") if "time" in row else ("no", "one")
            raise SpecError(
                f"{source}: {where}: {has} time, though lines above have {others}; give every line"
                " its time, or none"
            )
        if "time" in row:
            times.append(_seconds(row["time"], f"{source}: {where}"))
            if len(times) > 1 and times[-1] < times[-2]:
                raise SpecError(
                    f"{source}: {where}: time {shown_value(row['time'])} lies before that of the"
                    " line above; sort the log by time"
                )
        if event.component in counts:
            counts[event.component] += event.count
            if sum(counts.values()) > MOST_EVENTS and times:
                raise SpecError(f"{source}: more than {MOST_EVENTS:,} failures")
    return _observed(counts, times, stated, source)


def _observed(
    counts: dict[Component, int],
    times: Sequence[float],
    stated: StatedLog,
    source: str,
) -> FailureLog:
    """Add the time that a log without jobs was kept."""
    if stated.devices is None:
        raise SpecError(
            f"{source}: goal.reliability.log.devices: state how many devices were observed; the log"
            " does not say it"
        )
    span = times[-1] - times[0] if times else 0.0
    # N times have N - 1 gaps between them.
    period = stated.period or span * len(times) / max(len(times) - 1, 1)
    if not period > 0.0:
        raise SpecError(
            f"{source}: goal.reliability.log.period: state how long the devices were observed; the"
            " log has no times"
        )
    if period < span:
        raise SpecError(
            f"{source}: goal.reliability.log.period: {period:g} s are shorter than the log, whose"
            f" times span {span:g} s"
        )
    # Failures of devices alone have no rate of machines.
    of_devices = set(counts) == {"device"}
    devices_per_node = 1 if of_devices else _devices_per_node(stated, source)
    nodes = math.ceil(stated.devices / devices_per_node)
    return FailureLog(
        counts=counts,
        device_s=stated.devices * period,
        node_s=nodes * period,
        period_s=period,
    )


def _of_jobs(text: str, stated: StatedLog, source: str) -> FailureLog:
    """Sum sacct's jobs; the period is from the first start to the last end."""
    counts = dict.fromkeys(stated.components, 0)
    start_s: list[float] = []
    end_s: list[float] = []
    device_s, node_s, left_out = 0.0, 0.0, 0
    reader = csv.DictReader(io.StringIO(text), delimiter="|", quoting=csv.QUOTE_NONE)
    for number, row in _numbered(reader, source):
        where = f"{source}: line {number}"
        if len(end_s) >= MOST_EVENTS:
            raise SpecError(f"{source}: more than {MOST_EVENTS:,} jobs")
        if "." in (row["JobID"] or "") or "Unknown" in (row["Start"], row["End"]):
            continue
        if "None" in (row["Start"], row["End"]):
            continue
        start, end = (_seconds(row[name], where) for name in ("Start", "End"))
        if end < start:
            raise SpecError(f"{where}: End {row['End']} lies before Start {row['Start']}")
        nodes = _whole(row["NNodes"], f"{where}: NNodes")
        gpus = _GPUS.search(row.get("AllocTRES") or "")
        devices = int(gpus[1]) if gpus else nodes * _devices_per_node(stated, where)
        start_s.append(start)
        end_s.append(end)
        device_s += devices * (end - start)
        node_s += nodes * (end - start)
        component = OF_STATE.get((row["State"] or "").split(" ")[0])
        if component not in counts:
            continue
        if component == "software" and end - start < LEAST_RUN_S:
            left_out += 1
            continue
        counts[component] += 1
    if not device_s > 0.0:
        raise SpecError(f"{source}: no job in it has ended")
    return FailureLog(
        counts=counts,
        device_s=device_s,
        node_s=node_s,
        period_s=max(end_s) - min(start_s),
        left_out=left_out,
    )


def _devices_per_node(stated: StatedLog, where: str) -> int:
    if stated.devices_per_node is None:
        raise SpecError(
            f"{where}: goal.reliability.log.devices_per_node: state how many devices a machine of"
            " the log has; it does not say so, and the cluster's pools differ"
        )
    return stated.devices_per_node


def _whole(value: Any, where: str) -> int:
    text = str(value)
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise SpecError(f"{where}: {shown_value(value)} is not a whole number above zero")
    return int(text)


def _seconds(value: Any, where: str) -> float:
    """Return seconds, from a number or a date; dates without a zone are UTC."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            date = datetime.fromisoformat(str(value).strip())
        except ValueError as error:
            raise SpecError(
                f"{where}: time {shown_value(value)} is neither seconds nor a date like"
                " 2026-11-27T05:40:00"
            ) from error
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise SpecError(f"{where}: time {shown_value(value)} is not a number of seconds")
    return seconds
