"""What every target of a deployment must do, and who is refused."""

import re
import subprocess
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import patient_s
from tests.rows import Failures
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    dynamo_graph,
    sample_instances,
    sample_serving,
)
from tests.tuner.engines.testing import assert_golden, texts_of, write_emitted
from tuner.config.serve import Role, ServeDecision
from tuner.engines.serve_writers import (
    SERVE_EMITTERS,
    emit_all_serving,
    emit_serving,
    unlaunchable,
)
from tuner.engines.serving.releases import ENGINES
from tuner.engines.serving.shape import pool_labels
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

GOLDEN = Path(__file__).parent / "golden"

GOLDEN_FILES = {
    "sglang": ("sglang", ("decode.sh", "router.sh", "bench_vllm.sh", "bench_aiperf.sh")),
    "vllm": ("vllm", ("decode.sh",)),
    "trtllm": ("trtllm", ("decode.sh", "decode.yaml", "router.sh")),
    "local": ("sglang", ("local.sh",)),
    "slurm": ("sglang", ("job.sbatch", "instance.sh")),
    "kubernetes": ("sglang", ("deployment.yaml",)),
    "dynamo": ("vllm", ("graph.yaml",)),
}
"""By target: the engine that it starts here, and the files that are kept."""

HOSTILE = (
    "plain name",
    'it\'s "quoted"',
    "$(touch injected)",
    "`touch injected`",
    "line\ntouch injected\n#SBATCH --nodes=99",
    "carriage\rtouch injected",
    "separator\u2028touch injected",
    "'; touch injected; '",
    "a: b # c",
    "\x1b[2J",
)


def _low_latency() -> ServeDecision:
    return disaggregated(decode={"a2a_backend": "deepep_low_latency"})


def _of(target: str, model: ModelSpec, **changes: Any) -> VerifiedServing:
    engine = target if target in ENGINES else "sglang"
    return sample_serving(model, _low_latency(), engine=engine, emit=(target,), **changes)


def test_emitted_files_equal_the_golden_ones(deepseek: ModelSpec, failures: Failures) -> None:
    for target in SERVE_EMITTERS:
        engine, names = GOLDEN_FILES[target]
        # One instance of two machines is short and still a LeaderWorkerSet.
        wide = aggregated(count=1, devices=16, attention_dp=16, ep=16)
        decision = wide if target == "kubernetes" else _low_latency()
        verified = sample_serving(deepseek, decision, engine=engine, emit=(target,))
        files = texts_of(emit_serving(target, verified))
        for name in names:
            path = GOLDEN / target / name
            with failures.of(path):
                assert_golden(files[name], path)


def test_every_file_says_what_is_expected_and_whether_anything_was_measured(
    deepseek: ModelSpec, failures: Failures
) -> None:
    for target in SERVE_EMITTERS:
        verified = _of(target, deepseek, waived="moetune plan does not launch")
        for file in emit_serving(target, verified):
            with failures.of(target, file.path):
                assert "NOT VERIFIED: moetune plan does not launch" in file.text
                is_beside = file.path.name == "instance.sh"  # of job.sbatch, which says it
                assert ("Expected TTFT: mean 500 ms" in file.text) is not is_beside
        measured = emit_serving(target, _of(target, deepseek))
        with failures.of(target):
            assert not any("NOT VERIFIED" in file.text for file in measured)
            assert measured == emit_serving(target, _of(target, deepseek))


ALL_HOSTILE = " ".join(HOSTILE)


@pytest.mark.parametrize(
    "points",
    [
        [(target, ALL_HOSTILE) for target in SERVE_EMITTERS]
        + list(zip(cycle(SERVE_EMITTERS), HOSTILE, strict=False)),
        pytest.param(list(product(SERVE_EMITTERS, HOSTILE)), marks=pytest.mark.slow),
    ],
    ids=["together", "grid"],
)
def test_hostile_names_come_out_harmless(
    points: list[tuple[str, str]], deepseek: ModelSpec, launch: Path, failures: Failures
) -> None:
    for number, (target, hostile) in enumerate(points):
        model = deepseek.model_copy(update={"name": hostile})
        decision = disaggregated(
            prefill={"pool": hostile},
            decode={"a2a_backend": "deepep_low_latency"},
            from_pool=hostile,
        )
        verified = sample_serving(
            model,
            decision,
            engine=target if target in ENGINES else "sglang",
            emit=(target,),
            waived=hostile,
        )
        folder = launch / str(number)
        write_emitted(folder, emit_all_serving(verified))
        with failures.of(target, hostile):
            _assert_harmless(folder)
            if target in ("kubernetes", "dynamo"):
                objects = _documents(folder / target)
                names = [each["metadata"]["name"] for each in objects]
                assert all(name == name.lower() and len(name) <= 63 for name in names)
                assert hostile.replace("$", "$$") in _values(objects)


def _assert_harmless(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        text = path.read_text() if path.is_file() else ""
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True, timeout=patient_s(60))
            # Comments apart, nothing of the name is left but a label.
            body = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
            assert "injected" not in body
            directives = re.findall(r"^#SBATCH (--nodes=\S+)", text, flags=re.MULTILINE)
            assert directives in ([], ["--nodes=2"])
        if path.suffix == ".yaml":
            assert list(yaml.safe_load_all(text))


def test_pools_with_similar_names_keep_separate_machines(deepseek: ModelSpec) -> None:
    decision = disaggregated(prefill={"pool": "Old H100"}, decode={"pool": "old-h100"})
    verified = sample_serving(deepseek, decision)
    assert pool_labels(verified) == {"Old H100": "old-h100", "old-h100": "old-h100-2"}
    _, graph = dynamo_graph(verified)
    selected = [
        component["podTemplate"]["spec"].get("nodeSelector")
        for component in graph["spec"]["components"]
    ]
    assert selected == [None, {"moetune/pool": "old-h100"}, {"moetune/pool": "old-h100-2"}]


def _documents(folder: Path) -> list[dict[str, Any]]:
    return [
        each
        for path in sorted(folder.glob("*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
    ]


def _values(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [value for each in tree.values() for value in _values(each)]
    if isinstance(tree, list):
        return [value for each in tree for value in _values(each)]
    return [tree]


def test_a_launcher_brings_the_scripts_that_it_starts(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated(), engine="vllm", emit=("slurm",))
    assert list(emit_all_serving(verified)) == ["vllm", "slurm"]
    only = sample_serving(deepseek, aggregated(), engine="vllm", emit=("kubernetes",))
    assert list(emit_all_serving(only)) == ["kubernetes"]


def test_targets_and_releases_that_are_not_the_plans_are_refused(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated(), emit=("docker",))
    with pytest.raises(
        UnknownTargetError, match=r"'docker' is no serving target.*sglang.*kubernetes"
    ):
        emit_all_serving(verified)
    verified = sample_serving(deepseek, aggregated(), engine="sglang", emit=("vllm",))
    with pytest.raises(UnknownTargetError, match="for sglang, not vllm"):
        emit_all_serving(verified)
    goal = {"engine": {"name": "vllm", "version": "0.1"}}
    verified = sample_serving(deepseek, aggregated(), emit=("vllm",), goal=goal)
    with pytest.raises(UnknownTargetError, match=r"no vllm '0.1' is described; there is 0.33.0"):
        emit_all_serving(verified)


def test_no_release_without_a_plugin_has_afd(deepseek: ModelSpec) -> None:
    groups = tuple(sample_instances(role) for role in (Role.ATTENTION, Role.EXPERT))
    decision = ServeDecision(mode="attention_expert", instances=groups)
    for target in SERVE_EMITTERS:
        engine = target if target in ENGINES else "sglang"
        verified = sample_serving(deepseek, decision, engine=engine, emit=(target,))
        assert any("mode attention_expert is not one of" in line for line in unlaunchable(verified))
        with pytest.raises(ValueError, match="mode attention_expert"):
            emit_serving(target, verified)


def test_groups_of_one_role_have_names_of_their_own(deepseek: ModelSpec) -> None:
    first, second = disaggregated().instances
    decision = disaggregated().model_copy(
        update={
            "instances": (
                first,
                second,
                second.model_copy(update={"pool": "H 20!"}),
                second.model_copy(update={"max_batch": 32}),
            )
        }
    )
    verified = sample_serving(deepseek, decision)
    scripts = {str(file.path) for file in emit_serving("sglang", verified)}
    assert {"prefill.sh", "decode-h100.sh", "decode-h-20.sh", "decode-h100-2.sh"} < scripts
