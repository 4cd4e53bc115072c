"""The training goal: run, precision, recorded routing, failures."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from profilers.records import Record
from tuner.spec.documents import BatchSize, SequenceLengths, TooLong
from tuner.spec.failure_log import StatedLog
from tuner.spec.fields import (
    Bytes,
    BytesPerSecond,
    Count,
    FilePath,
    NotNegative,
    Number,
    PositiveSeconds,
    Seconds,
    Share,
    SharePerSecond,
    former,
    one_or_many,
)
from tuner.spec.tune import FULL, Adapters, Tune
from tuner.units import format_s


class Precision(StrEnum):
    """Precision of the GEMMs, by the names that engines use."""

    BF16 = "bf16"
    """bfloat16 GEMMs, fp32 master weights and optimizer state."""
    FP32 = "fp32"
    """Single precision throughout."""
    FP8_DELAYED = "fp8-delayed"
    """fp8 GEMMs, one scale per tensor from its amax history (delayed scaling)."""
    FP8_TENSORWISE = "fp8-tensorwise"
    """fp8 GEMMs, one scale per tensor from its current values (current scaling)."""
    FP8_BLOCKWISE = "fp8-blockwise"
    """fp8 GEMMs, a scale per 1 x 128 and 128 x 128 block (DeepSeek-V3)."""
    MXFP8 = "mxfp8"
    """fp8 GEMMs, a power-of-two scale per 32 values."""
    NVFP4 = "nvfp4"
    """fp4 GEMMs, an fp8 scale per 16 values."""

    @classmethod
    def _missing_(cls, value: object) -> "Precision | None":
        """Megatron's names: the value of `--fp8-recipe`, and `fp8`, whose recipe is delayed."""
        recipes = {"fp8": "delayed", "delayed": "delayed", "tensorwise": "tensorwise"}
        recipe = {**recipes, "blockwise": "blockwise"}.get(str(value))
        return None if recipe is None else cls(f"fp8-{recipe}")


class Phase(StrEnum):
    """The part of a recorded routing to plan for."""

    STEADY = "steady"
    """Second half of the recorded passes, after the router has converged."""
    EARLY = "early"
    """First quarter of the recorded passes, while the router still learns."""


class Routing(Record):
    """A recorded routing to plan for, and the part of it."""

    path: FilePath
    """Recording of the routing, file or folder; formats in profilers/routing/formats.py."""
    phase: Phase = Phase.STEADY


Objective = Literal["goodput", "cost"]
GOODPUT: Final = "goodput"
ONE_LEVEL: Final = ("shared",)
TWO_LEVELS: Final = ("host", "shared")


def _levels(value: object) -> object:
    """Read levels in any order."""
    if value == "auto":
        return value
    stated = one_or_many(value)
    names = [str(name) for name in stated] if isinstance(stated, list | tuple) else [str(value)]
    unknown = [name for name in names if name not in TWO_LEVELS]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is no level of checkpoints; write auto, [shared] or [host, shared]"
        )
    if "shared" not in names:
        raise ValueError("copies on hosts alone do not outlive all failures; add shared")
    return tuple(name for name in TWO_LEVELS if name in names)


def _replicas(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or value not in (0, 1, 2)):
        raise ValueError(f"{value!r} is no number of replicas; write auto, 0, 1 or 2")
    return value


_OF_TWO_LEVELS: Final = ("levels", "host_interval", "replicas", "host_memory")


class Checkpoint(Record):
    """Settings of checkpoints."""

    bandwidth: BytesPerSecond | None = None
    """Bytes per second of all writers together; absent: what the profile measured, otherwise
    2 GB/s a machine."""
    asynchronous: bool | Literal["auto"] = False
    """Checkpoints are copied to host memory and written during the following steps, if the engine
    can; otherwise training waits. `auto`: if a machine's memory has room for the copy, too."""
    interval: PositiveSeconds | None = None
    """Seconds between checkpoints on shared storage, at least a step of the plan; absent:
    optimised."""
    levels: Annotated[
        Literal["auto"] | tuple[Literal["host", "shared"], ...], BeforeValidator(_levels)
    ] = ONE_LEVEL
    """Storage of checkpoints: `[shared]` is shared storage; `[host, shared]` adds copies in the
    memory of the nodes, which survive failures of processes; `auto`: whichever lets the run train
    more of the time, if the engine has both."""
    host_interval: PositiveSeconds | None = None
    """Seconds between checkpoints on hosts; absent: optimised."""
    replicas: Annotated[Literal["auto", 0, 1, 2], BeforeValidator(_replicas)] = "auto"
    """Number of other machines that hold a copy of a machine's checkpoint, from which a lost one is
    restored; `auto`: optimised."""
    host_memory: Bytes | None = None
    """Memory of a machine that copies of checkpoints may take, bytes: an older name of
    `cluster.pools[].host`, for copies alone. With neither: half of what the profile measured, the
    size of a memory file system unless it is mounted with another one, otherwise without limit, and
    the plan says what they take."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what two levels have, where there is one."""
        later = () if self.keeps_host_copies else _OF_TWO_LEVELS
        return {name: value for name, value in serialize(self).items() if name not in later}

    @property
    def keeps_host_copies(self) -> bool:
        """Whether checkpoints on hosts may be planned."""
        return self.levels != ONE_LEVEL

    @model_validator(mode="after")
    def _levels_agree(self) -> "Checkpoint":
        stated = [
            name
            for name in ("host_interval", "replicas", "host_memory")
            if getattr(self, name) not in (None, "auto")
        ]
        if stated and not self.keeps_host_copies:
            raise ValueError(f"{stated[0]} needs levels: auto or [host, shared]")
        host_s, shared_s = self.host_interval, self.interval
        if host_s is not None and shared_s is not None and shared_s < 2.0 * host_s:
            raise ValueError(
                f"interval {format_s(shared_s)} is shorter than twice host_interval"
                f" {format_s(host_s)}; copies on hosts are made between those on shared storage"
            )
        return self


class Reliability(Record):
    """Failure rates of devices and machines, and their cost.

    At least one of `device_mtbf`, `node_mtbf`, `nodes_lost`, `process_mtbf` and `log` is needed;
    what is not stated never fails. Failure rates add up.
    """

    device_mtbf: PositiveSeconds | None = None
    """Mean time between failures of one device, seconds; None: it fails only with its machine."""
    restart: Seconds | None = None
    """Time from a failure to the first step after it, without loading the checkpoint, seconds; the
    goal needs it."""
    node_mtbf: PositiveSeconds | None = None
    """Mean time between failures of a machine apart from those of its devices, seconds; None: it
    never fails."""
    nodes_lost: SharePerSecond | None = None
    """Share of machines that fail in a period, e.g. `1% per week`, in place of `node_mtbf`. A share
    p in a time T is a mean time between failures of T / p a machine, 100 weeks here: machines that
    failed are replaced or repaired, so that the share of a longer period may exceed 100 %."""
    process_mtbf: PositiveSeconds | None = None
    """Mean time between failures of the processes of a machine, seconds; the machine goes on with
    its memory and needs no repair. None: they fail only with their machine."""
    in_process_restart: Annotated[
        Seconds | None, former("auto", "no suite measures it; state a time, or leave the key out")
    ] = None
    """Time from a failure of processes alone to the first step after it, seconds, for engines that
    restart without ending the other processes; used in place of `restart` where it is shorter."""
    lost_together: Share = 0.02
    """Share of lost machines, those lost with a device included, whose replicas of checkpoints are
    lost with them, e.g. of one rack; default: 2 %, our assumption."""
    log: StatedLog | None = None
    """Log of observed failures, in place of all rates. Failures of devices give `device_mtbf`,
    those of machines and links `node_mtbf`, those of software `process_mtbf`."""
    checkpoint: Checkpoint = Checkpoint()
    spare_nodes: Annotated[int, Field(ge=0, le=100_000)] | Literal["auto"] = 0
    """Spare machines of the cluster, not used by the plan. A job allocates and pays for them; other
    machines that it leaves unused are no spares. A spare replaces machines of its own pool only, so
    over several pools spares are apportioned by the number of machines (Sainte-Lague's rule: the
    first from the largest pool), and every pool keeps one working machine. `auto`: as many as serve
    `objective` best, of one pool, which may leave machines unused; it needs `repair`."""
    objective: Objective = GOODPUT
    """Aim of `spare_nodes: auto`: `goodput`, the most tokens per second of the whole run, hence the
    fewest days; or `cost`, the fewest device hours, spares and waiting included, on half of the
    machines or more."""
    repair: PositiveSeconds | None = None
    """Repair time of a failed machine, seconds; absent: repaired before spares run out."""
    without_spare: Literal["wait", "continue", "auto"] = "wait"
    """Action when a machine fails and no spare is left: `wait` for a repair; `continue` on one
    machine less, in a layout that is planned beforehand, from the checkpoint on shared storage, and
    go back at a checkpoint after the repair; `auto`: whichever lets the run train more of the time.
    `continue` and `auto` need `repair`, one pool, and a target that restores checkpoints in another
    layout."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plans did not have before failures were classed, where it is not used."""
        values: dict[str, Any] = serialize(self)
        for name in ("process_mtbf", "in_process_restart"):
            if getattr(self, name) is None:
                values.pop(name, None)
        if not self.checkpoint.keeps_host_copies:
            values.pop("lost_together", None)
        for name, default in (("without_spare", "wait"), ("objective", GOODPUT)):
            if values[name] == default:
                values.pop(name)
        return values

    @property
    def num_spare_nodes(self) -> int:
        """Spare machines; 0 where their number is open."""
        return 0 if self.spare_nodes == "auto" else self.spare_nodes

    @property
    def node_mtbf_s(self) -> float | None:
        """Mean time between failures of one machine, from either form."""
        return self.node_mtbf if self.nodes_lost is None else 1.0 / self.nodes_lost

    @model_validator(mode="after")
    def _some_job_waits(self) -> "Reliability":
        if self.without_spare != "wait" and self.repair is None:
            raise ValueError(
                f"without_spare: {self.without_spare} needs repair, the time until a machine is"
                " back: without it spares never run out"
            )
        return self

    @model_validator(mode="after")
    def _spares_run_out(self) -> "Reliability":
        if self.spare_nodes == "auto" and self.repair is None:
            raise ValueError(
                "spare_nodes: auto needs repair, the time until a machine is back: without it none"
                " is needed"
            )
        if self.spare_nodes != "auto" and self.objective != GOODPUT:
            raise ValueError(f"objective: {self.objective} needs spare_nodes: auto")
        return self

    @model_validator(mode="after")
    def _something_fails(self) -> "Reliability":
        if self.node_mtbf is not None and self.nodes_lost is not None:
            raise ValueError("node_mtbf and nodes_lost say the same; give one of them")
        losses = (self.device_mtbf, self.node_mtbf_s)
        if losses == (None, None) and self.log is None and self.process_mtbf is None:
            raise ValueError(
                "nothing is said to fail: give nodes_lost (e.g. 1% per week), node_mtbf,"
                " device_mtbf (e.g. 50000h), process_mtbf or a log"
            )
        if losses == (None, None) and self.log is None and self.checkpoint.keeps_host_copies:
            raise ValueError(
                "checkpoint.levels: no machine is said to be lost, so that copies on hosts last"
                " for ever: give nodes_lost, node_mtbf or device_mtbf, too"
            )
        return self


NEVER_FAILS: Final = Reliability(device_mtbf=1e18, restart=0.0)
"""Reliability of a spec that prices no failures."""


class TrainEngine(Record):
    """The training software and its release."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """The launch target, e.g. `megatron-bridge`, or `nemo` for its containers."""
    version: Annotated[str, Field(min_length=1, max_length=40)]
    """Release as published runs name it, e.g. "26.04" of a container; quoted, since it is no
    number."""

    @field_validator("version", mode="before")
    @classmethod
    def _quoted(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f"{value} is read as a number; write it in quotes, e.g. '26.04'")  # noqa: TRY004 # pydantic turns only ValueError into its own
        return value


class TrainGoal(Record):
    """A training run: pretraining or fine-tuning."""

    kind: Literal["train"]
    """Always `train`."""
    sequence_length: Count
    """Tokens of one sequence; with `sequence_lengths`, of one packed row."""
    global_batch_size: Count
    """Sequences of one optimizer step; with `sequence_lengths`, packed rows."""
    sequence_lengths: SequenceLengths | None = None
    """Lengths of the documents, which are packed into rows of `sequence_length` tokens and attend
    to themselves alone: a file, or a law such as `{kind: lognormal, mean: 1024, cv: 1.5}`; absent:
    every sequence is one document."""
    too_long: TooLong = TooLong.CUT
    """Treatment of documents that are longer than `sequence_length`."""
    tokens: Number | None = None
    """Tokens of the whole run, for its duration and price."""
    precision: Precision = Precision.BF16
    tune: Tune = FULL
    """Trained weights: `full` is all of them; otherwise low-rank adapters, e.g. `{method: lora,
    rank: 16, targets: [attention]}`."""
    engine: TrainEngine | None = None
    """Release to price for; absent: the newest one in the published runs of the launch target, or
    all together if those runs do not name releases (megatron-lm)."""
    routing: Routing | None = None
    """Recorded expert loads; absent: balanced experts are assumed."""
    moe_aux_loss_coeff: NotNegative | None = None
    """Coefficient of the load-balancing loss, written into launch files if the engine has one. It
    changes the loss and no price. Absent: not written, and the plan notes that it assumes
    balance."""
    reliability: Reliability | None = None
    """Failures to price; absent: none."""
    failed_start: Seconds | None = None
    """Time lost to a start that runs out of memory, seconds, replanning and requeueing included;
    absent: 4 hours (tuner/search/train/memory_risk.py)."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plans did not have before documents had lengths, where they have none."""
        values: dict[str, Any] = serialize(self)
        if self.sequence_lengths is None:
            del values["sequence_lengths"], values["too_long"]
        return values

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained; None: all weights."""
        return self.tune if isinstance(self.tune, Adapters) else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.global_batch_size


class StatedTrainGoal(TrainGoal):
    """A training run: pretraining or fine-tuning."""

    global_batch_size: BatchSize  # type: ignore[assignment]  # a spec is resolved to sequences
    """Sequences of one optimizer step, or `{documents: N}`, `{rows: N}` or `{tokens: N}`, which
    become the nearest number of rows that data-parallel ranks divide well."""
