"""A placement's spec: what is read, and what is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.store import read_recording
from profilers.routing.store import write_recording as write_stored
from tests.rows import each_row
from tuner.errors import SpecError, TunerError
from tuner.goals.place_spec import read_place_spec
from tuner.spec.kind import goal_kind

MODELS = Path(__file__).parents[3] / "examples" / "models"


def recording(
    path: Path, *, experts: int = 8, layers: tuple[int, ...] = (1, 2), top_k: int = 2
) -> None:
    counts = [[10 + expert for expert in range(experts)] for _ in layers]
    path.write_text(
        json.dumps(
            {
                "model": "tiny",
                "domain": path.stem,
                "num_logical_experts": experts,
                "top_k": top_k,
                "layer_ids": list(layers),
                "logical_count": counts,
            }
        )
    )


def spec_file(folder: Path, goal: str, *, emit: str = "[eplb]") -> Path:
    recording(folder / "chat.json")
    recording(folder / "code.json")
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        "goal:\n"
        "  kind: place\n"
        "  workloads: [{name: chat, path: chat.json}, {name: code, path: code.json}]\n"
        f"{goal}"
        f"emit: {emit}\n"
    )
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TunerError) as caught:
        read_place_spec(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_slots_come_from_redundant_experts(tmp_path: Path) -> None:
    spec = read_place_spec(spec_file(tmp_path, "  ranks: 4\n  redundant_experts: 4\n"))
    assert spec.ranks.slots_G.tolist() == [3, 3, 3, 3]
    assert spec.layer_ids == (1, 2)
    # Experts in order, then again from 0: what engines start with.
    assert spec.current.expert_LS[0].tolist() == [*range(8), *range(4)]


def test_ranks_may_hold_different_numbers_of_experts(tmp_path: Path) -> None:
    goal = "  ranks: 3\n  slots_per_rank: [2, 4, 2]\n  rank_speeds: [1, 2, 1]\n"
    spec = read_place_spec(spec_file(tmp_path, goal, emit="[]"))
    assert spec.ranks.slots_G.tolist() == [2, 4, 2]
    assert spec.ranks.speed_G.tolist() == [1.0, 2.0, 1.0]


def test_without_slots_every_expert_gets_one(tmp_path: Path) -> None:
    assert read_place_spec(spec_file(tmp_path, "  ranks: 4\n")).ranks.num_slots == 8
    # 8 experts on 3 ranks need 9 slots.
    assert read_place_spec(spec_file(tmp_path, "  ranks: 3\n")).ranks.num_slots == 9


def test_nodes_follow_ranks_per_node(tmp_path: Path) -> None:
    spec = read_place_spec(spec_file(tmp_path, "  ranks: 4\n  ranks_per_node: 2\n"))
    assert spec.ranks.node_G.tolist() == [0, 0, 1, 1]


def test_the_kind_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("goal: {kind: place, nonsense: 1}\n")
    assert goal_kind(path) == "place"
    path.write_text("[]\n")
    assert goal_kind(path) is None


@each_row(
    ("goal", "says"),
    [
        ("  ranks: 4\n  redundant_experts: 5\n", "the nearest legal: 4 and 8"),
        ("  ranks: 3\n  redundant_experts: 0\n", "the nearest legal: 1"),
        ("  ranks: 3\n  slots_per_rank: 2\n", "cannot hold 8 experts; 3 a rank can"),
        ("  ranks: 4\n  slots_per_rank: [2, 2]\n", "2 values for 4 ranks"),
        ("  ranks: 4\n  ranks_per_node: 3\n", "no multiple of ranks_per_node 3"),
        ("  ranks: 4\n  slots_per_rank: 2\n  redundant_experts: 0\n", "keep one"),
        ("  ranks: 4\n  objective: layer_time\n", "model: missing"),
        ("  ranks: 4\n  max_moved_experts: 3\n", "needs 'current'"),
        ("  ranks: 4\n  rank_speeds: [1, 1, -1, 1]\n", "rank_speeds"),
        ("  ranks: 0\n", "ranks"),
        ("  ranks: 4\n  method: [1]\n", "goal.method: a list of 1 should be 'auto'"),
        ("  ranks: 4\n  robst: mean\n", "did you mean 'robust'"),
        ("  ranks: 4\n  rank_speeds: [1, 1, 1.0e-300, 1]\n", "greater than or equal to 0.001"),
        ("  ranks: 4\n  slots_per_rank: 9\n", "more than 8 can only repeat what the rank holds"),
        ("  ranks: 4\n  expert_groups: 3\n", "8 experts do not divide into 3 groups"),
    ],
)
def test_an_impossible_goal_is_one_line(tmp_path: Path, goal: str, says: str) -> None:
    assert says in refusal(spec_file(tmp_path, goal))


@each_row(
    ("workload", "says"),
    [
        ("weight: 1.0e-300", "weight"),
        ("weight: 1.0e+308", "weight"),
        ('name: "a\\e[31m"', "cannot be printed"),
        ('name: "a\\nb"', "cannot be printed"),
    ],
)
def test_a_workload_that_can_be_neither_weighed_nor_printed_is_one_line(
    tmp_path: Path, workload: str, says: str
) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n")
    named = workload if "name" in workload else f"name: chat, {workload}"
    path.write_text(path.read_text().replace("name: chat", named, 1))
    assert says in refusal(path)


MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-moe"


def priced_file(folder: Path, goal: str, *, top_k: int = 2) -> Path:
    path = spec_file(folder, goal)
    recording(folder / "chat.json", top_k=top_k)
    pool = "{name: h, device: h100-sxm, nodes: 2, devices_per_node: 4}"
    head = f"schema_version: 1\nmodel: {MODEL}\ncluster: {{pools: [{pool}]}}\n"
    path.write_text(path.read_text().replace("schema_version: 1\n", head))
    return path


@each_row(
    ("goal", "says"),
    [
        (
            "  ranks: 16\n",
            "16 ranks, 4 a node, do not go on 2 nodes of 4 devices of pool 'h', the first, which"
            " has them; say 8 ",
        ),
        ("  ranks: 8\n  ranks_per_node: 2\n", "do not go on 2 nodes of 4 devices"),
        ("  ranks: 8\n  ranks_per_node: 8\n", "do not go on 2 nodes of 4 devices"),
        ("  ranks: 6\n", "say goal.ranks_per_node"),
        ("  ranks: 4\n", "how many tokens a pass has"),
        ("  ranks: 4\n  tokens_per_pass: 64\n  exchange: merged\n", "no sampled tokens"),
    ],
)
def test_what_cannot_be_priced_is_one_line(tmp_path: Path, goal: str, says: str) -> None:
    assert says in refusal(priced_file(tmp_path, goal))


def test_nodes_are_the_clusters_where_the_goal_names_none(tmp_path: Path) -> None:
    spec = read_place_spec(priced_file(tmp_path, "  ranks: 8\n  tokens_per_pass: 64\n"))
    assert spec.ranks.node_G.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert spec.goal.ranks_per_node == 4


def test_a_recording_of_another_model_is_refused(tmp_path: Path) -> None:
    goal = "  ranks: 4\n  tokens_per_pass: 64\n"
    assert "has 3 experts a token, tiny-moe has 2" in refusal(priced_file(tmp_path, goal, top_k=3))


def test_tokens_of_a_pass_need_the_experts_of_a_token(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n  tokens_per_pass: 64\n")
    values = json.loads((tmp_path / "chat.json").read_text())
    del values["top_k"]
    (tmp_path / "chat.json").write_text(json.dumps(values))
    assert "how many experts a token has" in refusal(path)


@each_row(
    ("goal", "emit", "says"),
    [
        ("  ranks: 4\n", "[slurm]", "'slurm' takes no placement"),
        ("  ranks: 3\n  slots_per_rank: [2, 4, 2]\n", "[eplb]", "every rank as many"),
        ("  ranks: 4\n  slots_per_rank: 3\n", "[megatron]", "one copy of an expert"),
    ],
)
def test_what_an_engine_cannot_take_is_refused_before_anything_is_solved(
    tmp_path: Path, goal: str, emit: str, says: str
) -> None:
    assert says in refusal(spec_file(tmp_path, goal, emit=emit))


def test_an_engine_that_counts_moe_layers_wants_all_of_them(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n", emit="[vllm]")
    model = Path(__file__).parents[3] / "examples" / "models" / "tiny-moe"
    path.write_text(f"model: {model}\n{path.read_text()}")
    assert "each of the 4 MoE layers" in refusal(path)


def test_a_layer_without_tokens_is_refused(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n")
    values = json.loads((tmp_path / "code.json").read_text())
    values["logical_count"][1] = [0] * 8
    (tmp_path / "code.json").write_text(json.dumps(values))
    with pytest.raises(Exception, match="layer"):
        read_place_spec(path)


@each_row("form", ["plan", "sglang", "ascend", "trtllm", "array", "list"])
def test_the_running_placement_is_read_in_every_form(tmp_path: Path, form: str) -> None:
    rows = [[7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4, 7, 6]]
    name = "current.json"
    if form == "plan":
        text = json.dumps({"decision": {"physical_to_logical": rows, "layer_ids": [1, 2]}})
    elif form == "sglang":
        # All decoder layers; the recorded ones are 1 and 2.
        text = json.dumps({"physical_to_logical_map": [list(range(8)), *rows]})
    elif form == "ascend":
        layers = [
            {
                "layer_id": layer,
                "device_count": 2,
                "device_list": [
                    {"device_id": 1, "device_expert": row[4:]},
                    {"device_id": 0, "device_expert": row[:4]},
                ],
            }
            for layer, row in enumerate(rows)
        ]
        text = json.dumps({"moe_layer_count": 2, "layer_list": layers})
    elif form == "trtllm":
        name = "current.yaml"
        text = f"num_slots: 8\ninitial_global_assignments:\n  1: {rows[0]}\n  2: {rows[1]}\n"
    else:
        text = json.dumps(rows)
    path = spec_file(tmp_path, f"  ranks: 4\n  current: {name}\n")
    if form == "array":
        np.save(tmp_path / "current.npy", np.array(rows))
        path = spec_file(tmp_path, "  ranks: 4\n  current: current.npy\n")
    else:
        (tmp_path / name).write_text(text)
    assert read_place_spec(path).current.expert_LS.tolist() == rows


@each_row(
    ("content", "says"),
    [
        (
            "[[0, 1, 2, 3, 4, 5, 6, 7]]",
            "layer 1 was recorded and is not placed",
        ),
        ("[[0, 1, 2, 3, 4, 5, 6, 6], [0, 1, 2, 3, 4, 5, 6, 7]]", "no expert 7"),
        (
            "[[0, 1, 2, 3, 4, 5, 6, 9], [0, 1, 2, 3, 4, 5, 6, 7]]",
            "table[0][7] is 9; it must be",
        ),
        ("[[0, 1, 2], [0, 1, 2]]", "3 slots, which the 4 ranks"),
        ("[[0, 1, 2, 3, 4, 5, 6, 7], [0, 1]]", "rows differ in length"),
        (
            '{"decision": {"layer_ids": [5], "physical_to_logical": [[0, 1, 2, 3, 4, 5, 6, 7]]}}',
            "layer 1 was recorded and is not placed there (1 layers are); name the placement of"
            " the model that was recorded",
        ),
        ('{"other": 1}', "no placement in it"),
        ('{"decision": {"tp": 1}}', "current.json: no placement in it; expected"),
        ('{"decision": {"layer_ids": [[0]], "physical_to_logical": [[0]]}}', "no placement in it"),
        ("[[true, true], [true, false]]", "holds bool values"),
        ("{", "cannot read the placement: Expecting property name"),
    ],
)
def test_a_damaged_running_placement_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n  current: current.json\n")
    (tmp_path / "current.json").write_text(content)
    assert says in refusal(path)


def test_a_pickled_array_is_not_loaded(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n  current: current.npy\n")
    np.save(tmp_path / "current.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SpecError, match="cannot read the placement"):
        read_place_spec(path)


def test_sglang_needs_a_model_only_where_recordings_do_not_cover_the_decoder(
    tmp_path: Path,
) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n", emit="[sglang]")
    assert "name `model` in the spec" in refusal(path)
    for name in ("chat", "code"):
        recording(tmp_path / f"{name}.json", layers=(0, 1, 2))
    assert read_place_spec(path).num_layers == 3
    # Layers 1 and 2 of a model of 5, as an importer of all decoder layers states it.
    for name in ("chat", "code"):
        recording(tmp_path / f"{name}.json", layers=(1, 2))
    one = read_recording(tmp_path / "chat.json")
    (tmp_path / "chat.json").unlink()
    write_stored(tmp_path / "chat.json", replace(one, num_decoder_layers=5))
    spec = read_place_spec(path)
    assert (spec.num_layers, spec.layer_ids) == (5, (1, 2))
    (tmp_path / "code.json").unlink()
    write_stored(tmp_path / "code.json", replace(one, num_decoder_layers=6))
    assert "'code' has 6 decoder layers, 'chat' has 5" in refusal(path)


def test_recordings_of_other_models_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "  ranks: 4\n")
    head = f"model: {MODELS / 'deepseek-v2-lite'}\n"
    wrong: list[tuple[str, str]] = []

    def expect(text: str, *lines: str) -> None:
        line = refusal(path)
        wrong.extend((line, text) for text in (text, *lines) if text not in line)

    recording(tmp_path / "code.json", top_k=3)
    expect("'code' has 3 experts a token, 'chat' has 2; workloads of one plan must be of one model")
    recording(tmp_path / "code.json", experts=9)
    expect("'code' has 9 experts, 'chat' has 8")
    recording(tmp_path / "code.json", layers=(1, 3))
    expect("'code' has layers 1, 3, 'chat' has 1, 2; layer 2 is in one of them only")
    # As many from the same first to the same last.
    recording(tmp_path / "chat.json", layers=(1, 2, 3, 4, 5, 6, 8))
    recording(tmp_path / "code.json", layers=(1, 2, 3, 4, 5, 7, 8))
    expect("layer 6 is in one of them only")
    path.write_text(path.read_text().replace("goal:", f"{head}goal:", 1))
    for name in ("chat", "code"):
        recording(tmp_path / f"{name}.json")
    expect("has 64 experts a layer, the recordings have 8; name the model that was recorded")
    for name in ("chat", "code"):
        recording(tmp_path / f"{name}.json", experts=64, top_k=6, layers=(1, 27))
    expect("has 27 layers, layer 27 was recorded; name the model that was recorded")
    # DeepSeek-V2-Lite begins with a dense layer.
    for name in ("chat", "code"):
        recording(tmp_path / f"{name}.json", experts=64, top_k=6, layers=(0, 1))
    expect("layer 0 was recorded, which has no experts in deepseek-v2-lite", "--layer-ids")
    assert not wrong


def test_rules_that_an_engine_lacks_are_one_line_with_those_it_has(tmp_path: Path) -> None:
    recording(tmp_path / "chat.json", top_k=2)
    cases = (
        # emit, device, further lines of the goal, what is said
        ("vllm", "", "dispatch: lp", "vllm has no rule 'lp'; it runs dynamic, even"),
        ("trtllm", "", "dispatch: static", "trtllm has no rule 'static'; it runs dynamic, even"),
        ("sglang", "", "dispatch: random", "'random' should be 'even', 'static', 'dynamic', 'lp'"),
        (
            "sglang",
            "",
            "dispatch: static, a2a_backend: none",
            "not with goal.a2a_backend none; say deepep, or dispatch dynamic",
        ),
        ("sglang", "mi300x", "dispatch: lp", "on Blackwell or Hopper devices, not on mi300x; say"),
        ("sglang", "a100-80gb-sxm", "dispatch: lp", "Hopper devices, not on a100-80gb-sxm; say"),
        ("sglang", "", "dispatch: activated", "'activated' is read no more"),
        ("sglang", "", "dispatch: least_loaded", "is in no release of sglang; set emit: []"),
        ("sglang", "", "a2a_backend: nvlink", "has no 'nvlink'; it has deepep, none, mooncake"),
    )
    wrong = []
    for emit, device, goal, says in cases:
        pools = f"[{{name: p, device: {device}, nodes: 1, devices_per_node: 4}}]"
        path = tmp_path / "spec.yaml"
        path.write_text(
            "schema_version: 1\n"
            + (f"cluster: {{pools: {pools}}}\n" if device else "")
            + f"goal: {{kind: place, ranks: 4, slots_per_rank: 3, {goal},"
            " workloads: [{name: chat, path: chat.json}]}\n"
            f"emit: [{emit}]\n"
        )
        said = refusal(path)
        if says not in said or "\n" in said or "spec.yaml: goal." not in said:
            wrong.append((emit, goal, said))
    assert not wrong
