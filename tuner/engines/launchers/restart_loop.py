"""Bash of a batch job that outlives failures: it starts the program again on healthy nodes.

    allocation   N nodes of the plan and up to S spares, those that the spec keeps back and pays for
                 (`spare_nodes`); unused nodes of the pool come through the queue
    lines        the N nodes in the order of ranks; a spare takes the line of a failed node, so that
                 the others keep their ranks. Where nodes are of several pools, it is one that Slurm
                 describes as those of the line's pool and of no other one (processors, devices, and
                 the features that all of the pool's nodes in the plan have): a plan knows no names
                 of spares, and the nodes of a requeued job are others
    progress     a start that lasted as long as restarting, training to a checkpoint and writing it,
                 and longer than a hang, where CHECKPOINTS names a folder that keeps it

Before every start each node of the allocation is asked to run an empty task, or the user's
HEALTH_CHECK. One that does not answer, or that Slurm has taken out of service (down, drained,
failing), is left out for good. Ranks fail before Slurm notices a dead node (SlurmdTimeout, 300 s
unless set), which is why nodes are asked at all, and why tasks note in a file beside the job's
output that they failed: srun goes on waiting for a dead node. A controller that is down is waited
for.

SIGTERM ends the job, whoever gets it: the script (--signal), or its tasks alone (preemption with a
grace time; scancel --signal). The first task that fails notes whether it was signalled. Slurm ends
the others, and those that outlive a lost node, with SIGKILL (_handle_terminate of slurmstepd).
From 24.05 on Slurm requeues what ends in its grace time, where preempted jobs are requeued.

`--no-kill` keeps the allocation when a node fails, and takes the requeue of Slurm away with it: a
job whose batch host dies stays in state RUNNING without its script (seen on Slurm 22.05). A small
step on another node therefore watches the batch host and requeues the job. `--nodes=N-M` gives M
nodes where they are idle, and starts a requeued job on N instead of waiting for repairs; with
--ntasks-per-node it would give N only, so tasks are counted by the steps. SIGTERM is passed on with
scancel, because an srun that receives it kills its tasks at once.

Sources: sbatch(1), srun(1), scancel(1), scontrol(1); tests/tuner/engines/test_real_restarts.py runs
the emitted file on a real Slurm.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tuner.engines.checkpoints import checkpoint_schedule
from tuner.engines.files import JOB_NAME
from tuner.engines.launchers.time_limit import SIGNAL_S
from tuner.engines.targets import PROGRAMS
from tuner.plans.train import VerifiedPlan
from tuner.units import format_s

MOST_FAILURES: Final = 3
"""Restarts in a row without progress, and requeues of a job that never made any."""
PROBE_S: Final = 60
"""Seconds that an empty task may take; Slurm gives an ending step about as long."""
END_S: Final = 60
"""Seconds that a step has to end after one of its tasks failed; Slurm kills the others after
KillWait, 30 s unless set."""
PROBES_AT_ONCE: Final = 64
"""Most nodes that are probed at once; each probe is an srun on the batch host."""
LONGEST_HANG_S: Final = 1800
"""Longest time that a hanging start lasts, seconds: more than ranks wait in a collective that never
returns, 10 minutes by default."""
WATCH_S: Final = 60
"""Seconds between two looks at the batch host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLoop:
    """Rules by which a job starts its program again."""

    spare_nodes: int
    """Spare nodes of the allocation, beside the plan's nodes."""
    progress_s: int
    """Seconds after which a start has left another checkpoint than the one that it began from."""
    line_pools: tuple[str, ...]
    """Pool of each line of hosts, where nodes are of several kinds and no spare fits every line."""
    spares_by_pool: Mapping[str, int]
    """Spare nodes by pool, where the plan has several."""
    saves_before_time_limit: bool
    """The program saves before the time limit, and ends."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Description of the restarts, for the job's header."""
        return (
            "After a failure the job starts the program again, on nodes that answer. Export",
            "CHECKPOINTS, a folder that all nodes share, or every start begins anew.",
            f"Spare nodes of the allocation: {self.spare_nodes}; each takes the place of a failed"
            f" node{' of its pool' if self.line_pools else ''}.",
            *self._allocation,
            "With too few nodes the job starts the plan in ../../fewer-nodes if there is one, and",
            "stays with it until scontrol requeue, which the forecast counts on at the first",
            "checkpoint after a repair; else it goes back to the queue itself.",
            f"It ends after {MOST_FAILURES} restarts in a row without progress, i.e. within"
            f" {format_s(self.progress_s)}",
            "of a start, and on SIGTERM, which it passes on: by preemption, by scancel, or shortly",
            "before the time limit. What was trained since the last checkpoint is lost then.",
            *(_LAST_CHECKPOINT if self.saves_before_time_limit else ()),
            "HEALTH_CHECK may hold a command that fails on nodes that must not be used.",
        )

    @property
    def _allocation(self) -> Iterator[str]:
        """Say how nodes of several pools are requested."""
        if not self.line_pools:
            return
        counts = {
            pool: nodes + self.spares_by_pool.get(pool, 0)
            for pool, nodes in Counter(self.line_pools).items()
        }
        total = sum(counts.values())
        listed = ", ".join(f"{count} of {pool!r}" for pool, count in counts.items())
        features = "&".join(f"F{index}*{count}" for index, count in enumerate(counts.values(), 1))
        yield f"Nodes to request, spares included: {listed}. With features of Slurm, F1 and so on,"
        yield f"that name the pools: sbatch --nodes={total} --constraint='[{features}]'. A pool is"
        yield "known by what Slurm says of the nodes in hosts.txt: processors, devices, features."


_LAST_CHECKPOINT: Final = (
    "The program saves before the time limit, unless that takes longer than forecast, and ends",
    "with 0; so does the job. Submit it again to go on.",
)


def restart_loop(
    verified: VerifiedPlan, *, program: str, line_pools: tuple[str, ...] = ()
) -> RestartLoop | None:
    """Return how a plan's job restarts; None where its program is told of no checkpoints.

    Args:
        verified: the plan.
        program: that the job starts.
        line_pools: of each of its nodes in the order of ranks, where they are of several kinds.
    """
    stated, run = verified.plan.goal.reliability, verified.predicted.run
    schedule = checkpoint_schedule(verified)
    able = PROGRAMS[program].capabilities
    if stated is None or run is None or schedule is None:
        return None
    if not able.saves_during_run:
        return None
    interval_s, write_s = schedule.interval_s, run.checkpoint_write_s or 0.0
    if schedule.host_steps is not None:
        interval_s *= schedule.host_steps / schedule.steps
    restart_s = max(stated.restart or 0.0, run.restart_s or 0.0)
    placement = verified.plan.placement
    has_pools = placement is not None and len({stage.pool for stage in placement.stages}) > 1
    by_pool = placement.spare_nodes if line_pools and placement is not None else {}
    return RestartLoop(
        # A decision that verification chose has no lines, and a spare no pool.
        spare_nodes=sum(by_pool.values()) if has_pools else stated.num_spare_nodes,
        progress_s=max(math.ceil(restart_s + interval_s + write_s), LONGEST_HANG_S),
        line_pools=line_pools,
        spares_by_pool=by_pool,
        saves_before_time_limit=able.saves_before_time_limit,
    )


def options(loop: RestartLoop, *, nodes: int) -> dict[str, str]:
    """Return the options of sbatch that a restarting job has beside, or instead of, its own."""
    max_nodes = nodes + loop.spare_nodes
    return {
        "nodes": f"{nodes}-{max_nodes}" if max_nodes > nodes else str(nodes),
        "no-kill": "",
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:TERM@{SIGNAL_S}",
    }


def body(
    loop: RestartLoop,
    *,
    program: str,
    has_hosts: bool,
    is_named: bool,
    device_kind: Literal["cpu", "cuda"],
) -> str:
    """Return the bash that follows `PROGRAM`, `NNODES` and `NPROC_PER_NODE`.

    Args:
        loop: of the plan.
        program: folder of the program, beside the job's.
        has_hosts: `hosts.txt` orders the nodes.
        is_named: the job requests those nodes by name.
        device_kind: decides what an unset HEALTH_CHECK asks of a node.
    """
    lines = (
        'mapfile -t HOSTS < "$HOSTFILE"'
        if has_hosts
        else 'HOSTS=("${NODES[@]:0:NNODES}") HOSTFILE='
    )
    numbers = {pool: number for number, pool in enumerate(dict.fromkeys(loop.line_pools))}
    pools = " ".join(str(numbers[pool]) for pool in loop.line_pools)
    return _BODY.format(
        fits=_FITS_POOL.format(pools=pools) if pools else "",
        fitting=_FITTING_POOL if pools else _FITTING,
        program=program,
        job=JOB_NAME,
        lines=lines,
        check=_CHECKS[device_kind],
        unnamed=_UNNAMED if is_named else "",
        progress_s=loop.progress_s,
        most=MOST_FAILURES,
        probe_s=PROBE_S,
        end_s=END_S,
        at_once=PROBES_AT_ONCE,
        watch_s=WATCH_S,
    )


_CHECKS: Final = {
    "cpu": "true",
    "cuda": "! command -v nvidia-smi"
    ' || (("$(nvidia-smi --list-gpus | grep --count ^GPU)" >= NPROC_PER_NODE))',
}
"""Bash that succeeds on a usable node, by kind of device: a device that has fallen off the bus is
not listed, while its node still runs tasks."""

_UNNAMED: Final = """\
 && {
    # Not by name again: the queue would wait for the very nodes that have failed. Slurm may not
    # take changes for a moment.
    for _ in {1..20}; do
      ! scontrol update "JobId=$JOB_ID" NodeList= || break
      sleep 1
    done
  }"""

_FITTING: Final = """\
    ((${#spares[@]})) || return 1
    say "node ${spares[0]} takes the place of $node, number $index"
    HOSTS[index]="${spares[0]}" spares=("${spares[@]:1}")
"""

_FITTING_POOL: Final = """\
    local place
    for place in "${!spares[@]}" none; do
      [[ "$place" == none ]] || ! fits "${spares[place]}" "$index" || break
    done
    if [[ "$place" == none ]]; then
      say "no spare fits the place of $node, number $index"
      return 1
    fi
    say "node ${spares[place]} takes the place of $node, number $index"
    HOSTS[index]="${spares[place]}"
    unset "spares[place]"
"""

_FITS_POOL: Final = """\

# The pool of each line, and the nodes that the plan put there.
POOLS=({pools}) PLANNED=("${{HOSTS[@]}}") KINDS=() FEATURES=()

# What Slurm says of a node's processors and devices, and its features; nothing of an unknown node.
kind() {{
  scontrol show node -o "$1" | grep -oE ' (CPUTot|Gres)=[^ ]*' | tr -d '\n'
}}
features() {{
  scontrol show node -o "$1" | sed -nE 's/.* ActiveFeatures=([^ ]*).*/\\1/p' | tr ',' ' '
}}

# Ask for the planned nodes, again for those of which nothing is known.
learn() {{
  local index
  for index in "${{!PLANNED[@]}}"; do
    [[ -z "${{KINDS[index]:-}}" ]] || continue
    KINDS[index]="$(kind "${{PLANNED[index]}}" || true)"
    FEATURES[index]="$(features "${{PLANNED[index]}}" || true)"
    [[ -n "${{KINDS[index]}}" ]] || say "Slurm knows no node ${{PLANNED[index]}} of $HOSTFILE"
  done
}}

# Whether a node is of a pool: as many processors and devices, and the features that all have there.
is_of() {{
  local pool="$1" own="$2" index feature alike='' count=0 shared=()
  local -A seen=()
  for index in "${{!KINDS[@]}}"; do
    [[ "${{POOLS[index]}}" == "$pool" && -n "${{KINDS[index]}}" ]] || continue
    [[ "${{KINDS[index]}}" != "$own" ]] || alike=1
    count=$((count + 1))
    for feature in ${{FEATURES[index]}}; do seen[$feature]=$((${{seen[$feature]:-0}} + 1)); done
  done
  [[ -n "$alike" ]] || return 1
  for feature in "${{!seen[@]}}"; do
    [[ "${{seen[$feature]}}" != "$count" ]] || shared+=("$feature")
  done
  for feature in ${{shared[@]+"${{shared[@]}}"}}; do
    has "$feature" "$3" || return 1
  done
}}

# Whether a node may take a line: it is of that line's pool, and of no other one.
fits() {{
  local own own_features pool
  learn
  own="$(kind "$1")" && own_features="$(features "$1")" || return 1
  is_of "${{POOLS[$2]}}" "$own" "$own_features" || return 1
  for pool in "${{POOLS[@]}}"; do
    [[ "$pool" == "${{POOLS[$2]}}" ]] || ! is_of "$pool" "$own" "$own_features" || return 1
  done
}}
"""

_BODY: Final = """\
# shellcheck disable=SC2016 # expanded on the node
[[ -n "${{HEALTH_CHECK:-}}" ]] || HEALTH_CHECK='{check}'
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{lines}
# The number of the first element of an array names all of them.
export JOB_ID="$SLURM_JOB_ID"
[[ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]] || JOB_ID="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
OWN_HOSTFILE="$PWD/moetune-$SLURM_JOB_ID.hosts"
REQUEUED="$PWD/moetune-$SLURM_JOB_ID.requeued"
FEWER="$JOB/../../fewer-nodes/launch"
STARTS=0 FAILURES=0 STOPPED=0 CODE=0
# scancel reaches tasks that run; those that begin later look for this file.
export JOB_STOPPED="$PWD/moetune-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.stopped"
stop() {{
  STOPPED=1
  : > "$JOB_STOPPED" || true
  scancel --signal=TERM "$JOB_ID" || true
}}
trap stop TERM
trap 'rm -f -- "$JOB_STOPPED"' EXIT

requeue() {{
  scontrol requeue "$JOB_ID"{unnamed}
}}
export -f requeue

say() {{ echo "$(date +%FT%T) {job}: $*" >&2; }}
has() {{ [[ " ${{*:2}} " == *" $1 "* ]]; }}
{fits}
# Whether a node runs a task and passes the check.
answers() {{
  timeout --kill-after=10 {probe_s} srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap \\
    bash -c "$HEALTH_CHECK" < /dev/null &> /dev/null
}}

answering() {{
  local node
  for node; do
    while (($(jobs -pr | wc -l) >= {at_once})); do wait -n || true; done
    {{ ! answers "$node" || echo "$node"; }} &
  done
  wait
}}

# Leave out of NODES what Slurm has taken out of service, and what does not answer.
keep_healthy() {{
  local node out answered healthy=()
  until ((STOPPED)) || [[ "$(scontrol ping)" == *" is UP"* ]]; do sleep 15; done
  out="$(IFS=, && sinfo -h -N -n "${{NODES[*]}}" -t down,drain,fail -o %N | tr '\\n' ' ')" || out=
  answered="$(answering "${{NODES[@]}}" | tr '\\n' ' ')"
  for node in "${{NODES[@]}}"; do
    if has "$node" "$answered" && ! has "$node" "$out"; then
      healthy+=("$node")
    else
      say "node $node is left out"
    fi
  done
  NODES=("${{healthy[@]}}")
}}

# Give the lines of failed nodes to spares; fail if there are too few.
replace_failed() {{
  local index node spares=()
  for node in "${{NODES[@]}}"; do
    has "$node" "${{HOSTS[@]}}" || spares+=("$node")
  done
  for index in "${{!HOSTS[@]}}"; do
    node="${{HOSTS[index]}}"
    has "$node" "${{NODES[@]}}" && continue
{fitting}  done
}}

# Where a node is reached, which need not be its name.
address() {{
  local at
  at="$(scontrol show node -o "$1" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')" || at=
  echo "${{at:-$1}}"
}}

# When the job ends, in seconds since 1970; nothing without a limit. Slurm says so from 23.02 on.
job_end() {{
  local at
  at="$(SLURM_TIME_FORMAT=standard squeue -h -j "$JOB_ID" -o %e 2> /dev/null)" || return 0
  [[ "$at" != *T* ]] || date -d "$at" +%s
}}

# Each task gets its line as its number, which Slurm's own (SLURM_NODEID) is not.
run_task() {{
  local code=0 signal=
  trap 'signal=TERM' TERM
  [[ ! -e "$JOB_STOPPED" ]] || exit 143
  NODE_RANK="$SLURM_PROCID" bash "$@" || code=$?
  ((code)) || exit 0
  # The first task that fails says whether it was told to end: others fail because of it.
  set -o noclobber
  {{ echo "$signal" > "$TASK_FAILED"; }} 2> /dev/null
  exit "$code"
}}
export -f run_task

start_program() {{
  local step code=0 failed_s='' signal=TERM signals=0
  STARTS=$((STARTS + 1))
  printf '%s\\n' "${{HOSTS[@]}}" > "$OWN_HOSTFILE"
  # Of this start: a task of an earlier one may still be there, on a node that Slurm has lost.
  TASK_FAILED="$PWD/moetune-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$STARTS.failed"
  export HOSTFILE="$OWN_HOSTFILE" TASK_FAILED
  # Jobs that share a node, and starts of one job, need different ports.
  # shellcheck disable=SC2016 # expanded on the nodes
  SLURM_JOB_END_TIME="${{SLURM_JOB_END_TIME:-$(job_end)}}" \\
    SLURM_HOSTFILE="$OWN_HOSTFILE" MASTER_ADDR="$(address "${{HOSTS[0]}}")" \\
    MASTER_PORT="${{MASTER_PORT:-$((20000 + (SLURM_JOB_ID + 997 * STARTS) % 20000))}}" \\
    srun --nodes="$NNODES" --ntasks="$NNODES" --distribution=arbitrary --overlap \\
    --kill-on-bad-exit=1 bash -c 'run_task "$@"' bash "$PROGRAM" "$@" &
  step=$!
  while kill -0 "$step" 2> /dev/null; do
    sleep 2
    # Once a task has failed, srun would wait for a dead node's as long as Slurm does.
    [[ ! -e "$TASK_FAILED" ]] || : "${{failed_s:=$SECONDS}}"
    if ((SECONDS - ${{failed_s:-$SECONDS}} > {end_s} * (signals + 1))); then
      kill -s "$signal" "$step" 2> /dev/null || true
      signal=KILL signals=$((signals + 1))
    fi
  done
  wait "$step" || code=$?
  if [[ "$(cat -- "$TASK_FAILED" 2> /dev/null)" == TERM ]] && ((!STOPPED)); then
    say "its tasks were signalled: the job ends"
    STOPPED=1
  fi
  rm -f -- "$TASK_FAILED"
  return "$code"
}}

# Turn to the plan for fewer nodes, on the first that are left; fail if there is none.
use_fewer_nodes() {{
  local node left=() job="$FEWER/slurm/{job}" nodes
  [[ -f "$job" && -f "$FEWER/{program}/run.sh" ]] || return 1
  nodes="$(sed -n 's/^export NNODES=//p' "$job")"
  ((nodes < NNODES && nodes <= ${{#NODES[@]}})) || return 1
  for node in "${{HOSTS[@]}}" "${{NODES[@]}}"; do
    ! has "$node" "${{NODES[@]}}" || has "$node" "${{left[@]}}" || left+=("$node")
  done
  PROGRAM="$FEWER/{program}/run.sh" NNODES="$nodes" HOSTS=("${{left[@]:0:nodes}}")
  NPROC_PER_NODE="$(sed -n 's/^export NPROC_PER_NODE=//p' "$job")"
  # Copies in the memory of nodes belong to the ranks of the other layout.
  [[ -z "${{LOCAL_CHECKPOINTS:-}}" ]] || export LOCAL_CHECKPOINTS="$LOCAL_CHECKPOINTS/$NNODES-nodes"
  say "the plan for $NNODES nodes is started"
}}

back_to_queue() {{
  say "${{#NODES[@]}} nodes are healthy, $NNODES are needed"
  date +%FT%T >> "$REQUEUED"
  if (($(wc -l < "$REQUEUED") > {most})); then
    say "requeued {most} times, and no progress since: the job ends"
    exit "$((CODE ? CODE : 1))"
  fi
  trap '' TERM  # Slurm ends this run, in KillWait seconds at the latest.
  requeue || exit 1
  exit 0
}}

# With --no-kill, Slurm does not requeue a job whose script died with its node: another node does.
guard_batch_host() {{
  local node
  [[ -z "${{GUARD:-}}" ]] || kill "$GUARD" 2> /dev/null || true
  for node in "${{HOSTS[@]}}" "${{NODES[@]}}"; do
    [[ "$node" != "$SLURMD_NODENAME" ]] || continue
    # shellcheck disable=SC2016 # expanded there
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap bash -c '
      while sleep {watch_s}; do
        # A job that is completing gives its nodes back one by one.
        left="$(squeue -h -t RUNNING -j "$JOB_ID" -o %N)" || continue
        [[ -z "$left" ]] || scontrol show hostnames "$left" | grep -Fxq -- "$0" || requeue
      done' "$SLURMD_NODENAME" < /dev/null &> /dev/null &
    GUARD=$!
    return
  done
}}

while true; do
  LEFT=${{#NODES[@]}}
  keep_healthy
  ((!STOPPED)) || exit 143
  ((${{#NODES[@]}} == LEFT)) || FAILURES=0  # Nodes failed, not the program.
  if ((FAILURES > {most})); then
    say "$FAILURES failures in a row without progress: the job ends"
    exit "$CODE"
  fi
  replace_failed || {{ use_fewer_nodes && replace_failed; }} || back_to_queue
  guard_batch_host
  ((!STOPPED)) || exit 143
  BEGAN=$SECONDS CODE=0
  start_program "$@" || CODE=$?
  ((CODE && !STOPPED)) || exit "$CODE"
  if [[ -n "${{CHECKPOINTS:-}}" ]] && ((SECONDS - BEGAN > {progress_s})); then
    FAILURES=0
    rm -f -- "$REQUEUED"
  fi
  FAILURES=$((FAILURES + 1))
  say "the program ended with $CODE after $((SECONDS - BEGAN)) s on ${{HOSTS[*]}}"
done
"""
