"""An emitted script of one node under the real torchrun: what listens where, and what is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s
from tests.tuner.engines.testing import sample_decision, sample_verified, write_emitted
from tests.tuner.models import example_model
from tuner.engines.writers import emit

MIXTRAL = example_model("mixtral-8x7b")

PROGRAM = """
import json, os, psutil, torch.distributed as dist
from tests.sockets import reachable_at
dist.init_process_group("gloo")
dist.barrier()
me = psutil.Process()
listening = {
    name: sorted(reachable_at(process))
    for name, process in (("rank", me), ("torchrun", me.parent()))
}
if dist.get_rank() == 0:
    with open(os.environ["SEEN"], "w") as file:
        json.dump(listening | {"meets": os.environ["MASTER_ADDR"]}, file)
dist.barrier()
dist.destroy_process_group()
"""


# Worth its seconds: every other test has a stand-in for torchrun.
@pytest.mark.slow
def test_one_node_meets_on_loopback_as_far_as_torchrun_goes_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    decision = sample_decision(
        pipeline_model_parallel_size=1,
        data_parallel_size=2,
        expert_model_parallel_size=2,
        stage_recompute=("none",),
        recompute="none",
        recompute_modules=(),
        chunks=(1,),
        pipeline_layout=(32,),
    )
    folder, scratch, caller = tmp_path / "a launch", tmp_path / "tmp", tmp_path / "called from"
    caller.mkdir()
    scratch.mkdir()
    verified = sample_verified(MIXTRAL, decision, emit=("deepspeed",))
    write_emitted(folder, emit("deepspeed", verified))
    program, seen = tmp_path / "program.py", tmp_path / "seen.json"
    program.write_text(PROGRAM, encoding="utf-8")
    left_out = {"MASTER_ADDR", "MASTER_PORT"}
    done = subprocess.run(
        ["bash", str(folder / "run.sh")],
        cwd=caller,
        env={name: value for name, value in os.environ.items() if name not in left_out}
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # As a login script exports them for jobs of several nodes.
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "TRAIN": str(program),
            "SEEN": str(seen),
            "TMPDIR": str(scratch),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=patient_s(200),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(seen.read_text(encoding="utf-8"))
    assert found["rank"] == ["127.0.0.1"]
    assert found["meets"] == "127.0.0.1"
    # Should this change, the script can promise more than it does
    # (tuner/engines/launchers/torchrun.py).
    assert found["torchrun"] in (["::"], ["0.0.0.0"])
    assert [file for file in scratch.iterdir() if "torchinductor" not in file.name] == []
    assert (caller / "torchrun").is_dir()
