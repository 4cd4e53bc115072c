"""Emits the reference training step under torchrun: `step.json` and `run.sh`.

The step ships with the product (profilers/steps/), so the folder starts as it lies.
"""

from pathlib import PurePosixPath
from typing import Final

from tuner.emit.evidence import statement
from tuner.emit.files import EmittedFile, comment
from tuner.emit.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.launch.shape import launch_shape
from tuner.launch.step_config import step_config
from tuner.plan import VerifiedPlan

TIMED_STEPS: Final = 8
"""Enough for a median; a user edits `step.json` for more."""
WARMUP_STEPS: Final = 2


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the files that run the decision on the reference training step."""
    shape = launch_shape(verified.plan, verified.decision)
    config = step_config(
        verified.plan, verified.decision, steps=TIMED_STEPS, warmup_steps=WARMUP_STEPS
    )
    said = statement(verified)
    script = (
        "#!/usr/bin/env bash\n"
        + comment((*said, "", *ENVIRONMENT_NOTE, "  PYTHON                   the interpreter"))
        + preamble(shape)
        + 'exec "${LAUNCHER[@]}" --no-python "${PYTHON:-python}" -P -m profilers.steps \\\n'
        + '  step.json "--report=${REPORT:-report.json}" "$@"\n'
    )
    return (
        EmittedFile(path=PurePosixPath("run.sh"), text=script, executable=True),
        EmittedFile(path=PurePosixPath("step.json"), text=config.model_dump_json(indent=2) + "\n"),
        EmittedFile(
            path=PurePosixPath("README.txt"),
            text=comment(
                (
                    *said,
                    "",
                    "bash run.sh trains on step.json and writes report.json beside it.",
                ),
                prefix="",
            ),
        ),
    )
