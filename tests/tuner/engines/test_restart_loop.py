"""The loop of an emitted job, run by bash with programs of the test in the place of Slurm's."""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import tempfile
import termios
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.patience import patient_s
from tests.rows import Failures, each_row
from tests.tuner.engines.test_checkpoints import saving, saving_on_hosts
from tests.tuner.engines.test_writers import GOLDEN
from tests.tuner.engines.testing import assert_golden, changed, directives_of, write_emitted
from tuner.engines.launchers import restart_loop
from tuner.engines.launchers.restart_loop import END_S, LONGEST_HANG_S, MOST_FAILURES
from tuner.engines.launchers.slurm import emit
from tuner.engines.reading.launch import TrainingEngine
from tuner.engines.writers import emit_all
from tuner.estimate.registry import read_launch
from tuner.plans.stage_placement import NodeOrder, StageDevices, StagePlacement
from tuner.plans.train import VerifiedPlan

PROGRAM = "megatron-lm"

SRUN = """\
words=" $* "
signal_job() {
  kill -TERM "$TEST_JOB"
  until [[ -e "$TEST/signalled" ]]; do read -r -t 0.02 < <(:) || true; done
}
start_task() { SLURM_PROCID="$1" SLURMD_NODENAME="${nodes[$1]}" "${task[@]}"; }
if [[ "$words" == *" --distribution=arbitrary "* ]]; then
  mapfile -t nodes < "$SLURM_HOSTFILE"
  echo "start ${nodes[*]}" >> "$TEST/log"
  while [[ "$1" == --* ]]; do shift; done
  task=("$@")
  mapfile -t outcomes < "$TEST/outcomes"
  printf '%s\\n' "${outcomes[@]:1}" > "$TEST/outcomes"
  read -r code dead <<< "${outcomes[0]}"
  printf '%s\\n' $dead >> "$TEST/dead"
  export TEST_OUTCOME="$code"
  if [[ "$code" == HANGS ]]; then
    # The second task ends when srun is told to, long after the first has failed.
    start_task 1 & last=$!
    until [[ -s "$TEST/pid" ]]; do read -r -t 0.02 < <(:) || true; done
    trap 'kill -TERM $(cat "$TEST/pid")' TERM
    start_task 0 || true
    wait "$last" || true
    wait "$last"
    exit
  fi
  [[ "$code" != CREATED ]] || signal_job
  for number in "${!nodes[@]}"; do
    start_task "$number" || exit
  done
  if [[ "$code" == TERM ]]; then
    signal_job
    exit 143
  fi
  exit "$code"
fi
[[ "$words" == *"squeue"* ]] && exit 0  # the guard
node="${words#*--nodelist=}" node="${node%% *}"
mapfile -t dead < "$TEST/dead"
[[ " ${dead[*]} " != *" $node "* ]] || exit 1
while [[ "$1" == --* ]]; do shift; done
SLURMD_NODENAME="$node" exec "$@"
"""
SCONTROL = """\
case "$1 ${2:-}" in
  "show hostnames") printf '%s\\n' $ALLOCATION ;;
  "show job") echo "   Command=$TEST/plan/launch/slurm/job.sbatch" ;;
  "show node")
    gres=gpu:8
    if [[ -n "${TEST_KINDS:-}" ]]; then
      [[ " $TEST_KINDS" == *" $4="* ]] || { echo "Node $4 not found"; exit 1; }
      gres="${TEST_KINDS#*"$4="}" gres="${gres%% *}"
    fi
    echo "NodeName=$4 CPUTot=1 CPULoad=0.$RANDOM ActiveFeatures=ib Gres=$gres NodeAddr=at-$4" ;;
  "ping "*)
    state=UP
    if [[ -n "${TEST_DOWN:-}" ]]; then state=DOWN; kill -TERM "$TEST_JOB"; fi
    echo "Slurmctld(primary) at one is $state" ;;
  *) echo "scontrol $*" >> "$TEST/log" ;;
esac
"""
SINFO = """\
mapfile -t lines < "$TEST/drained"
printf '%s\\n' "${lines[@]}"
echo >> "$TEST/checks"
mapfile -t checks < "$TEST/checks"
if ((${#checks[@]} == ${TEST_STOP_AT:-0})); then kill -TERM "$TEST_JOB"; fi
"""
SQUEUE = """\
[[ "$SLURM_TIME_FORMAT $*" == "standard "*" -j 41 "*%e* ]] || exit
if [[ -z "${TEST_END:-}" ]]; then exit 1; fi
echo "$TEST_END"
"""
RUN = """\
[[ -z "${{SLURM_JOB_END_TIME:-}}" ]] || echo "until $SLURM_JOB_END_TIME" >> "$TEST/log"
echo "rank $NODE_RANK of $NNODES x $NPROC_PER_NODE: $SLURMD_NODENAME at\
 $MASTER_ADDR:$MASTER_PORT {name} $*" >> "$TEST/log"
case "$TEST_OUTCOME $NODE_RANK" in
  "TASKS 0") kill -TERM "$PPID"; exit 143 ;;
  "HANGS 0") exit 1 ;;
  "HANGS 1")
    trap 'exit 143' TERM
    echo "$PPID $$" > "$TEST/pid"
    while true; do read -r -t 0.02 < <(:) || true; done ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a job did."""

    code: int
    said: str
    log: tuple[str, ...]

    @property
    def starts(self) -> list[str]:
        """The nodes of every start, in the order of ranks."""
        return [line.removeprefix("start ") for line in self.log if line.startswith("start ")]

    @property
    def asked(self) -> list[str]:
        """What was asked of scontrol."""
        return [line for line in self.log if line.startswith("scontrol ")]

    @property
    def ranks(self) -> list[str]:
        return [line for line in self.log if line.startswith("rank ")]


def reliable(*, spare_nodes: int = 1, hosts: Sequence[str] = (), pools: int = 1) -> VerifiedPlan:
    """Return a plan of two nodes of four devices that saves every 240 s."""
    made = saving(PROGRAM, devices_per_node=4)
    changes: dict[str, object] = {"plan.goal.reliability.spare_nodes": spare_nodes}
    if hosts or pools > 1:
        order = NodeOrder(
            pool="pool",
            nodes=tuple(hosts),
            spare=(),
            step_time_before_s=3.0,
            step_time_after_s=2.0,
            bound_s=2.0,
        )
        changes["plan.placement"] = StagePlacement(
            stages=tuple(
                StageDevices(pool="pool" if stage == 0 else "old", layers=24, devices=4)
                for stage in range(pools)
            ),
            hosts=tuple(hosts) or ("a", "b"),
            node_orders=(order,) if hosts and pools == 1 else (),
            spare_nodes={"old": spare_nodes} if pools > 1 and spare_nodes else {},
        )
    return changed(made, changes)


@pytest.fixture
def lab(tmp_path: Path) -> "Lab":
    return Lab(tmp_path / "it's a test")


class Lab:
    """A plan's folder, and Slurm's programs in a folder on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requeues = 0
        self.stderr = subprocess.PIPE
        """Where the job talks to."""
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        self._program("srun", SRUN)
        self._program("scontrol", SCONTROL)
        self._program("sinfo", SINFO)
        self._program("squeue", SQUEUE)
        self._program("scancel", 'echo "scancel $*" >> "$TEST/log"; touch "$TEST/signalled"')
        self._program("sleep", "exec /bin/sleep 0.02")

    def write(self, verified: VerifiedPlan, *, under: str = "plan") -> Path:
        launch = self.folder / under / "launch"
        write_emitted(launch / "slurm", emit(verified))
        for target, files in emit_all(verified).items():
            for file in files:
                if file.path.name == "hosts.txt":
                    write_emitted(launch / "slurm", (file,))
            (launch / target).mkdir(exist_ok=True)
            (launch / target / "run.sh").write_text(RUN.format(name=under))
        return launch / "slurm" / "job.sbatch"

    def run(
        self,
        job: Path,
        outcomes: Iterable[str],
        *,
        allocation: str = "n1 n2 n3",
        drained: str = "",
        **environment: str,
    ) -> Ended:
        """Run the job.

        Args:
            job: its file.
            outcomes: of every start: its exit code, and the nodes that die with it. Instead of a
                code, who gets SIGTERM: TERM, the job, when the tasks have ended; CREATED, the job,
                before they begin; TASKS, a task; HANGS, a task that srun ends, after another has
                failed.
            allocation: its nodes.
            drained: those that Slurm has taken out of service.
            environment: variables; TEST_END, when the job ends, by squeue; TEST_STOP_AT, the check
                of nodes in which it gets SIGTERM; TEST_DOWN, the controller is down and the job
                gets SIGTERM.
        """
        (self.folder / "outcomes").write_text("".join(f"{one}\n" for one in outcomes))
        (self.folder / "drained").write_text(drained)
        for name in ("dead", "log", "checks", "pid"):
            (self.folder / name).write_text("")
        (self.folder / "moetune-41.requeued").write_text("then\n" * self.requeues)
        (self.folder / "signalled").unlink(missing_ok=True)
        spooled = self.folder / "slurm_script"
        spooled.write_text(job.read_text())
        done = subprocess.run(
            ["bash", "-c", 'TEST_JOB=$$ exec bash "$@"', "-", spooled, "--train-iters", "10 000"],
            cwd=self.folder,
            env={
                "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
                "TEST": str(self.folder),
                "ALLOCATION": allocation,
                "SLURM_JOB_ID": "41",
                "SLURM_JOB_NODELIST": "n[1-9]",
                "SLURMD_NODENAME": allocation.split()[0],
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            check=False,
            timeout=patient_s(60),
        )
        log = (self.folder / "log").read_text().splitlines()
        return Ended(code=done.returncode, said=done.stderr or "", log=tuple(log))

    def _program(self, name: str, text: str) -> None:
        file = self.programs / name
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)


def test_a_plan_that_counts_on_no_checkpoints_keeps_its_job() -> None:
    (job,) = emit(changed(reliable(), {"plan.goal.reliability": None}))
    assert "requeue" not in job.text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in job.text


def test_the_job_equals_the_golden_one() -> None:
    (job,) = emit(reliable(hosts=("n2", "n1")))
    assert_golden(job.text, GOLDEN / "slurm-restarts" / "job.sbatch")


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck")
    for number, hosts in enumerate(((), ("n2", "n1"))):
        (job,) = emit(reliable(hosts=hosts))
        file = tmp_path / f"job-{number}.sbatch"
        file.write_text(job.text)
        done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@each_row(("spare", "nodes"), ((0, "2"), (1, "2-3"), (3, "2-5")))
def test_the_job_requests_its_spares_and_keeps_its_allocation(spare: int, nodes: str) -> None:
    (job,) = emit(reliable(spare_nodes=spare))
    options = directives_of(job.text)
    assert {"nodes": nodes, "open-mode": "append", "signal": "B:TERM@60"}.items() <= options.items()
    assert "#SBATCH --no-kill\n#SBATCH --requeue\n" in job.text
    # With ntasks Slurm would give the fewest nodes.
    assert not any(option.startswith("ntasks") for option in options)
    assert f"# Spare nodes of the allocation: {spare}; each takes" in job.text


@each_row(("program", "saves"), ((PROGRAM, True), ("megatron-bridge", True), ("torchtitan", False)))
def test_the_job_says_what_becomes_of_the_last_steps(*, program: Any, saves: bool) -> None:
    said = " ".join(present(restart_loop.restart_loop(reliable(), program=program)).lines)
    assert "What was trained since the last checkpoint is lost then." in said, program
    assert ("The program saves before the time limit" in said) is saves, program


def test_spares_of_several_pools_are_requested_by_pool() -> None:
    (job,) = emit(reliable(hosts=("n1", "n2"), pools=2, spare_nodes=2))
    assert "#SBATCH --nodes=2-4\n" in job.text
    assert "# Spare nodes of the allocation: 2; each takes the place of a failed node of its" in (
        job.text
    )
    assert "# Nodes to request, spares included: 1 of 'pool', 3 of 'old'." in job.text
    assert "sbatch --nodes=4 --constraint='[F1*1&F2*3]'" in job.text
    # Another layout than the plan's has no hosts in an order.
    made = reliable(hosts=("n1", "n2"), pools=2, spare_nodes=2)
    (job,) = emit(changed(made, {"decision.micro_batch_size": 3}))
    assert "#SBATCH --nodes=2\n" in job.text
    # Plans of before, whose spares belong to no pool.
    (job,) = emit(reliable(hosts=("n1", "n2"), pools=2, spare_nodes=0))
    assert "#SBATCH --nodes=2\n" in job.text


def test_a_spare_takes_a_line_of_its_own_pool(lab: Lab, failures: Failures) -> None:
    job = lab.write(reliable(hosts=("n1", "n2"), pools=2, spare_nodes=2))
    new, old = "gpu:h100:8(S:0-1)", "gpu:a100:8(S:0-1)"
    kinds = {"n1": new, "n2": old, "n3": new, "n4": old, "n5": old}
    cases: list[tuple[list[str], dict[str, str], list[str], list[str]]] = [
        (["1 n1", "0"], kinds, ["n1 n2", "n3 n2"], []),
        # Not n3, which comes first.
        (["1 n2", "1 n4", "0"], kinds, ["n1 n2", "n1 n4", "n1 n5"], []),
        (["1 n1 n2", "0"], kinds, ["n1 n2", "n3 n4"], []),
        (["1 n1", "1 n3", "0"], kinds, ["n1 n2", "n3 n2"], ["no spare fits the place of n3"]),
        # Nothing tells the pools apart, or a node is not Slurm's.
        (["1 n1", "0"], dict.fromkeys(kinds, new), ["n1 n2"], ["no spare fits the place of n1"]),
        (
            ["1 n2", "0"],
            {name: kinds[name] for name in ("n1", "n3", "n4")},
            ["n1 n2"],
            ["Slurm knows no node n2 of", "no spare fits the place of n2"],
        ),
    ]
    for outcomes, described, starts, said in cases:
        ended = lab.run(
            job,
            outcomes,
            allocation="n1 n2 n3 n4 n5",
            TEST_KINDS=" ".join(f"{name}={kind}" for name, kind in described.items()),
        )
        with failures.of(outcomes, described):
            assert ended.starts == starts, ended.said
            assert all(line in ended.said for line in said), ended.said
            assert ended.asked == (["scontrol requeue 41"] if said else [])
    # The allocation of a requeued job holds other nodes.
    words = " ".join(f"{name}={kind}" for name, kind in {**kinds, "n7": old, "n8": new}.items())
    ended = lab.run(job, ["0"], allocation="n7 n8 n4", TEST_KINDS=words)
    assert ended.starts == ["n8 n7"]


def test_a_spare_of_another_rack_is_of_its_pool() -> None:
    loop = present(
        restart_loop.restart_loop(
            reliable(hosts=("n1", "n2"), pools=2, spare_nodes=2),
            program=PROGRAM,
            line_pools=("new", "new", "old", "old"),
        )
    )
    text = restart_loop.body(
        loop, program=PROGRAM, has_hosts=True, is_named=False, device_kind="cuda"
    )
    begin, end = text.index("# The pool of each line"), text.index("# Whether a node runs a task")
    # Both pools have the same devices; the last planned node answers at the second question only.
    script = f"""
set -uo pipefail
HOSTS=(n1 n2 o1 o2) HOSTFILE=hosts.txt
say() {{ echo "$*" >&2; }}
has() {{ [[ " ${{*:2}} " == *" $1 "* ]]; }}
scontrol() {{
  local features
  case "$4" in
    n1) features=h100,rack1 ;; n2) features=h100,rack2 ;; n3) features=rack3,h100 ;;
    o1) features=a100,rack1 ;; o2) features=a100,rack4 ;; o3) features=a100,rack5 ;;
    x) features=rack1 ;; *) return 1 ;;
  esac
  [[ "$4" != o2 || -e known ]] || return 1
  echo "NodeName=$4 CPUTot=1 ActiveFeatures=$features Gres=gpu:8 NodeAddr=at-$4"
}}
{text[begin:end]}
for node in n3 o3 x unknown; do
  for line in 0 1 2 3; do
    if fits "$node" "$line"; then echo "$node takes $line"; fi
    : > known
  done
done
"""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True
        )
    assert ended.stdout.splitlines() == [
        *(f"n3 takes {line}" for line in (0, 1)),
        *(f"o3 takes {line}" for line in (2, 3)),
    ]
    assert ended.stderr.splitlines() == ["Slurm knows no node o2 of hosts.txt"]


def test_progress_is_a_restart_and_the_shortest_interval() -> None:
    def progress_s(made: VerifiedPlan) -> int:
        slow = {"checkpoint_write_s": 1e6, "restart_s": 100.0}
        made = changed(made, {f"predicted.run.{name}": value for name, value in slow.items()})
        return present(restart_loop.restart_loop(made, program=PROGRAM)).progress_s

    # Worked by hand: restart 100 s, 120 steps of 2 s or 30 to a copy on hosts, and the write.
    assert progress_s(reliable()) == 1_000_340
    assert progress_s(saving_on_hosts(PROGRAM, replicas=1)) == 1_000_160
    # Ranks that wait for each other in vain make none.
    waiting = present(restart_loop.restart_loop(reliable(), program=PROGRAM))
    assert waiting.progress_s == LONGEST_HANG_S


def at_once(job: Path) -> None:
    """Let every start of a job count as progress."""
    text = job.read_text()
    assert text.count(f"> {LONGEST_HANG_S})") == 1
    job.write_text(text.replace(f"> {LONGEST_HANG_S})", "> -1)"))


def test_failed_nodes_are_replaced_in_place(lab: Lab, failures: Failures) -> None:
    job = lab.write(reliable())
    cases: list[tuple[list[str], dict[str, str], int, list[str]]] = [
        (["0"], {}, 0, ["n1 n2"]),
        (["1", "0"], {}, 0, ["n1 n2", "n1 n2"]),
        (["1 n2", "0"], {}, 0, ["n1 n2", "n1 n3"]),
        (["137 n1", "0"], {}, 0, ["n1 n2", "n3 n2"]),
        # A spare that died before it was needed; the other one serves.
        (["1 n1 n3", "0"], {"allocation": "n1 n2 n3 n4"}, 0, ["n1 n2", "n4 n2"]),
        # Both nodes at once, then a spare.
        (
            ["1 n1 n2", "1 n3", "0"],
            {"allocation": "n1 n2 n3 n4 n5"},
            0,
            ["n1 n2", "n3 n4", "n5 n4"],
        ),
        # Slurm took it out of service, although it answers.
        (["0"], {"drained": "n2\n"}, 0, ["n1 n3"]),
        # The user's check fails there, although Slurm knows nothing.
        (["0"], {"HEALTH_CHECK": '[[ "$SLURMD_NODENAME" != n1 ]]'}, 0, ["n3 n2"]),
        # No spare was free: the job got the nodes of the plan.
        (["1", "0"], {"allocation": "n8 n9"}, 0, ["n8 n9", "n8 n9"]),
        # Restarts without progress are bounded, and the last exit code is the job's.
        (["5", "6", "7", "8", "0"], {}, 8, ["n1 n2"] * (MOST_FAILURES + 1)),
        # A signal ends the program and the job.
        (["TERM", "0"], {}, 143, ["n1 n2"]),
    ]
    for outcomes, settings, code, starts in cases:
        ended = lab.run(job, outcomes, **settings)
        with failures.of(outcomes, settings):
            assert ended.code == code, ended.said
            assert ended.starts == starts, ended.said
            assert ended.asked == []
            ranks = [line.split(" at ")[0] for line in ended.ranks]
            assert ranks == [
                f"rank {number} of 2 x 4: {node}"
                for start in starts
                for number, node in enumerate(start.split())
            ]
            signals = [line for line in ended.log if line.startswith("scancel")]
            assert signals == (["scancel --signal=TERM 41"] if "TERM" in outcomes else [])


def test_signals_to_the_tasks_and_steps_that_the_job_ends_are_told_apart(lab: Lab) -> None:
    # As Slurm sends it when a job is preempted, and scancel --signal does.
    ended = lab.run(lab.write(reliable()), ["TASKS", "0"])
    assert (ended.code, ended.starts) == (143, ["n1 n2"]), ended.said
    assert "its tasks were signalled" in ended.said
    job = lab.write(reliable())
    text = job.read_text()
    assert text.count(f"> {END_S} * (signals + 1)") == 1
    job.write_text(text.replace(f"> {END_S} * (signals + 1)", "> signals"))
    ended = lab.run(job, ["HANGS", "0"])
    assert (ended.code, ended.starts) == (0, ["n1 n2", "n1 n2"]), ended.said
    assert "the program ended with 143" in ended.said


def test_a_signal_between_starts_ends_the_job(lab: Lab, failures: Failures) -> None:
    job = lab.write(reliable())
    cases: list[tuple[str, list[str], dict[str, str], list[str]]] = [
        ("while nodes are asked", ["1", "0"], {"TEST_STOP_AT": "2"}, ["n1 n2"]),
        # Nor is it queued again.
        ("with too few nodes", ["1 n1 n2 n3"], {"TEST_STOP_AT": "2"}, ["n1 n2"]),
        ("while the controller is down", ["0"], {"TEST_DOWN": "1"}, []),
        ("before tasks begin", ["CREATED", "0"], {}, ["n1 n2"]),
    ]
    for name, outcomes, settings, starts in cases:
        ended = lab.run(job, outcomes, **settings)
        with failures.of(name):
            assert (ended.code, ended.starts, ended.asked) == (143, starts, []), ended.said
            assert "scancel --signal=TERM 41" in ended.log
            assert len(ended.ranks) == (0 if outcomes[0] == "CREATED" else 2 * len(starts))
            assert not list(lab.folder.glob("*.stopped"))


def test_the_program_is_told_when_the_job_ends(lab: Lab, failures: Failures) -> None:
    job = lab.write(reliable())
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({"TEST_END": "2033-05-18T03:33:20"}, ["until 2000000000"] * 4),
        # Slurm says so itself.
        ({"TEST_END": "2033-05-18T03:33:20", "SLURM_JOB_END_TIME": "7"}, ["until 7"] * 4),
        # Without a limit; the controller is down.
        ({"TEST_END": "NONE"}, []),
        ({"TEST_END": "N/A"}, []),
        ({}, []),
    ]
    for environment, expected in cases:
        ended = lab.run(job, ["1", "0"] if expected else ["0"], TZ="UTC", **environment)
        with failures.of(environment):
            assert ended.code == 0, ended.said
            assert [line for line in ended.log if line.startswith("until ")] == expected


def test_an_element_of_an_array_acts_on_itself_alone(lab: Lab) -> None:
    job = lab.write(reliable(hosts=("n2", "n1")))
    element = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}
    assert "scancel --signal=TERM 41_3" in lab.run(job, ["TERM"], **element).log
    ended = lab.run(job, ["1 n2", "1 n1"], **element)
    assert ended.asked == ["scontrol requeue 41_3", "scontrol update JobId=41_3 NodeList="]
    # What runs elsewhere asks for the element, too.
    used = [line for line in job.read_text().splitlines() if re.search(r"squeue .* -j ", line)]
    assert used
    assert all('-j "$JOB_ID"' in line for line in used)


def test_a_terminal_does_not_rename_nodes(lab: Lab) -> None:
    """Bash sets variables to the size of a window, scripts' too (checkwinsize)."""
    screen, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        lab.stderr = terminal
        ended = lab.run(lab.write(reliable()), ["1", "0"])
        said = os.read(screen, 4096).decode()
    finally:
        os.close(terminal)
        os.close(screen)
    assert (ended.code, ended.starts) == (0, ["n1 n2", "n1 n2"])
    assert "the program ended with 1" in said
    assert "takes the place" not in said


def test_every_start_has_its_first_node_and_a_port_of_its_own(lab: Lab) -> None:
    ended = lab.run(lab.write(reliable()), ["1 n1", "1", "0"])
    addresses = [line.split(" at ")[1].split()[0] for line in ended.ranks]
    # Worked by hand: 20000 + 41 + 997 a start.
    assert addresses[::2] == ["at-n1:21038", "at-n3:22035", "at-n3:23032"]
    assert addresses[1::2] == addresses[::2]
    assert ended.ranks[0].endswith("plan --train-iters 10 000")
    # The address of a node that may fail is not the user's to say.
    ended = lab.run(lab.write(reliable()), ["0"], MASTER_ADDR="127.0.0.1", MASTER_PORT="7")
    assert " at at-n1:7 " in ended.ranks[0]


def test_progress_starts_the_count_anew(lab: Lab) -> None:
    job = lab.write(reliable())
    at_once(job)
    outcomes = ["1"] * (MOST_FAILURES + 1) + ["0"]
    assert lab.run(job, outcomes, CHECKPOINTS="/shared").code == 0
    # Without a folder every start begins anew.
    assert lab.run(job, outcomes).code == 1


def test_too_few_nodes_go_back_to_the_queue_in_bounds(lab: Lab) -> None:
    job, outcomes = lab.write(reliable()), ["1 n2", "9 n1"]
    ended = lab.run(job, outcomes)
    assert ended.starts == ["n1 n2", "n1 n3"]
    assert ended.asked == ["scontrol requeue 41"]
    assert "1 nodes are healthy, 2 are needed" in ended.said
    lab.requeues = MOST_FAILURES
    ended = lab.run(job, outcomes)
    assert (ended.code, ended.asked) == (9, [])
    assert "no progress since" in ended.said
    at_once(job)
    ended = lab.run(job, outcomes, CHECKPOINTS="/shared")
    assert ended.asked == ["scontrol requeue 41"]


def test_too_few_nodes_start_the_plan_for_fewer(lab: Lab) -> None:
    job = lab.write(reliable())
    fewer = lab.write(reliable(), under="plan/fewer-nodes")
    fewer.write_text(fewer.read_text().replace("NNODES=2", "NNODES=1"))
    ended = lab.run(job, ["1 n2", "1 n1", "0"])
    assert ended.starts == ["n1 n2", "n1 n3", "n3"]
    assert (ended.code, ended.asked) == (0, [])
    assert "rank 0 of 1 x 4: n3 at at-n3:" in ended.ranks[-1]
    assert ended.ranks[-1].endswith("plan/fewer-nodes --train-iters 10 000")
    assert ended.ranks[0].endswith("plan --train-iters 10 000")
    # It survives as long as there are nodes for it.
    ended = lab.run(job, ["1 n2", "1", "1 n1", "1 n3"])
    assert ended.starts == ["n1 n2", "n1 n3", "n1 n3", "n3"]
    assert ended.asked == ["scontrol requeue 41"]
    # A plan for as many nodes is none for fewer.
    fewer.write_text(fewer.read_text().replace("NNODES=1", "NNODES=2"))
    assert lab.run(job, ["1 n2", "1 n1", "0"]).asked == ["scontrol requeue 41"]


def test_nodes_in_an_order_keep_their_lines(lab: Lab) -> None:
    job = lab.write(reliable(hosts=("n2", "n1")))
    assert "#SBATCH --nodelist=n2,n1\n" in job.read_text()
    ended = lab.run(job, ["1 n2", "1 n1", "0"], allocation="n1 n2 n3 n4")
    assert ended.starts == ["n2 n1", "n3 n1", "n3 n4"]
    # Requeued, and not for the nodes that failed.
    ended = lab.run(job, ["1 n2", "1 n1"])
    assert ended.starts == ["n2 n1", "n3 n1"]
    assert ended.asked == ["scontrol requeue 41", "scontrol update JobId=41 NodeList="]
    # The allocation of a requeued job holds other nodes.
    ended = lab.run(job, ["0"], allocation="n1 n7 n8")
    assert ended.starts == ["n7 n1"]
    # The order that the plan wrote stays what it was.
    assert (job.parent / "hosts.txt").read_text() == "n2\nn1\n"


def test_more_nodes_than_are_asked_at_once(lab: Lab) -> None:
    job = lab.write(reliable())
    job.write_text(job.read_text().replace(f">= {restart_loop.PROBES_AT_ONCE}", ">= 2"))
    nodes = [f"n{number}" for number in range(9)]
    ended = lab.run(job, [f"1 {nodes[0]} {nodes[7]}", "0"], allocation=" ".join(nodes))
    assert ended.starts == ["n0 n1", "n2 n1"]
    assert re.findall(r"node (\w+) is left out", ended.said) == ["n0", "n7"]


def test_whoever_asks_what_the_job_starts_is_led_to_its_program(lab: Lab) -> None:
    launch = lab.folder / "asked" / "launch"
    write_emitted(launch, emit_all(changed(reliable(), {"plan.emit": (PROGRAM, "slurm")})))
    read = read_launch(str(launch / "slurm" / "job.sbatch"))
    assert read.engine is TrainingEngine.MEGATRON
    assert (read.devices, read.devices_per_node, read.save_interval) == (8, 4, 120)
    # The job passes its own arguments on, of which run.sh alone knows nothing.
    alone = read_launch(str(launch / PROGRAM / "run.sh"))
    assert {*read.notes} <= {*alone.notes}
    assert any("$@" in note for note in {*alone.notes} - {*read.notes})
