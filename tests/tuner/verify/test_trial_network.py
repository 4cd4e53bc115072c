"""Which trials have a network of their own, and that nothing from outside reaches them there."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.goals.train_folder import read_plan
from tuner.verify import own_network
from tuner.verify.command import CommandLauncher, parse_template
from tuner.verify.launcher import LOG_NAME, Launch, LaunchResult
from tuner.verify.metrics import find_adapter
from tuner.verify.trial_network import Start, TrialNetwork, obstacle, stays_here

ROOT = Path(__file__).parents[3]
NO_NAMESPACE = obstacle()
needs_namespaces = pytest.mark.skipif(
    bool(NO_NAMESPACE), reason=f"no network namespace can be made here: {NO_NAMESPACE}"
)

RANKS = """
import json, os, pathlib, psutil, torch.distributed as dist
from tests.sockets import reachable_at
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    tree = [psutil.Process().parent(), *psutil.Process().parent().children()]
    cards = psutil.net_if_addrs().items()
    seen = {
        "listening": sorted(set().union(*map(reachable_at, tree))),
        "cards": sorted(name for name, each in cards if any(a.family == 2 for a in each)),
        "namespace": os.readlink("/proc/self/ns/net"),
        "user": os.geteuid(),
    }
    pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
    print('{"step_s": 1.0}\\n' * 9, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
WITHOUT_TORCH = """
import json, os, pathlib, socket
seen = {
    "cards": sorted(name for _, name in socket.if_nameindex()),
    "namespace": os.readlink("/proc/self/ns/net"),
    "user": os.geteuid(),
    "gloo": os.environ["GLOO_SOCKET_IFNAME"],
    "logs": os.environ["PET_LOG_DIR"],
}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
print('{"step_s": 1.0}\\n' * 9, flush=True)
"""


@pytest.fixture
def launch(planned: Path, tmp_path: Path) -> Launch:
    """A trial of two ranks in a folder of its own."""
    plan = read_plan(planned)
    assert plan.decision is not None
    assert plan.predicted is not None
    return Launch(
        plan=plan,
        decision=plan.decision,
        predicted=plan.predicted,
        steps=3,
        warmup_steps=1,
        folder=tmp_path / "trial",
        deadline_s=120.0,
    )


def _launcher(
    command: str, network: TrialNetwork, *, options: str, **environment: str
) -> CommandLauncher:
    def prepare(launch: Launch) -> None:
        script = launch.folder / "launch" / "reference" / "run.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        text = f"exec {sys.executable} {options}"
        script.write_text(f'{text} "$@"\n', encoding="utf-8")

    return CommandLauncher(
        template=parse_template(command),
        adapter=find_adapter("jsonl"),
        environment={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        prepare=prepare,
        network=network,
    )


@needs_namespaces
def test_a_launched_command_has_a_network_of_its_own(
    launch: Launch, tmp_path: Path, outside_card: str
) -> None:
    program, seen = tmp_path / "program.py", tmp_path / "seen.json"
    program.write_text(WITHOUT_TORCH, encoding="utf-8")
    lines: list[str] = []
    launcher = _launcher(
        f"bash {{launch}}/run.sh {program}",
        TrialNetwork(on_message=lines.append),
        options="-S",
        SEEN=str(seen),
        GLOO_SOCKET_IFNAME=outside_card,
    )
    result = launcher(launch)
    assert (result.status, result.reason, lines) == ("ok", "", [])
    outcome = json.loads(seen.read_text(encoding="utf-8"))
    assert outcome.pop("namespace") != str(Path("/proc/self/ns/net").readlink())
    # Of torchrun, which would leave a folder in the temporary one.
    assert outcome.pop("logs") == str(launch.folder.resolve() / "torchrun")
    assert outcome == {"cards": ["lo"], "user": os.geteuid(), "gloo": "lo"}


@pytest.mark.slow
@needs_namespaces
def test_what_listens_on_every_address_is_out_of_reach_and_leaves_nothing(
    launch: Launch, tmp_path: Path, outside_card: str
) -> None:
    program, seen, scratch = tmp_path / "ranks.py", tmp_path / "seen.json", tmp_path / "tmp"
    scratch.mkdir()
    program.write_text(RANKS, encoding="utf-8")
    lines: list[str] = []
    launcher = _launcher(
        f"bash {{launch}}/run.sh {program}",
        TrialNetwork(on_message=lines.append),
        options="-m torch.distributed.run --standalone --nproc-per-node=2",
        SEEN=str(seen),
        TMPDIR=str(scratch),
        GLOO_SOCKET_IFNAME=outside_card,
        OMP_NUM_THREADS="1",
    )
    result = launcher(launch)
    assert (result.status, result.reason, lines) == ("ok", "", []), (
        launch.folder / LOG_NAME
    ).read_text()
    outcome = json.loads(seen.read_text(encoding="utf-8"))
    # torchrun's store does listen on every address, of which there is one.
    assert outcome["listening"] in (["127.0.0.1", "::"], ["0.0.0.0", "127.0.0.1"])
    assert outcome["cards"] == ["lo"]
    assert outcome["namespace"] != str(Path("/proc/self/ns/net").readlink())
    assert outcome["user"] == os.geteuid()
    assert [file for file in scratch.iterdir() if "torchinductor" not in file.name] == []
    assert (launch.folder / "torchrun").is_dir()


def test_only_what_is_known_to_stay_on_this_machine_is_cut_off(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("", encoding="utf-8")
    script.chmod(0o755)
    torchrun = str(tmp_path / "torchrun")
    Path(torchrun).touch(mode=0o755)
    staying = (
        ("bash", str(script), "--steps", "3"),
        ("/bin/bash", str(script)),
        (str(script),),
        (torchrun, "--standalone", "--nproc-per-node=2", "train.py"),
        (torchrun, "--nnodes", "1", "--master-addr=127.0.0.1", "train.py"),
        (torchrun, "--nnodes=1", "--rdzv-endpoint", "localhost:0", "train.py"),
        (sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "train.py"),
    )
    leaving = (
        ("srun", "bash", str(script)),
        ("bash", "-c", f"ssh other bash {script}"),
        ("bash", str(tmp_path / "mine.sh")),
        ("env", "bash", str(script)),
        (torchrun, "--nnodes=2", "train.py"),
        (torchrun, "--nnodes", "1:2", "train.py"),
        (torchrun, "--master_addr", "head", "train.py"),
        (torchrun, "--rdzv-endpoint=head:29400", "train.py"),
        (sys.executable, "train.py"),
        (str(tmp_path / "absent" / "torchrun"), "--standalone", "train.py"),
    )
    for words in (("--nnode", "2"), ("--master-ad", "head"), ("--rdzv-end=head:1",)):
        assert not stays_here((torchrun, *words, "train.py"), script=script), words
    assert [command for command in staying if not stays_here(command, script=script)] == []
    assert [command for command in leaving if stays_here(command, script=script)] == []


def test_whoever_shares_the_machines_network_is_told_once_and_why(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    here = {"command": ("bash", str(script)), "nodes": 1, "environment": {}}
    cases = (
        (TrialNetwork(probe=lambda: "not permitted"), here, "can be created here (not permitted)"),
        (TrialNetwork(choice="host", probe=str), here, "as --network host says"),
        (TrialNetwork(probe=str), here | {"nodes": 2}, "nodes must reach each other"),
        (TrialNetwork(probe=str), here | {"environment": {"NNODES": "2"}}, "nodes must reach"),
        (TrialNetwork(probe=str), here | {"environment": {"PET_NNODES": "2"}}, "PET_ variables"),
        (
            TrialNetwork(probe=str),
            here | {"environment": {"PET_RDZV_ENDPOINT": "head:1"}},
            "PET_ variables",
        ),
        (TrialNetwork(probe=str), here | {"command": ("srun", "x")}, "only 'bash {launch}/run.sh'"),
    )
    for network, requested, words in cases:
        lines: list[str] = []
        network.on_message = lines.append
        for _ in range(2):
            start = network.start(script=script, **requested)  # type: ignore[arg-type]  # a table
            assert (start.is_own, start.command) == (False, requested["command"])
        (line,) = lines
        assert words in line
        assert "listens on every address" in line
    own = TrialNetwork(on_message=lines.append, probe=str).start(script=script, **here)  # type: ignore[arg-type]  # a table
    assert own.is_own
    assert own.environment["NCCL_SOCKET_IFNAME"] == "=lo"
    assert len(lines) == 1


@needs_namespaces
def test_a_command_in_its_own_network_keeps_its_exit_code_and_is_cut_off() -> None:
    said = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5.0)"
    for command, code, words in (
        ((sys.executable, "-c", "raise SystemExit(7)"), 7, ""),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), -9, ""),
        ((sys.executable, "-c", said), 1, "Network is unreachable"),
        (("/absent/program",), own_network.NO_PROGRAM_EXIT, "/absent/program: No such file"),
    ):
        done = subprocess.run(
            [sys.executable, "-IS", own_network.__file__, *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_a_trial_that_failed_for_lack_of_a_network_is_told_how_it_gets_one() -> None:
    crash = LaunchResult(status="crashed", reason="it failed", report=None, wall_s=1.0)
    own = Start(command=("x",), environment={}, is_own=True)
    tail = "urllib3: Temporary failure in name resolution"
    assert own.explained(crash, tail=tail).reason == (
        "it failed; it had no network but loopback: --network host gives it this machine's"
    )
    assert own.explained(crash, tail="shapes differ") == crash
    assert dataclasses.replace(own, is_own=False).explained(crash, tail=tail) == crash


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="is what the other tests try where nobody is root")
def test_a_user_without_rights_has_a_network_of_its_own_too() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare: apt-get install util-linux")
    text = Path(own_network.__file__).read_text(encoding="utf-8")
    nobody = 65534

    def drop() -> None:
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)

    probe = subprocess.run(
        ["unshare", "--user", "--net", "python3", "-c", ""],
        preexec_fn=drop,
        cwd="/",
        check=False,
        capture_output=True,
    )
    if probe.returncode:
        pytest.skip("users without rights may not make namespaces here, or run Python")
    listing = "import os, socket; print(os.getuid(), os.getgid(), socket.if_nameindex())"
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-IS", "-", "python3", "-c", listing],
        input=text,
        preexec_fn=drop,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{nobody} {nobody} [(1, 'lo')]\n"), done.stderr
