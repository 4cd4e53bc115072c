"""Emits the reference training step: `step.json`, `train.json` and `run.sh`.

The step ships with moetune (profilers/steps/), so the folder runs as it is. `step.json` is what
verification launches; `train.json` trains the router, with chunks chosen at run time. Ranks of one
node are started as in verification (profilers/local_ranks.py), so that they listen on loopback
only; those of several nodes by torchrun.
"""

from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.reference.step_config import step_config, training_config
from tuner.engines.statement import statement
from tuner.plans.train import VerifiedPlan

TIMED_STEPS: Final = 8
"""Enough for a median; a user edits `step.json` for more."""
WARMUP_STEPS: Final = 2

_ONE_NODE: Final = """\
  # The ranks rendezvous through a file and listen on loopback only.
  LAUNCHER=("${PYTHON:-python}" -P -m profilers.local_ranks "--ranks=$NPROC_PER_NODE")
"""
_SEVERAL_NODES: Final = """\
  LAUNCHER+=(--no-python "${PYTHON:-python}" -P -m)
"""

_START: Final = """\
CONFIG="${CONFIG:-step.json}"
[[ ! -e "$FILES/$CONFIG" ]] || CONFIG="$FILES/$CONFIG"

exec "${LAUNCHER[@]}" profilers.steps "$CONFIG" "--report=${REPORT:-report.json}" "$@"
"""

_OWN_ENVIRONMENT: Final = (
    "  PYTHON                   the interpreter",
    "  CONFIG                   step.json (as verified) or train.json (learned routing)",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the files that run the decision on the reference training step."""
    shape = launch_shape(verified.plan, verified.decision)
    config = step_config(
        verified.plan, verified.decision, steps=TIMED_STEPS, warmup_steps=WARMUP_STEPS
    )
    training = training_config(verified, steps=TIMED_STEPS, warmup_steps=WARMUP_STEPS)
    said = statement(verified)
    script = (
        "#!/usr/bin/env bash\n"
        + comment((*said, "", *ENVIRONMENT_NOTE, *_OWN_ENVIRONMENT))
        + preamble(shape, one_node=_ONE_NODE, several_nodes=_SEVERAL_NODES)
        + _START
    )
    return (
        EmittedFile(path=PurePosixPath("run.sh"), text=script, executable=True),
        EmittedFile(path=PurePosixPath("step.json"), text=config.model_dump_json(indent=2) + "\n"),
        EmittedFile(
            path=PurePosixPath("train.json"), text=training.model_dump_json(indent=2) + "\n"
        ),
        EmittedFile(
            path=PurePosixPath("README.txt"),
            text=comment(
                (
                    *said,
                    "",
                    "bash run.sh runs step.json, as verified, and writes report.json into the",
                    "current folder.",
                    "CONFIG=train.json bash run.sh trains the router; MoE layers then choose",
                    "their chunks at run time, so that no device runs out of memory.",
                ),
                prefix="",
            ),
        ),
    )
