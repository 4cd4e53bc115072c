"""The output of `moetune estimate --json` for a launch of reinforcement learning; times seconds."""

from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record
from tuner.config.host_memory import HostMemory

Size = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class RlChange(Record):
    """One knob at another setting, and the predicted effect."""

    what: str
    lines: tuple[str, ...]
    """Lines to write into the launch."""
    step_time_s: Seconds
    gain_ratio: float
    """Share of the step that is saved; negative where the change only makes the launch fit."""
    peak_memory_bytes: Size


class PhaseTimer(Record):
    """Measured seconds of one phase beside the predicted ones."""

    phase: str
    timers: tuple[str, ...]
    """Names of the timers in the log."""
    measured_s: Seconds
    predicted_s: Seconds
    ratio: float
    """Measured over predicted seconds."""
    is_off: bool
    """Measured seconds lie above the band of four steps of five."""


class RlEstimate(Record):
    """Predicted step and memory of a launch of reinforcement learning."""

    schema_version: Literal[1] = 1
    # 1: first release.
    source: str
    framework: str
    model: str
    device: str
    """Name of the datasheet."""
    placement: str
    """`colocated` or `disaggregated`."""
    versions: float
    """Versions of the weights that responses may be behind; 0: on-policy."""
    train_devices: Size
    rollout_devices: Size
    samples: Size
    """Responses of a step."""
    updates: Size
    """Optimizer steps of the actor in a step."""
    mean_tokens: float
    """Tokens of a sequence, mean."""
    step_time_s: Seconds
    step_time_s_band: tuple[float, float]
    """Seconds within which four steps of five are measured."""
    tokens_per_s_per_device: float
    phases_s: dict[str, float]
    """Seconds by phase."""
    bound: str
    """Name of the phase, or of the side, that takes most of the step."""
    bound_words: str
    """Reason in a sentence."""
    idle_ratio: dict[str, Ratio]
    """Share of the step in which the devices of each side do nothing."""
    device_memory: dict[str, dict[str, Size]]
    """Bytes of the fullest device by moment (rollout, train, switch) and part."""
    memory_capacity_bytes: Size
    kv_tokens: Size
    """Tokens that the caches of a rank hold."""
    host_memory: HostMemory | None
    fits: bool
    misfits: tuple[str, ...]
    """Reasons why the launch cannot run."""
    smallest_change: RlChange | None
    """Change of one knob with which the step is shortest; absent where none gains."""
    changes: tuple[RlChange, ...]
    num_tried: Size
    timers: tuple[PhaseTimer, ...]
    """Timers of the log beside the prediction; empty without one."""
    timed_steps: Size
    flags_ignored: tuple[str, ...]
    notes: tuple[str, ...]
