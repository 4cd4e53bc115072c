"""Bash of a program that ends before the time limit of its Slurm job, with a last checkpoint.

Engines that count the minutes from their own start save after the first step beyond them and end
with exit code 0 (`exit_duration_in_mins` of Megatron). Slurm says in SLURM_JOB_END_TIME when a job
ends, in seconds since 1970: slurmstepd sets it for the batch script and for every task, from the
credential of the step, so that a later start sees a limit that was extended (23.02 and later;
src/common/env.c and src/interfaces/cred.c). With older releases job.sbatch asks squeue.

    until the limit   minutes of training | a step, two writes, leeway | START_S | SIGNAL_S

Every rank must be told a number, or some would wait for the others to agree: a node whose clock
leaves less than a minute takes one, and the first rank that reaches its own ends all.

Not covered: SIGTERM, which torchrun sends to the process groups of its ranks, and so to the
processes that write checkpoints; and a limit that is changed while the program runs.
"""

from typing import Final

SIGNAL_S: Final = 60
"""Seconds before the time limit at which Slurm signals the job, for it to end its step."""
START_S: Final = 60
"""Seconds from the first line of a script until the engine counts: torchrun imports PyTorch and
waits for the other nodes."""

LIMIT_NOTE: Final = (
    "  SLURM_JOB_END_TIME       when the job ends, as Slurm sets it: the run saves before, where",
    "                           CHECKPOINTS is named, and ends with 0",
)
"""Lines about SLURM_JOB_END_TIME for the list of variables of an emitted script."""


def exit_minutes(ending_s: int) -> str:
    """Return bash that sets EXIT_MINUTES, empty where nothing says when a job ends.

    Args:
        ending_s: seconds from the last minute of training until a last checkpoint is written.
    """
    return f"""\
# Minutes that the engine may count from its start, before the time limit of a Slurm job. Kept are
# {SIGNAL_S} s in which the job ends its step, {START_S} s until the engine counts, and
# {ending_s} s for a last step and checkpoint.
exit_minutes() {{
  local left_s minutes
  [[ -n "${{CHECKPOINTS:-}}" && "${{SLURM_JOB_END_TIME:-}}" =~ ^[1-9][0-9]{{0,11}}$ ]] || return 0
  left_s=$((SLURM_JOB_END_TIME - $(date +%s)))
  ((left_s > 0)) || return 0
  minutes=$(((left_s - {SIGNAL_S + START_S + ending_s}) / 60))
  # All nodes need a number, and their clocks differ.
  echo "$((minutes > 1 ? minutes : 1))"
}}
EXIT_MINUTES="$(exit_minutes)"
"""
