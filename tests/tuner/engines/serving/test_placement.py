"""A planned placement reaches the instances that it was planned for."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import patient_s
from tests.rows import Failures
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tests.tuner.engines.serving.testing import aggregated, disaggregated, sample_serving
from tests.tuner.engines.testing import texts_of, write_emitted
from tuner.engines.serve_writers import SERVE_EMITTERS, emit_serving
from tuner.engines.serving.releases import ENGINES
from tuner.errors import UnsuitedPlacementError
from tuner.plans.place import MadeFor
from tuner.spec.model import ModelSpec

DEEPEP = "deepep"
ON_FOUR = {"devices": 4, "attention_dp": 4, "ep": 4}


PLACEMENT = sample_placement(sample_decision())
"""Six experts in eight slots on four ranks."""


def test_only_groups_with_its_ranks_take_it(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, disaggregated())
    files = texts_of(emit_serving("sglang", verified, placement=PLACEMENT))
    assert "--init-expert-location" in files["prefill.sh"]
    assert "--ep-num-redundant-experts 2" in files["prefill.sh"]
    assert "--init-expert-location" not in files["decode.sh"]
    assert len(json.loads(files["init_expert_location.json"])["physical_to_logical_map"]) == 4
    assert "run.sh" not in files


def test_sglang_chooses_replicas_as_its_all_to_all_allows(deepseek: ModelSpec) -> None:
    for backend, dispatch in (("none", "dynamic"), ("deepep_normal", "static")):
        verified = sample_serving(deepseek, aggregated(**ON_FOUR, a2a_backend=backend))
        files = texts_of(emit_serving("sglang", verified, placement=PLACEMENT))
        assert f"--ep-dispatch-algorithm {dispatch}" in files["aggregated.sh"]


def test_instances_that_differ_from_the_planned_ones_are_noted(deepseek: ModelSpec) -> None:
    planned = MadeFor(
        engine="sglang", release="0.5.23", nodes=1, ep_size=4, dispatch="static", a2a_backend=DEEPEP
    )
    without = planned.model_copy(update={"dispatch": "dynamic", "a2a_backend": "none"})
    on_vllm = MadeFor(engine="vllm", release="0.33.0", nodes=1, ep_size=4)
    cases: list[tuple[str, MadeFor, str, int, str]] = [
        # engine, planned for, backend and devices a node of the instances, what they run instead
        ("sglang", planned, "deepep_normal", 8, ""),
        ("sglang", planned, "none", 8, "1 node, EP 4, dispatch dynamic, all-to-all none"),
        (
            "sglang",
            planned,
            "deepep_normal",
            2,
            "2 nodes, EP 4, dispatch static, all-to-all deepep",
        ),
        ("sglang", without, "none", 8, ""),
        ("sglang", without, "deepep_normal", 8, "EP 4, dispatch dynamic, all-to-all deepep"),
        ("vllm", on_vllm, "none", 8, ""),
        ("vllm", on_vllm, "none", 2, "2 nodes, EP 4"),
    ]
    failed = []
    for engine, mark, backend, per_node, instead in cases:
        verified = sample_serving(
            deepseek,
            aggregated(**ON_FOUR, a2a_backend=backend),
            engine=engine,
            devices_per_node=per_node,
        )
        plan = PLACEMENT.plan.model_copy(update={"made_for": (mark,)})
        made = PLACEMENT.model_copy(update={"plan": plan})
        script = texts_of(emit_serving(engine, verified, placement=made))["aggregated.sh"]
        # Comments are wrapped, also at hyphens.
        header = "".join(script.split("set -euo")[0].replace("\n#", "").split())
        notes = (f"{mark.words}, and these instances run", instead)
        is_noted = all("".join(words.split()) in header for words in notes)
        is_planned = "".join(f"Experts are placed for {mark.words}: plan again".split()) in header
        rule = "static" if "static" in (instead or mark.dispatch) else "dynamic"
        if (is_noted, is_planned) != (bool(instead), not instead) or (
            engine == "sglang" and f"--ep-dispatch-algorithm {rule}" not in script
        ):
            failed.append((engine, backend, per_node, header))
    assert not failed


def test_every_emitter_says_where_a_placement_was_planned_for_something_else(
    deepseek: ModelSpec,
) -> None:
    planned = {
        "sglang": MadeFor(
            engine="sglang",
            release="0.5.23",
            nodes=1,
            ep_size=4,
            dispatch="static",
            a2a_backend=DEEPEP,
        ),
        "vllm": MadeFor(engine="vllm", release="0.33.0", nodes=1, ep_size=4),
        "trtllm": MadeFor(engine="trtllm", release="1.3.0rc27", nodes=1, ep_size=4),
    }
    failed, seen = [], set()
    for engine, mark in planned.items():
        backend = "deepep_normal" if engine == "sglang" else "none"
        other = planned["vllm" if engine != "vllm" else "trtllm"]
        changes: dict[str, tuple[MadeFor, ...]] = {
            "as planned": (mark,),
            "release": (mark.model_copy(update={"release": "0.0.1"}),),
            "nodes": (mark.model_copy(update={"nodes": 2}),),
            "EP": (mark.model_copy(update={"ep_size": 8}),),
            "engine": (other,),
        }
        if engine == "sglang":
            changes["backend"] = (
                mark.model_copy(update={"dispatch": "dynamic", "a2a_backend": "none"}),
            )
        verified = sample_serving(
            deepseek, aggregated(**ON_FOUR, a2a_backend=backend), engine=engine
        )
        targets = [name for name in SERVE_EMITTERS if name == engine or name not in ENGINES]
        for change, marks in changes.items():
            plan = PLACEMENT.plan.model_copy(update={"made_for": marks})
            made = PLACEMENT.model_copy(update={"plan": plan})
            for target in targets:
                seen.add(target)
                files = emit_serving(target, verified, placement=made)
                # Comments are wrapped, also at hyphens.
                texts = ["".join(file.text.replace("\n#", "").split()) for file in files]
                words = "".join(marks[0].words.split())
                is_refused = any(f"NOTASPLANNED:expertsareplacedfor{words}" in t for t in texts)
                is_planned = any(f"Expertsareplacedfor{words}:planagain" in t for t in texts)
                if (is_refused, is_planned) != (change != "as planned", change == "as planned"):
                    failed.append((engine, target, change))
    assert not failed
    assert seen == set(SERVE_EMITTERS)


def test_a_placement_that_suits_nobody_is_refused(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated())
    with pytest.raises(UnsuitedPlacementError, match=r"for 4 expert ranks.*have ep 8"):
        emit_serving("sglang", verified, placement=PLACEMENT)


def test_a_placement_that_the_plan_counts_on_is_not_forgotten(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated(**ON_FOUR), goal={"placement": "placed"})
    with pytest.raises(UnsuitedPlacementError, match=r"counts on .*placed; emit that placement"):
        emit_serving("sglang", verified)
    assert emit_serving("sglang", verified, placement=PLACEMENT)


def test_vllm_finds_the_plugin_by_its_entry_point(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    verified = sample_serving(deepseek, aggregated(**ON_FOUR), engine="vllm")
    write_emitted(launch, emit_serving("vllm", verified, placement=PLACEMENT))
    call = programs.called(str(launch / "aggregated.sh"), cwd=launch)
    config = json.loads(call["argv"][call["argv"].index("--eplb-config") + 1])
    assert config["num_redundant_experts"] == 2
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlib.metadata import entry_points\n"
            "(found,) = entry_points(group='vllm.general_plugins')\n"
            "print(found.load().__module__)",
        ],
        env={"PYTHONPATH": call["environment"]["PYTHONPATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=patient_s(60),
    )
    assert found.stdout.strip() == "moetune_placement"


def test_trtllm_names_the_balancer_in_its_options(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated(**ON_FOUR), engine="trtllm")
    files = texts_of(emit_serving("trtllm", verified, placement=PLACEMENT))
    name = Path(yaml.safe_load(files["aggregated.yaml"])["moe_config"]["load_balancer"]).name
    assert yaml.safe_load(files[name])["num_slots"] == 8
    assert "llm_api_options.yaml" not in files
    assert 'cd -- "$FILES"' in files["aggregated.sh"]


def test_pods_hold_the_files_of_a_placement(deepseek: ModelSpec) -> None:
    failures = Failures()
    for target, engine in product(("kubernetes", "dynamo"), ("sglang", "vllm", "trtllm")):
        verified = sample_serving(deepseek, aggregated(**ON_FOUR), engine=engine)
        objects = [
            each
            for file in emit_serving(target, verified, placement=PLACEMENT)
            for each in yaml.safe_load_all(file.text)
        ]
        with failures.of(target, engine):
            _assert_held(objects, target=target, engine=engine)
    failures.check()


def _assert_held(objects: list[Any], *, target: str, engine: str) -> None:
    (files,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    named = {
        "sglang": "init_expert_location.json",
        "vllm": "moetune_placement.py",
        "trtllm": "moe_load_balancer.yaml",
    }
    assert named[engine] in files
    if (target, engine) == ("dynamo", "vllm"):
        (graph,) = (each for each in objects if each["kind"] == "DynamoGraphDeployment")
        pod = graph["spec"]["components"][1]["podTemplate"]["spec"]
        (items,) = (each["configMap"]["items"] for each in pod["volumes"] if "configMap" in each)
        paths = {item["key"]: item["path"] for item in items}
        assert paths["entry_points.txt"] == "moetune_placement-1.dist-info/entry_points.txt"
        assert paths["moetune_placement.py"] == "moetune_placement.py"
        environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert environment["PYTHONPATH"] == "/moetune"
