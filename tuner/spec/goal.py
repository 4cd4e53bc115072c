"""What the plan is for: a training run, its precision, its recorded routing, its failures."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from profilers.records import Record
from tuner.spec.fields import (
    BytesPerSecond,
    Count,
    FilePath,
    NotNegative,
    Number,
    PositiveSeconds,
    Seconds,
    SharePerSecond,
)


class Precision(StrEnum):
    """What the GEMMs compute in; the names that engines use."""

    BF16 = "bf16"
    """bfloat16 products, fp32 master weights and optimizer state."""
    FP32 = "fp32"
    """Single precision throughout."""
    FP8_DELAYED = "fp8-delayed"
    """fp8 products, one scale per tensor from the history of its largest values."""
    FP8_TENSORWISE = "fp8-tensorwise"
    """fp8 products, one scale per tensor from its own values (current scaling)."""
    FP8_BLOCKWISE = "fp8-blockwise"
    """fp8 products, a scale per 1 x 128 and 128 x 128 block (DeepSeek-V3)."""
    MXFP8 = "mxfp8"
    """fp8 products, a power-of-two scale per 32 values."""
    NVFP4 = "nvfp4"
    """fp4 products, an fp8 scale per 16 values."""

    @classmethod
    def _missing_(cls, value: object) -> "Precision | None":
        """Megatron's own words: `--fp8-recipe` alone, and `fp8`, whose recipe is then delayed."""
        recipes = {"fp8": "delayed", "delayed": "delayed", "tensorwise": "tensorwise"}
        recipe = {**recipes, "blockwise": "blockwise"}.get(str(value))
        return None if recipe is None else cls(f"fp8-{recipe}")


class Phase(StrEnum):
    """Which part of a recorded routing a plan is made for."""

    STEADY = "steady"
    """After the router has settled: the second half of the recorded passes."""
    EARLY = "early"
    """While the router still learns to balance: the first quarter of the recorded passes."""


class Routing(Record):
    """A recorded routing to plan for."""

    path: FilePath
    """A recording, file or folder; tuner/spec/routing.py says of which kinds."""
    phase: Phase = Phase.STEADY


class Checkpoint(Record):
    """How the state of a run is saved."""

    bandwidth: BytesPerSecond | None = None
    """Bytes per second of all writers together; absent: what the profile measured, otherwise
    2 GB/s a machine."""
    asynchronous: bool = False
    """The state is copied to host memory and written beside the following steps."""
    interval: PositiveSeconds | None = None
    """Seconds between checkpoints; absent: the best one is found."""


class Reliability(Record):
    """How often devices and machines fail and what that costs.

    At least one of `device_mtbf`, `node_mtbf` and `nodes_lost` is needed; what is not stated never
    fails. The failures of devices and machines add up.
    """

    device_mtbf: PositiveSeconds | None = None
    """Mean time between failures of one device, seconds; None: it never fails without its
    machine."""
    restart: Seconds
    """Time from a failure to the first step after it, without reading the checkpoint."""
    node_mtbf: PositiveSeconds | None = None
    """Mean time between failures of what the devices of a machine share; None: it never fails."""
    nodes_lost: SharePerSecond | None = None
    """Instead of `node_mtbf`: the share of machines that fail in a period, e.g. `1% per week`. A
    share p in a time T is a mean time between failures of T / p a machine, 100 weeks here: machines
    that failed are replaced or repaired, so that the share of a longer period may exceed 100 %."""
    checkpoint: Checkpoint = Checkpoint()
    spare_nodes: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Machines of the cluster that wait to replace a failed one; the plan does not use them. A
    machine replaces one of its own pool only, so over several pools they are shared out by the
    machines that each has (Sainte-Lague's rule: the first from the largest pool), and every pool
    keeps one that works."""
    repair: PositiveSeconds | None = None
    """Time until a failed machine is back; absent: before the spares run out."""

    @property
    def node_mtbf_s(self) -> float | None:
        """Mean time between failures of one machine, however it was stated."""
        return self.node_mtbf if self.nodes_lost is None else 1.0 / self.nodes_lost

    @model_validator(mode="after")
    def _something_fails(self) -> "Reliability":
        if self.node_mtbf is not None and self.nodes_lost is not None:
            raise ValueError("node_mtbf and nodes_lost say the same; give one of them")
        if self.device_mtbf is None and self.node_mtbf_s is None:
            raise ValueError(
                "nothing is said to fail: give nodes_lost (e.g. 1% per week), node_mtbf or"
                " device_mtbf (e.g. 50000h)"
            )
        return self


class TrainEngine(Record):
    """The software that will train, where its release is known."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """The launch target, e.g. `megatron-bridge`, or `nemo` for its containers."""
    version: Annotated[str, Field(min_length=1, max_length=40)]
    """As published runs name it, e.g. "26.04" of a container; in quotes, as it is no number."""

    @field_validator("version", mode="before")
    @classmethod
    def _quoted(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f"{value} is read as a number; write it in quotes, e.g. '26.04'")  # noqa: TRY004 # pydantic turns only ValueError into its own
        return value


class TrainGoal(Record):
    """A pretraining run."""

    kind: Literal["train"]
    """Always `train`."""
    sequence_length: Count
    """Tokens of one sequence."""
    global_batch_size: Count
    """Sequences of one optimizer step."""
    tokens: Number | None = None
    """Tokens of the whole run, for its duration and price."""
    precision: Precision = Precision.BF16
    engine: TrainEngine | None = None
    """Release to price for; absent: the newest that published runs of the launch target carry, or
    all of them together for a target whose releases they do not carry (megatron-lm)."""
    routing: Routing | None = None
    """Recorded expert loads; absent: every expert is taken to get the same number of tokens."""
    moe_aux_loss_coeff: NotNegative | None = None
    """Coefficient of the auxiliary loss that balances experts, written into launch files whose
    engine has one. It changes the loss and no price. Absent: not written, and the plan says that
    it counts on balance."""
    reliability: Reliability | None = None
    """Failures to price; absent: none."""
    failed_start: Seconds | None = None
    """What a start that runs out of memory costs, planning anew and queueing again included;
    absent: 4 hours (tuner/planner/analytic/memory_risk.py)."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.global_batch_size
