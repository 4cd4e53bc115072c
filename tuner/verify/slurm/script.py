"""The two scripts of a trial's job: `job.sh` for the batch node, `node.sh` for every node.

`node.sh` starts the ranks of a node: with torchrun on several nodes, which rendezvous at the first
one, else with profilers/local_ranks.py. It ends them in three cases: the lease in the trial's
folder has not changed for a while (nobody waits for the trial any more), the trial's deadline has
passed, or the job was requeued and this is its former run on a node that only seemed dead. Ranks
end with `node.sh` (`--parent`), whatever ended it. The lease is compared with its former value, not
with a clock, so nodes need no common time. A run is identified by the job's name, its id, which a
controller that lost its state reuses, and its restart count.

`job.sh` runs on the first node of the allocation (sbatch(1)), where ranks rendezvous. It writes the
exit code of the run to `exit`. Ranks fail before Slurm notices a dead node, so a failed run is
followed by an empty task on every node: if that cannot be started, the node has failed, and the job
is requeued.
"""

import shlex
import sys
from pathlib import Path
from typing import Final

from tuner.engines.launchers.sbatch import directives, training_resources
from tuner.engines.launchers.shape import LaunchShape
from tuner.verify.launcher import CONFIG_NAME, PROGRESS_NAME, REPORT_NAME
from tuner.verify.slurm.options import Options
from tuner.verify.termination import GRACE_S, TRIAL_MARK

JOB_NAME: Final = "job.sh"
NODE_NAME: Final = "node.sh"
LEASE_NAME: Final = "lease"
RUN_NAME: Final = "run"
EXIT_NAME: Final = "exit"

ABANDONED_EXIT: Final = 75
"""Exit code of a node that ended its ranks because nobody waited (EX_TEMPFAIL of sysexits.h)."""


def job_script(
    *, name: str, folder: Path, shape: LaunchShape, options: Options, limit_s: float, restarts: int
) -> str:
    """Return the batch script.

    Args:
        name: of the job, by which it is looked up.
        folder: of the trial, on a file system that all nodes share.
        shape: nodes and devices on each.
        options: the user's sbatch options.
        limit_s: of the trial; the job's time limit unless the user sets one.
        restarts: how often Slurm may requeue the job after a node failure or preemption.
    """
    given = dict(options)
    own = training_resources(shape, name=name) | {"open-mode": "append"}
    if {"gpus-per-node", "gres", "gpus"} & given.keys():
        own.pop("gpus-per-node", None)
    if "cpus-per-task" in given:
        own.pop("cpus-per-task", None)
    if "time" not in given:
        own["time"] = str(2 + int(limit_s // 60))
    requeue = "requeue" if restarts else "no-requeue"
    return (
        "#!/usr/bin/env bash\n"
        + directives((*own.items(), *options, (requeue, "")))
        + _JOB.format(folder=shlex.quote(str(folder)), most_restarts=restarts)
    )


def node_script(*, shape: LaunchShape, deadline_s: float, lease_s: float) -> str:
    """Return the script of every node.

    Args:
        shape: nodes and devices on each.
        deadline_s: of the trial.
        lease_s: how long it runs on after the last renewal of the lease.
    """
    step = (
        f"profilers.steps {CONFIG_NAME} --report={REPORT_NAME} --progress={PROGRESS_NAME}"
        f' --deadline={deadline_s + GRACE_S:.0f} --parent="$$"'
    )
    python = shlex.quote(sys.executable)
    start = f"{python} -P -m {step}"
    if shape.nodes > 1:
        start = (
            f"{python} -P -m torch.distributed.run {_RENDEZVOUS}"
            f" --nnodes={shape.nodes} --nproc-per-node={shape.devices_per_node}"
            f" --no-python {start}"
        )
    elif shape.num_devices > 1:
        start = f"{python} -P -m profilers.local_ranks --ranks={shape.num_devices} {step}"
    return _NODE.format(
        start=start,
        lease_s=round(lease_s),
        limit_s=round(deadline_s + 10 * GRACE_S),
        abandoned=ABANDONED_EXIT,
    )


LOST_NODE_EXIT: Final = 69
"""Exit code of a job whose node was lost and that is not requeued (EX_UNAVAILABLE of
sysexits.h)."""

MOST_RESTARTS: Final = 3
"""Restarts of one trial after lost nodes; a trial that takes a node down each time must end."""

PROBE_S: Final = 60
"""Seconds for an empty task; Slurm gives an ending step about as long."""

_RENDEZVOUS: Final = (
    '--node-rank="$SLURM_NODEID" --rdzv-backend=static'
    ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --log-dir="$PWD/torchrun"'
)

_JOB: Final = f"""
set -u
cd -- {{folder}} || exit 1
own="$SLURM_JOB_NAME.$SLURM_JOB_ID.${{{{SLURM_RESTART_COUNT:-0}}}}"
rm -f {REPORT_NAME} {PROGRESS_NAME} {EXIT_NAME}
printf '%s\\n' "$own" > .{RUN_NAME}.partial && mv .{RUN_NAME}.partial {RUN_NAME}
unset RANK WORLD_SIZE LOCAL_RANK
export {TRIAL_MARK}="$PWD"
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED="${{{{PYTHONUNBUFFERED:-1}}}}"
# Where the nodes' names are no host names, set MASTER_ADDR before moetune.
export MASTER_ADDR="${{{{MASTER_ADDR:-$(hostname)}}}}"
# Jobs that share a node, and runs of one job, need different ports.
export MASTER_PORT="$((20000 + (SLURM_JOB_ID * 7 + ${{{{SLURM_RESTART_COUNT:-0}}}}) % 10000))"
srun --ntasks-per-node=1 --cpus-per-task="${{{{SLURM_CPUS_PER_TASK:-1}}}}" --kill-on-bad-exit=1 \\
  bash {NODE_NAME}
code=$?
restarts="${{{{SLURM_RESTART_COUNT:-0}}}}"
# A node that comes back ends every step of a job that it had before, the new ones too (137).
if ((code)) && {{{{ ((code == 137 && restarts)) \\
  || ! timeout {PROBE_S} srun --ntasks-per-node=1 true; }}}}; then
  echo "a node of the job cannot be reached any more" >&2
  # A controller that lost its state may have given the id to another job.
  if ((restarts < {{most_restarts}})) \\
    && [[ "$(squeue -h -j "$SLURM_JOB_ID" -o %j)" == "$SLURM_JOB_NAME" ]] \\
    && scontrol requeue "$SLURM_JOB_ID"; then
    sleep {PROBE_S}  # Slurm ends this run.
  fi
  code={LOST_NODE_EXIT}
fi
if [[ "$(cat {RUN_NAME} 2> /dev/null)" == "$own" ]]; then
  printf '%s\\n' "$code" > .{EXIT_NAME}.partial && mv .{EXIT_NAME}.partial {EXIT_NAME}
fi
exit "$code"
"""

_NODE: Final = f"""\
#!/usr/bin/env bash
set -u
own="$SLURM_JOB_NAME.$SLURM_JOB_ID.${{{{SLURM_RESTART_COUNT:-0}}}}"
{{start}} &
ranks=$!
finish() {{{{
  kill -TERM "$ranks" 2> /dev/null
  sleep 3 &
  wait -n
  kill -KILL "$ranks" 2> /dev/null
  exit "$1"
}}}}
trap 'finish 143' TERM INT
lease='' pause='' quiet_s=0 before_s=$SECONDS
while kill -0 "$ranks" 2> /dev/null; do
  sleep 2 &
  pause=$!
  wait -n
  found="$(cat {LEASE_NAME} 2> /dev/null)"
  quiet_s=$((quiet_s + SECONDS - before_s)) before_s=$SECONDS
  [[ "$found" == "$lease" ]] || quiet_s=0
  lease="$found"
  if ((quiet_s > {{lease_s}})); then
    echo "nobody waits for this trial any more: it is ended" >&2
    finish {{abandoned}}
  elif ((SECONDS > {{limit_s}})) || [[ "$(cat {RUN_NAME} 2> /dev/null)" != "$own" ]]; then
    finish {{abandoned}}
  fi
done
[[ -z "$pause" ]] || kill "$pause" 2> /dev/null
wait "$ranks"
exit $?
"""
