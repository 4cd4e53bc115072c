"""The output of `moetune estimate`: the values behind its text and its `--json`."""

from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Size
from tuner.config.host_memory import HostMemory
from tuner.config.train import TrainDecision
from tuner.engines.reading.launch import UnpricedSetting
from tuner.faults.forecast import RunForecast
from tuner.plans.train import Band, Probability

Ratio = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class PipelineRankMemory(Record):
    """Peak bytes of one device of one pipeline rank, the highest of its devices."""

    pipeline_rank: Size
    layers: Size
    """Transformer layers of all its model chunks."""
    weight_bytes: Size
    gradient_bytes: Size
    optimizer_bytes: Size
    activation_bytes: Size
    """Bytes saved for backward at the peak, logits and loss included."""
    buffer_bytes: Size
    """Bytes of dispatch and communication buffers, and of temporaries of one layer."""
    reserve_bytes: Size
    """Bytes of the device context, graphs' pools, and what the allocator cannot give back."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.buffer_bytes
            + self.reserve_bytes
        )


class ExposedRatios(Record):
    """Shares of the step time; what is left is useful work on the device."""

    all_to_all_ratio: Ratio
    """Exposed dispatch and combine of experts."""
    tensor_ratio: Ratio
    """Exposed collectives of tensor parallelism."""
    context_ratio: Ratio
    """Exposed communication of context parallelism."""
    data_ratio: Ratio
    """Exposed gradient reduction and parameter all-gather of data parallelism."""
    bubble_ratio: Ratio
    """Share in which a device waits for other pipeline stages."""
    recompute_ratio: Ratio
    """Share of recomputed forward passes."""
    host_ratio: Ratio
    """Share in which the device waits for the host to launch kernels."""


class Utilisation(Record):
    """FLOP/s over the device's peak, and the convention by which they are counted."""

    mfu_ratio: Ratio
    """Model FLOPs over time, devices and peak."""
    hfu_ratio: Ratio
    """Model FLOPs and recomputed ones over time, devices and peak."""
    convention: str
    """Operations that count as model FLOPs, in words."""
    peak_flop_per_s: float
    """Peak FLOP/s of one device."""
    peak_name: str
    """Device and number type of the peak."""
    megatron_flop_per_s_per_device: float
    """FLOP/s of one device as Megatron-LM would print it in its log."""


class TrainingChange(Record):
    """One or two knobs at another setting, and the predicted effect."""

    what: tuple[str, ...]
    """Changes in words, one entry per knob."""
    lines: tuple[str, ...]
    """Lines to write into the launch."""
    environment: tuple[str, ...] = ()
    """Changes to the launch's environment, one line of its script each."""
    step_time_s: Seconds
    ratio_band: Band
    """Step time of the changed launch over that of the launch, lowest and highest, as four of five
    pairs of configurations measure it. Narrower than either time's band, as most errors are common
    to both."""
    within_band: bool
    """`ratio_band` contains 1: a tie with the launch under the model."""
    gain_ratio: float
    """Share of the step time that is saved; negative where a change only makes the run fit."""
    peak_memory_bytes: Size
    decision: TrainDecision


class CheckpointChange(Record):
    """Another way to save checkpoints."""

    lines: tuple[str, ...]
    """Lines to write into the launch."""
    run: RunForecast
    gain_ratio: float
    """Additional share of the wall clock that advances training, against the launch as it is."""


class CheckpointRoom(Record):
    """Number of checkpoints that lie on shared storage at once."""

    most: Size | None
    """Most checkpoints, the one that is being written included; absent where it grows with a run
    whose length is unknown."""
    change: str = ""
    """Line to write into the launch, which keeps all checkpoints, to remove old ones; empty: it
    removes them, or has no more than that line would keep."""
    change_most: Size | None = None
    """Most checkpoints with `change`; absent without one, and where it grows with a run whose
    length is unknown."""


class CheckpointEstimate(Record):
    """Time that a launch loses to failures."""

    interval_steps: Size | None
    """Steps between checkpoints; absent where the launch saves none before its end."""
    in_background: bool
    from_pinned_memory: bool = False
    """Checkpoints are written in the background from host memory that is pinned once for all of
    them."""
    host_interval_steps: Size | None = None
    """Steps between checkpoints in the memory of nodes; absent where the launch makes none, or none
    between two on shared storage."""
    run: RunForecast | None
    """Forecast of the run as launched; absent without checkpoints, as every failure then starts it
    again."""
    room: CheckpointRoom | None = None
    """Checkpoints on shared storage; absent without any."""
    change: CheckpointChange | None
    """The smallest change that gains time; absent where none does."""
    more_spare_nodes: Size = 0
    """Spare nodes beside the stated ones with which the run hardly waits for repairs; 0: it hardly
    waits with those."""
    spared_time_ratio: Ratio = 0.0
    """Share of the wall clock that advances training as launched, with `more_spare_nodes`."""


class LaunchEstimate(Record):
    """Fields of an estimate that training and serving launches share."""

    schema_version: Literal[1] = 1
    # 1: first release.
    source: str
    """Path of the launch file, or `the command`."""
    engine: str
    model: str
    device: str
    """Name of the datasheet."""
    fits: bool
    """Everything has room, longest requests included."""
    host_memory: HostMemory | None = None
    """Memory that the launch takes of a node beside the devices'; absent where nothing takes
    any."""
    least_gain_ratio: Ratio
    num_tried: Size
    """Launchable configurations that were priced for the changes."""
    flags_understood: tuple[str, ...]
    flags_ignored: tuple[str, ...]
    """Flags that change nothing in the prediction."""
    refused_by: tuple[str, ...]
    """Refusals of the manifest of target or release for the launch as it is."""
    notes: tuple[str, ...]


class Estimate(LaunchEstimate):
    """Predicted performance and memory of a training launch."""

    devices: Size
    sequence_length: Size
    global_batch_size: Size
    num_microbatches: Size
    """Micro-batches of one pipeline between two flushes."""
    rounds: Size = 1
    """Pipeline flushes in one step."""
    precision: str
    decision: TrainDecision
    """The launch as the decision of a plan."""
    step_time_s: Seconds
    step_time_s_band: Band
    played_step_time_s: Seconds | None
    """Step time by simulating the pipeline schedule pass by pass, as a check of the closed form;
    absent where the schedule cannot be simulated, or is too long."""
    tokens_per_s_per_device: float
    tokens_per_s_per_device_band: Band
    utilisation: Utilisation
    breakdown_s: dict[str, float]
    """Seconds of a step by cause, as in a plan's prediction; their sum is `step_time_s`."""
    exposed: ExposedRatios
    memory: tuple[PipelineRankMemory, ...]
    """Peak memory of one device by pipeline rank."""
    fullest_pipeline_rank: Size
    peak_memory_bytes: Size
    memory_limit_bytes: Size
    """Bytes that may be used of one device."""
    memory_capacity_bytes: Size
    """Bytes of all memory of one device."""
    out_of_memory_probability: Probability
    """Probability that a device ever needs more than it has; this and the next two are as in a
    plan's prediction."""
    out_of_memory_at_start_probability: Probability
    out_of_memory_loss_s: Seconds
    assumed_run_s: Seconds | None
    """Length of the run that `out_of_memory_loss_s` is a part of, seconds, where the spec states no
    tokens; absent otherwise."""
    rests_on_samples: str | None = None
    """Assumption of a refusal about the samples' lengths, where shorter ones would fit; absent
    without one."""
    unpriced: tuple[UnpricedSetting, ...] = ()
    """Settings of the launch with which memory or time do not hold, so nor does a verdict on it."""
    smallest_change: TrainingChange | None
    """The best change of one knob, or of two where no single one helps, or of more where a launch
    does not fit with two; absent when nothing in reach is predicted to be better by more than
    `least_gain_ratio`."""
    best_pair: TrainingChange | None = None
    """Change of two knobs, where together they bring more than the smallest change."""
    changes: tuple[TrainingChange, ...]
    """Best setting of every knob, best first; for a launch that does not fit also that of two
    knobs."""
    checkpoints: CheckpointEstimate | None = None
    """Time that the launch loses to failures; absent where the spec states no failures, or the
    launch does not state when it saves."""
    flags_deprecated: tuple[str, ...]
