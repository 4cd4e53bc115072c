import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.expect import present, refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.spec.cluster import Pool
from tuner.spec.goal import Phase, Precision
from tuner.spec.spec import Spec, SpecFile
from tuner.spec.yaml_text import parse_documents, parse_yaml

MODELS = Path(__file__).parents[3] / "examples" / "models"

TEXT = """\
schema_version: 1
model: models/config.json
cluster:
  pools:
    - name: h200
      profile: profiles/h200-sxm
      nodes: 8
      devices_per_node: 8
      nic: 400Gbit/s
      price_per_device_hour: 3.5
      memory_per_device: 80GiB
    - name: b200
      device: b200
      devices_per_node: 4
  links:
    - {between: [h200, b200], bandwidth: 100Gbit/s, latency: 50us}
goal:
  kind: train
  sequence_length: 4096
  global_batch_size: 1024
  tokens: 1.0e12
  precision: bf16
  reliability: {device_mtbf: 50000h, restart: 10min}
search: {tensor_model_parallel_size: [1, 2], chunks: 4, recompute: full, zero_stage: [0, 1]}
emit: [megatron-lm, slurm]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    config = (MODELS / "tiny-moe" / "config.json").read_text()
    (tmp_path / "models" / "config.json").write_text(config)
    return tmp_path


def read_text(folder: Path, text: str | bytes) -> Spec:
    file = folder / "spec.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_spec(file)


def refusal(folder: Path, text: str | bytes) -> str:
    """Return the message without the path of the file."""
    with pytest.raises(SpecError) as error:
        read_text(folder, text)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{folder / 'spec.yaml'}: ")


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def test_reads_every_field_in_si_units_with_defaults_and_paths(folder: Path) -> None:
    spec = read_text(folder, TEXT)
    h200, b200 = spec.cluster.pools
    assert h200.nic == 50e9
    assert h200.memory_per_device == 80 * 2**30
    assert h200.num_devices == 64
    assert b200.nic is None
    assert spec.cluster.links[0].bandwidth == 12.5e9
    assert spec.cluster.links[0].latency == pytest.approx(50e-6)
    assert spec.num_devices == 68
    assert spec.goal.tokens == 1e12
    assert spec.goal.precision is Precision.BF16
    assert spec.goal.tokens_per_step == 4096 * 1024
    assert spec.goal.reliability is not None
    assert spec.goal.reliability.device_mtbf == 180e6
    assert spec.goal.reliability.restart == 600.0
    assert spec.search.tensor_model_parallel_size == (1, 2)
    assert spec.search.pipeline_model_parallel_size is None
    assert spec.search.chunks == (4,)
    assert spec.search.recompute == (Recompute.FULL,)
    assert spec.search.zero_stage == (0, 1)
    assert spec.emit == ("megatron-lm", "slurm")
    assert spec.model.hidden_size == 256
    pool = read_text(folder, TEXT).cluster.pools[1]
    assert (pool.nodes, pool.domain, pool.nics) == (1, 4, 4)
    assert (pool.oversubscription, pool.usable_memory_ratio) == (1.0, 0.95)
    assert spec.model_path == folder / "models" / "config.json"
    assert spec.cluster.pools[0].profile == folder / "profiles" / "h200-sxm"


def test_a_spec_without_optional_parts_is_complete(folder: Path) -> None:
    text = TEXT[: TEXT.index("search:")]
    for line in ("  tokens: 1.0e12\n", "  precision: bf16\n"):
        text = text.replace(line, "")
    spec = read_text(folder, text)
    assert spec.emit == ("reference",)
    assert spec.goal.tokens is None
    assert spec.routing is None
    assert set(spec.search.model_dump().values()) == {None}


def test_code_may_build_a_pool_from_si_numbers() -> None:
    pool = Pool(name="a", device="h100-sxm", devices_per_node=8, nic=50e9)
    assert pool.nic == 50e9
    assert Pool.model_validate_json(pool.model_dump_json()) == pool


def test_recorded_routing_is_loaded_and_held_against_the_model(folder: Path) -> None:
    record = {"num_logical_experts": 8, "layer_ids": [0, 2], "logical_count": [[1] * 8, [2] * 8]}
    (folder / "c4.json").write_text(json.dumps(record))
    text = changed("  precision: bf16\n", "  routing: {path: c4.json, phase: early}\n")
    spec = read_text(folder, text)
    assert present(spec.goal.routing).phase is Phase.EARLY
    assert present(spec.routing).load_ratios[0] == (0.125,) * 8

    (folder / "c4.json").write_text(json.dumps(record | {"layer_ids": [0, 9]}))
    assert "goal.routing.path: layer 9 is not a MoE layer of models" in refusal(folder, text)
    (folder / "c4.json").write_text(json.dumps(record | {"top_k": 8}))
    assert "recorded with top_k 8, but models has 2" in refusal(folder, text)
    wrong = record | {"num_logical_experts": 4, "logical_count": [[1] * 4, [2] * 4]}
    (folder / "c4.json").write_text(json.dumps(wrong))
    assert "recorded with 4 experts, but models has 8" in refusal(folder, text)
    (folder / "c4.json").unlink()
    assert "c4.json: No such file" in refusal(folder, text)


def test_a_dense_model_has_no_routing(folder: Path) -> None:
    record = {"num_logical_experts": 8, "layer_ids": [0], "logical_count": [[1] * 8]}
    (folder / "c4.json").write_text(json.dumps(record))
    dense = (MODELS / "llama-3.1-8b" / "config.json").read_text()
    (folder / "models" / "config.json").write_text(dense)
    text = changed("  precision: bf16\n", "  routing: {path: c4.json}\n")
    assert "goal.routing.path: models has no experts" in refusal(folder, text)


@each_row(
    ("old", "new", "said"),
    [
        (
            "global_batch",
            "globl_batch",
            "goal.globl_batch_size: unknown key; did you mean 'global_batch_size'?",
        ),
        ("pools:", "pool:", "cluster.pool: unknown key; did you mean 'pools'?"),
        ("goal:", "goals:", "goals: unknown key; did you mean 'goal'?"),
        (
            "tensor_model_par",
            "tensr_model_par",
            "search.tensr_model_parallel_size: unknown key;"
            " did you mean 'tensor_model_parallel_size'?",
        ),
        ("latency", "latecy", "cluster.links[0].latecy: unknown key; did you mean 'latency'?"),
        ("      nic:", "      colour:", "cluster.pools[0].colour: unknown key; known: name, "),
    ],
)
def test_an_unknown_key_is_answered_with_the_near_one(
    old: str, new: str, said: str, folder: Path
) -> None:
    assert refusal(folder, changed(old, new)).startswith(said)


@each_row(
    ("old", "new", "said"),
    [
        (
            "400Gbit/s",
            "400Gbt/s",
            "cluster.pools[0].nic: '400Gbt/s': unknown unit 'Gbt/s'; did you mean 'Gbit/s'?",
        ),
        (
            "10min",
            "10mn",
            "goal.reliability.restart: '10mn': unknown unit 'mn'; did you mean 'min'?",
        ),
        ("400Gbit/s", "400", "cluster.pools[0].nic: 400 has no unit; write it like '400Gbit/s'"),
        ("80GiB", "-80GiB", "cluster.pools[0].memory_per_device: '-80GiB' must not be negative"),
        ("80GiB", "0GiB", "cluster.pools[0].memory_per_device: 0 should be greater than 0"),
        ("nodes: 8", "nodes: 0", "cluster.pools[0].nodes: 0 should be greater than or equal to 1"),
        ("nodes: 8", "nodes: -1", "cluster.pools[0].nodes: -1 should be greater than or equal"),
        ("nodes: 8", "nodes: true", "cluster.pools[0].nodes: true is not a number"),
        ("nodes: 8", "nodes: '8'", "cluster.pools[0].nodes: '8' is text, not a whole number"),
        ("nodes: 8", "nodes: 1.5", "cluster.pools[0].nodes: 1.5 should be a valid integer"),
        ("nodes: 8", "nodes: [8]", "cluster.pools[0].nodes: a list of 1 should be a valid integer"),
        ("price_per_device_hour: 3.5", "usable_memory_ratio: 1.5", "cluster.pools[0].usable_mem"),
        ("price_per_device_hour: 3.5", "oversubscription: 0.5", "cluster.pools[0].oversubscrip"),
        ("price_per_device_hour: 3.5", "scale_up_domain: 72", "cluster.pools[0]: scale_up_domain"),
        (
            "price_per_device_hour: 3.5",
            "scale_up_domain: 3",
            "cluster.pools[0]: scale_up_domain 3 neither divides devices_per_node 8 nor is a"
            " multiple of it; the nearest legal value is 2",
        ),
        (
            "price_per_device_hour: 3.5",
            "scale_up_domain: 23",
            "cluster.pools[0]: scale_up_domain 23 neither divides devices_per_node 8 nor is a"
            " multiple of it; the nearest legal value is 24",
        ),
        ("      device: b200\n", "", "cluster.pools[1]: a pool needs 'profile' (measured) or"),
        ("name: b200", "name: h200", "cluster: two pools are named 'h200'"),
        ("[h200, b200]", "[h200, b300]", "cluster: links: no pool is named 'b300'"),
        ("[h200, b200]", "[h200, h200]", "cluster: links: 'h200' is linked to itself"),
        ("1.0e12", ".inf", "goal.tokens: inf should be a finite number"),
        ("1.0e12", ".nan", "goal.tokens: nan should be"),
        ("1.0e12", "-5", "goal.tokens: -5 should be greater than 0"),
        ("  sequence_length: 4096\n", "", "goal.sequence_length: missing"),
        ("bf16", "int8", "goal.precision: 'int8' should be 'bf16', 'fp32', 'fp8-delayed'"),
        ("kind: train", "kind: trian", "goal.kind: 'trian' is none of train, place, serve"),
        (
            "kind: train",
            "kind: serve",
            "goal.kind: 'serve' is a goal of `moetune plan`",
        ),
        ("kind: train", "kind: place", "goal.kind: 'place' is a goal of `moetune plan`"),
        ("[1, 2]", "[]", "search.tensor_model_parallel_size: an empty list; name at least one"),
        ("[1, 2]", "[0]", "search.tensor_model_parallel_size[0]: 0 should be greater than"),
        ("recompute: full", "recompute: ful", "search.recompute[0]: 'ful' should be 'none', "),
        ("[0, 1]", "[4]", "search.zero_stage[0]: 4 should be 0, 1, 2 or 3"),
        ("[0, 1]", "[true]", "search.zero_stage[0]: true is not a stage"),
        ("[megatron-lm, slurm]", "[]", "emit: an empty list"),
        ("[megatron-lm, slurm]", "{a: b}", "emit: a mapping of 1 where a list belongs"),
        ("schema_version: 1", "schema_version: 2", "schema_version: 2 should be 1"),
        ("models/config.json", "''", "model: the path is empty"),
        ("models/config.json", '"a\\0b"', "model: the path holds a null character"),
    ],
)
def test_a_bad_value_is_named_with_its_rule(old: str, new: str, said: str, folder: Path) -> None:
    assert refusal(folder, changed(old, new)).startswith(said)


def test_a_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    message = refusal(folder, changed("models/config.json", "no/such.json"))
    assert message == f"{folder / 'no/such.json'}: cannot read the model config: " + (
        "No such file or directory"
    )
    message = refusal(folder, changed("models/config.json", "~no_such_user/config.json"))
    assert message.startswith(f"{folder / '~no_such_user/config.json'}: cannot read")
    with pytest.raises(SpecError, match="cannot read the spec: No such file"):
        read_spec(tmp_path / "absent.yaml")


@each_row(
    ("content", "said"),
    [
        (b"", "nothing at the top"),
        (b"# only a comment\n", "nothing at the top"),
        (b"- 1\n- 2\n", "a list of 2 at the top"),
        (b"just words", "'just words' at the top"),
        (bytes(range(256)), "not UTF-8 text"),
        (b"a: \x00", "not valid YAML"),
        (b"a: [1, 2", "line 1: "),
        (b"a: !!python/object:os.system x", "line 1: the tag 'tag:yaml.org,2002:python/object"),
        (b"a: &x [1]\nb: [*x, *x]", "line 1: anchors and aliases are not allowed"),
        (b"a: *x", "line 1: anchors and aliases are not allowed"),
        (b"a: 1\nb: 2\na: 3", "line 3: the key 'a' appears twice; keep one"),
        (b"1: 2", "line 1: the key 1 is not text; quote it"),
        (b"[1]: 2", "line 1: the key a list of 1 is not text"),
        (b"--- {a: 1}\n--- {b: 2}", "line 2: "),
        (b"a: 2024-13-45", "not valid YAML: month must be in 1..12"),
        (b"[" * 100_000, "line 1: nested too deeply"),
        (b"- " * 100_000, "line 1: nested too deeply"),
        (b" " * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(content: bytes, said: str, folder: Path) -> None:
    assert refusal(folder, content).startswith(said)


def test_line_ends_marks_and_single_targets_change_nothing(folder: Path) -> None:
    plain = read_text(folder, TEXT)
    assert read_text(folder, TEXT.replace("\n", "\r\n")) == plain
    assert read_text(folder, "\ufeff" + TEXT) == plain
    assert read_text(folder, changed("[megatron-lm, slurm]", "slurm")).emit == ("slurm",)


def test_names_and_paths_may_hold_any_character(tmp_path: Path) -> None:
    folder = tmp_path / "a b'c $(d) ü"
    folder.mkdir()
    (folder / "modèle.json").write_text((MODELS / "tiny-moe" / "config.json").read_text())
    text = TEXT.replace("models/config.json", "modèle.json").replace("h200", "größte 池")
    spec = read_text(folder, text)
    assert spec.model.name == "modèle"
    assert spec.cluster.pools[0].name == "größte 池"


@given(position=st.integers(0, len(TEXT) - 1), noise=st.text(max_size=6))
@settings(deadline=None, max_examples=150)
def test_any_slip_of_the_keyboard_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, position: int, noise: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "slips"
    folder.mkdir(exist_ok=True)
    file = folder / "spec.yaml"
    slipped = TEXT[:position] + noise + TEXT[position + 1 :]
    file.write_bytes(slipped.replace("models/config.json", str(MODELS / "tiny-moe")).encode())
    try:
        read_spec(file)
    except SpecError as error:
        lines = str(error).splitlines()
    else:
        lines = ["read"]
    assert len(lines) == 1


def test_the_schema_describes_every_field_of_the_file() -> None:
    schema = SpecFile.model_json_schema()
    assert set(schema["required"]) == {"schema_version", "model", "cluster", "goal"}
    pool = schema["$defs"]["Pool"]["properties"]
    assert pool["nic"]["anyOf"][0]["examples"] == ["400Gbit/s"]
    assert all("description" in field for field in pool.values())


# YAML that is short to write and endless to hold.

NEITHER = {
    "a date": "a: 2024-13-45",
    "digits": f"a: {'9' * 5000}",
    "hexadecimal digits": f"a: 0x{'f' * 5000}",
    "base sixty": f"a: 1:{'59:' * 3000}59",
    "no digits": "a: 0x_",
    "no truth": 'a: !!bool "x"',
    "an object": "a: !!python/object/apply:os.system [id]",
    "depth": "[" * 50_000,
}
FOREIGN = {
    "many of many": f"a: &a [{','.join('1' * 20_000)}]\nb: [{','.join(['*a'] * 20_000)}]",
    "doubled": "a: &x0 [1, 1]\n"
    + "".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]\n" for n in range(1, 40)),
    "merged into itself": "a: &a\n  b: *a",
}


def test_what_no_machine_holds_or_prints_is_refused_in_a_line() -> None:
    begun_s = time.process_time()
    for cases, parsers in ((NEITHER, (parse_yaml, parse_documents)), (FOREIGN, (parse_documents,))):
        for text in cases.values():
            for parse in parsers:
                with refused(SpecError, match="file: "):
                    parse(text, source="file")
    assert time.process_time() - begun_s < 60.0


def test_files_of_others_may_have_aliases_and_several_documents() -> None:
    text = "a: &a {b: [1, 2]}\nc:\n  <<: *a\n  d: 1e3\n---\n- on\n"
    assert parse_documents(text, source="file") == [
        {"a": {"b": [1, 2]}, "c": {"b": [1, 2], "d": "1e3"}},
        [True],
    ]
    with pytest.raises(SpecError, match="another document"):
        parse_yaml("a: 1\n---\nb: 2\n", source="file")


# Documents of unequal length.

DOCUMENTS = (
    TEXT.replace("models/config.json", str(MODELS / "qwen3-30b-a3b"))
    .replace("emit: [megatron-lm, slurm]", "emit: [torchtitan]")
    .replace(
        "    - name: h200\n      profile: profiles/h200-sxm\n",
        "    - name: h200\n      device: h200-sxm\n",
    )
    .replace("  precision: bf16\n", "  precision: bf16\n  sequence_lengths: lengths.csv\n")
)


def test_a_batch_in_documents_or_tokens_becomes_rows(folder: Path) -> None:
    (folder / "lengths.csv").write_text("tokens,count\n100,600\n1000,400\n6000,2\n")
    # 460 tokens a document and 4,096 a row: 8.7 documents with those that continue.
    for stated, rows in (
        ("{rows: 123}", 123),
        ("77", 77),
        ("{tokens: 1000000}", 256),
        ("{documents: 5000}", 576),
        ("{documents: 5}", 1),
    ):
        text = DOCUMENTS.replace("global_batch_size: 1024", f"global_batch_size: {stated}")
        spec = read_text(folder, text)
        assert spec.goal.global_batch_size == rows, stated
        assert present(spec.documents).longest == 6000


def test_what_documents_cannot_be_is_refused_in_one_line(folder: Path) -> None:
    (folder / "lengths.csv").write_text("tokens\n100\n90000\n")
    batch, named = "global_batch_size: 1024", "sequence_lengths: lengths.csv"
    for change, words in (
        ((batch, "global_batch_size: {}"), "goal.global_batch_size: nothing is stated"),
        ((batch, "global_batch_size: {rows: 1, tokens: 5}"), "rows and tokens is stated"),
        ((batch, "global_batch_size: {documents: 0}"), "goal.global_batch_size.documents: "),
        ((batch, "global_batch_size: {tokens: 20}"), "20 is 0.00 of a row of 4,096 tokens"),
        ((named, "sequence_lengths: {kind: lognormal}"), "lognormal lengths need 'mean'"),
        ((named, "sequence_lengths: {path: gone.csv}"), "gone.csv: cannot be read"),
        ((named, "sequence_lengths: 5"), "goal.sequence_lengths: 5 where a mapping belongs"),
        (("sequence_length: 4096", "sequence_length: 65536"), "65,536 tokens are kept"),
    ):
        with refused(SpecError, words):
            read_text(folder, DOCUMENTS.replace(*change))
