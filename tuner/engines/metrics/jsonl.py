"""JSON lines, one per step, written by the user's own program.

    {"step_s": 0.81}
    {"step": 3, "step_s": 0.80, "activation_bytes": [1200, 900], "peak_bytes": 7340032}

`step_s` is a step's wall time in seconds; `activation_bytes` the largest live sum of what is saved
for backward, peak over the devices of each pipeline rank; `peak_bytes` the largest memory use of a
device. Other fields and lines are ignored.
"""

import json

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner.engines.metrics.interface import LogLine, TrialWork, believable


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    step: int | None = Field(default=None, ge=0, lt=10**12)
    step_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    activation_bytes: int | list[int] = []
    peak_bytes: int | None = Field(default=None, gt=0)


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the file."""
    del job  # Step times need no conversion.
    if not line.lstrip().startswith("{"):
        return None
    try:
        values = _Line.model_validate(json.loads(line))
    except (ValueError, RecursionError, ValidationError):
        return None
    activations = values.activation_bytes
    return believable(
        LogLine(
            step=values.step,
            step_s=values.step_s,
            peak_bytes=values.peak_bytes,
            activation_bytes=tuple(activations)
            if isinstance(activations, list)
            else (activations,),
        )
    )
