"""Every shipped model on every target: planned, or refused in one line that names the rule."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient_s
from tests.rows import each_row
from tuner.api import refuse_unpriced, wanted_sizes
from tuner.engines.targets import TARGETS
from tuner.errors import SpecError
from tuner.goals.train_plan import plan_training, refuse_unlaunchable
from tuner.goals.train_spec import read_spec

ROOT = Path(__file__).parents[2]
MODELS = sorted(folder.parent.name for folder in (ROOT / "examples/models").glob("*/config.json"))

SPEC = """\
schema_version: 1
model: {model}
cluster: {{pools: [{{name: p, profile: nowhere, devices_per_node: {devices}, nodes: {nodes}}}]}}
goal: {{kind: train, sequence_length: {sequence}, global_batch_size: 8, precision: {precision}}}
emit: [{target}]
"""


def _spec(folder: Path, **changes: object) -> Path:
    fields: dict[str, object] = {
        "model": ROOT / "examples/models/tiny-moe/config.json",
        "devices": 2,
        "nodes": 1,
        "sequence": 64,
        "precision": "bf16",
        "target": "reference",
    }
    path = folder / "spec.yaml"
    path.write_text(SPEC.format(**fields | changes), encoding="utf-8")
    return path


@each_row("target", sorted(TARGETS))
@each_row("model", MODELS)
def test_a_model_is_planned_for_a_target_or_refused_by_name(
    tmp_path: Path, model: str, target: str
) -> None:
    config = ROOT / "examples/models" / model / "config.json"
    spec = read_spec(_spec(tmp_path, model=config, target=target))
    said = ""
    try:
        refuse_unpriced(spec)
    except SpecError as refusal:
        said = str(refusal)
    assert "\n" not in said
    assert not said or spec.model.architecture in said


def test_a_precision_that_a_target_lacks_is_refused(tmp_path: Path) -> None:
    spec = read_spec(_spec(tmp_path, precision="fp32", target="reference, megatron-lm"))
    with pytest.raises(SpecError, match="megatron-lm has no precision 'fp32'; it has bf16"):
        refuse_unpriced(spec)


def test_a_model_that_one_target_lacks_is_refused_with_those_that_can(tmp_path: Path) -> None:
    spec = read_spec(_spec(tmp_path, model=ROOT / "examples/models/qwen3-30b-a3b/config.json"))
    with pytest.raises(SpecError, match=r"reference cannot build .*targets that can: megatron-lm"):
        refuse_unpriced(spec)


@each_row(
    ("name", "reason"),
    (
        ("deepseek-v3.2", "attention over all pairs"),
        ("glm-5", "attention over all pairs"),
        ("gpt-oss-20b", "no fused kernel"),
    ),
)
def test_a_model_that_is_not_planned_is_refused_with_the_reason(
    tmp_path: Path, name: str, reason: str
) -> None:
    config = ROOT / f"examples/models/{name}/config.json"
    spec = read_spec(_spec(tmp_path, model=config, target="transformers-peft"))
    with pytest.raises(SpecError, match=f"is not planned for .*: .*{reason}.*; targets") as one:
        refuse_unlaunchable(spec)
    assert "cannot build" not in str(one.value)


def test_absurd_counts_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nodes"):
        read_spec(_spec(tmp_path, nodes=10**9))


def test_an_absurdly_long_sequence_is_infeasible_and_no_crash(
    tmp_path: Path, profile_for: Callable[[Path], object], store_profile: Callable[..., Path]
) -> None:
    from tuner.api import plan

    profile = store_profile(tmp_path / "profile", profile_for(_spec(tmp_path)))
    spec = _spec(tmp_path, sequence=2**27)
    with spec.open("a", encoding="utf-8") as file:
        file.write("search: {micro_batch_size: 1, zero_stage: 1, recompute: full}\n")
    made = plan(spec, profiles=(profile,), time_limit_s=5.0).plan
    assert made.certificate.status == "infeasible"
    assert made.relaxations[0].limit == "memory_per_device"


def test_the_copies_of_the_spec_that_the_quickstart_makes_can_be_read() -> None:
    script = (ROOT / "examples/quickstart.sh").read_text(encoding="utf-8")
    start = script.index('  sed "${CHANGES')
    command = script[start : script.index('> "$OUT/spec.yaml"', start)]
    for_gpus, emulated = re.findall(r"CHANGES=\(-e.*\)", script)
    for changes, lines in (
        (for_gpus, ("devices_per_node: 1\n", "precision: bf16\n")),
        (emulated, ("devices_per_node: 2 ", "precision: fp32\n", "emit: [reference]\n")),
    ):
        copied = subprocess.run(
            ["bash", "-c", f"{changes}\n{command}"],
            cwd=ROOT,
            env=os.environ | {"GPUS": "1", "SPEC": "examples/quickstart/spec.yaml"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        # It is read from a folder beside examples/.
        for line in (*lines, "model: ../examples/", "path: ../examples/", "profile: profile\n"):
            assert line in copied


def test_being_terminated_is_an_exception_so_that_everything_is_cleaned_up() -> None:
    code = (
        "import os, signal, sys\n"
        "from tuner.cli import app, doctor\n"
        "def command():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "app.app.command('wait')(command)\n"
        "sys.exit(app.run(['wait']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient_s(60),
        check=False,
    )
    assert ended.stdout == "cleaned up\n"
    assert ended.returncode == 128 + signal.SIGTERM


def test_cases_of_a_refused_spec_are_not_listed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="megatron-lm"):
        wanted_sizes(_spec(tmp_path, precision="fp32", target="megatron-lm"))


def test_adapters_beside_weights_that_a_profile_does_not_price_are_refused(tmp_path: Path) -> None:
    tuned = "bf16, tune: {method: lora, rank: 8}"
    for target in ("torchtitan", "reference, torchtitan"):
        spec = read_spec(_spec(tmp_path, precision=tuned, target=target))
        with pytest.raises(SpecError, match=r"goal.tune: torchtitan keeps frozen .*'device'"):
            refuse_unpriced(spec)
    for target, precision in (("torchtitan", "bf16"), ("reference", tuned), ("deepspeed", tuned)):
        refuse_unpriced(read_spec(_spec(tmp_path, precision=precision, target=target)))


MODELS_FOLDER = ROOT / "examples" / "models"
UNLAUNCHABLE_SPEC = """\
schema_version: 1
model: {models}/mixtral-8x7b/config.json
cluster: {{pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]}}
goal: {{kind: train, sequence_length: 4096, global_batch_size: 128, precision: bf16}}
search: {{context_parallel_size: 1, micro_batch_size: 1}}
emit: [deepspeed]
"""


def test_nothing_but_what_the_targets_lack_depends_on_asking_for_it(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(UNLAUNCHABLE_SPEC.format(models=MODELS_FOLDER), encoding="utf-8")

    def planned(*, with_unlaunchable: bool) -> dict[str, Any]:
        made = plan_training(file, with_unlaunchable=with_unlaunchable).plan.model_dump(mode="json")
        made["certificate"].pop("solve_s")
        return made

    asked, unasked = planned(with_unlaunchable=True), planned(with_unlaunchable=False)
    assert asked.pop("unlaunchable")
    assert unasked.pop("unlaunchable") == []
    assert asked == unasked
