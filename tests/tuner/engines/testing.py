"""For tests of emitters: a plan to emit, and programs on PATH that only write down their calls."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from profilers.steps.config import Recompute
from tests.patience import patient_s
from tuner.config.train import TrainDecision
from tuner.engines.files import EmittedFile
from tuner.plans.train import (
    Certificate,
    Plan,
    Provenance,
    Space,
    StagePrediction,
    TrainPrediction,
    TrialSummary,
    VerifiedPlan,
)
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec

UPDATE: Final = "MOETUNE_UPDATE_GOLDEN"
"""Set it to rewrite the golden files, then read the difference before it is committed."""

RecordT = TypeVar("RecordT", bound=BaseModel)

_RECORDER = """\
#!{python} -SE
import json, os, pathlib, subprocess, sys
program = pathlib.Path(sys.argv[0]).name
call = dict(program=program, argv=sys.argv[1:], environment=dict(os.environ))
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
if program == "scontrol" and sys.argv[1:3] == ["show", "job"]:
    print("JobId=7 JobName=it\\n   Command=" + os.environ.get("JOB_COMMAND", "(null)"))
elif program == "scontrol":
    print("first-node\\nsecond-node")
if program == "srun":
    raise SystemExit(subprocess.run(sys.argv[sys.argv.index("bash") :]).returncode)
"""
_RECORDED = ("torchrun", "python", "srun", "scontrol")


def sample_decision(**changes: Any) -> TrainDecision:
    """Return two stages of 16 layers, DP 8 and EP 8, on 16 devices, except for the changes."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 8,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "expert_data_parallel_size": 1,
        "sequence_parallel": False,
        "micro_batch_size": 1,
        "zero_stage": 1,
        "recompute": Recompute.SELECTIVE,
        "recompute_modules": ("moe",),
        "stage_recompute": (Recompute.SELECTIVE, Recompute.SELECTIVE),
        "chunks": (4, 4),
        "pipeline_layout": (16, 16),
    }
    return TrainDecision.model_validate(fields | changes)


def sample_verified(
    model: ModelSpec,
    decision: TrainDecision,
    *,
    emit: tuple[str, ...] = ("reference",),
    devices_per_node: int = 8,
    device_kind: str = "cuda",
    waived: str = "",
    sequence_length: int = 4096,
) -> VerifiedPlan:
    """Return a plan of round numbers for the decision, measured once unless it is waived."""
    pool = Pool(name="pool", device="h100", nodes=64, devices_per_node=devices_per_node)
    plan = Plan(
        model=model,
        cluster=Cluster(pools=(pool,)),
        goal=TrainGoal(kind="train", sequence_length=sequence_length, global_batch_size=1536),
        emit=emit,
        decision=decision,
        predicted=_prediction(decision),
        certificate=Certificate(
            status="optimal",
            objective=2.0,
            bound=2.0,
            gap_ratio=0.0,
            space=Space(priced=1, bounded=0, illegal=0),
            within_band=0,
            solve_s=0.1,
            method="milp",
        ),
        binding_constraint="compute",
        alternatives=(),
        provenance=Provenance.model_validate(
            {
                "moetune_version": "0.1.0",
                "spec_sha256": "0" * 64,
                "profile_sha256": {},
                "profile_source": {"pool": "measured"},
                "device_kind": {"pool": device_kind},
                "extrapolated": (),
            }
        ),
    )
    if waived:
        return VerifiedPlan.waive(plan, reason=waived)
    trial = TrialSummary(decision=decision, status="ok", predicted_step_s=2.0, measured_step_s=2.1)
    return VerifiedPlan(
        plan=plan, decision=decision, predicted=_prediction(decision), trials=(trial,)
    )


def changed(record: RecordT, changes: Mapping[str, Any]) -> RecordT:
    """Return a copy of a record with other values at dotted paths, as `plan.goal.tune`."""
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        own = changed(getattr(record, name), {inner: value}) if inner else value
        record = record.model_copy(update={name: own})
    return record


def values_at(tree: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Return what lies at dotted paths of mappings, None where nothing does."""
    found = dict.fromkeys(paths, tree)
    for path in found:
        for name in path.split("."):
            found[path] = (found[path] or {}).get(name)
    return found


def texts_of(files: Iterable[EmittedFile]) -> dict[str, str]:
    """Return the texts of emitted files by their paths."""
    return {str(file.path): file.text for file in files}


def directives_of(text: str) -> dict[str, str]:
    """Return the options that a batch script asks Slurm for, without those that have no value."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", text, flags=re.MULTILINE))


def assert_golden(text: str, path: Path) -> None:
    """Compare with a golden file, or rewrite it where that is asked for."""
    if UPDATE in os.environ:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"set {UPDATE}=1 to accept {path}"


def write_emitted(
    folder: Path, files: Iterable[EmittedFile] | Mapping[str, Iterable[EmittedFile]]
) -> None:
    """Write the files of one target into a folder, those of several into one folder each."""
    targets = files if isinstance(files, Mapping) else {"": files}
    for path, file in (
        (folder / name / one.path, one) for name, of in targets.items() for one in of
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = file.content
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o755 if file.executable else 0o644)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a script did."""

    code: int
    stderr: str
    calls: tuple[dict[str, Any], ...]
    """In order: `program`, `argv` without the program itself, and `environment`."""

    def only(self, program: str) -> list[str]:
        """Return the arguments of the only call of the program."""
        (argv,) = [call["argv"] for call in self.calls if call["program"] == program]
        return [str(word) for word in argv]


class Recorders:
    """A folder of programs that write down their calls; srun also starts what it is given.

    `python` is what starts the ranks of the reference step where they are on one node.
    """

    def __init__(self, folder: Path) -> None:
        self._programs = folder / "programs"
        self._log = folder / "calls.jsonl"
        self._programs.mkdir(parents=True)
        for name in _RECORDED:
            path = self._programs / name
            path.write_text(_RECORDER.format(python=sys.executable, log=str(self._log)))
            path.chmod(0o755)

    def run(self, script: Path, *arguments: str, cwd: Path, **environment: str) -> Ran:
        """Run a bash script in `cwd`, where only its programs can be reached by surprise."""
        bash = shutil.which("bash")
        if bash is None:
            raise FileNotFoundError("bash")
        self._log.unlink(missing_ok=True)
        done = subprocess.run(
            [bash, str(script), *arguments],
            cwd=cwd,
            env={"PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=patient_s(60),
        )
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return Ran(
            code=done.returncode,
            stderr=done.stderr,
            calls=tuple(json.loads(line) for line in lines),
        )

    def start(self, script: Path, *arguments: str, cwd: Path, **environment: str) -> Ran:
        """Run a script that must succeed."""
        ran = self.run(script, *arguments, cwd=cwd, **environment)
        assert ran.code == 0, ran.stderr
        return ran


def _prediction(decision: TrainDecision) -> TrainPrediction:
    size_bytes = 15 * 2**30
    ranks = decision.pipeline_model_parallel_size
    stage = StagePrediction(
        layers=1,
        forward_s=0.1,
        backward_s=0.2,
        parameter_bytes=size_bytes,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
        other_bytes=0,
        max_chunk_tokens=30_000,
    )
    return TrainPrediction(
        step_time_s=2.0,
        step_time_s_band=(1.8, 2.2),
        tokens_per_s_per_device=4096.0,
        tokens_per_s_per_device_band=(3700.0, 4500.0),
        peak_memory_bytes=(size_bytes,) * ranks,
        peak_memory_bytes_band=((0.9 * size_bytes, 1.1 * size_bytes),) * ranks,
        activation_bytes=(2**30,) * ranks,
        breakdown_s={"compute": 2.0},
        communication_s=0.5,
        stages=(stage,) * decision.num_stages,
    )
