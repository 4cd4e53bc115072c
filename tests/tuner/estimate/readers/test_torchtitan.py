from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.expect import refused
from tests.rows import each_row
from tests.tuner.estimate.readers.test_megatron import said
from tuner.engines.reading.launch import LaunchSettings, TokenDispatcher
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch

LAUNCHES = Path(__file__).parents[1] / "launches"


def read(text: str) -> LaunchSettings:
    return torchtitan.read(text, source="run.toml")


def test_fully_sharded_data_parallelism_with_tensor_parallelism() -> None:
    launch = read((LAUNCHES / "llama3-70b.toml").read_text())

    assert (launch.tensor, launch.data, launch.zero_stage) == (8, None, 3)
    assert (launch.micro_batch, launch.global_batch, launch.accumulation) == (4, None, 1)
    assert (launch.recompute, launch.fp8_recipe) == (Recompute.FULL, "blockwise")
    assert launch.overlap_tensor
    assert launch.ignored == ("metrics.log_freq = 10",)
    assert "parallelism.tensor_parallel_degree = 8" in launch.understood


def test_a_pipeline_cuts_the_local_batch_and_keeps_parameters_gathered() -> None:
    launch = read((LAUNCHES / "deepseek-16b.toml").read_text())

    assert (launch.pipeline, launch.virtual_pipeline, launch.micro_batch) == (2, 2, 1)
    assert (launch.data, launch.replicas, launch.zero_stage) == (8, 2, 2)
    assert (launch.expert, launch.expert_tensor) == (4, 1)
    assert launch.dispatcher is TokenDispatcher.DEEPEP
    assert launch.recompute_ratio == 0.5


def test_settings_of_every_release_are_read() -> None:
    launch = read(
        "[training]\nbatch_size = 2\nseq_len = 8192\ntensor_parallel_degree = 8\n"
        "data_parallel_degree = 16\ncompile = true\nenable_float8_linear = true\n"
        "[experimental]\npipeline_parallel_degree = 2\nenable_async_tensor_parallel = true\n"
        "[activation_checkpoint]\nmode = 'full'\n"
    )

    assert (launch.micro_batch, launch.tensor, launch.pipeline, launch.data) == (1, 8, 2, 16)
    assert (launch.compiled is not None, launch.overlap_tensor) == (True, True)
    assert launch.fp8_recipe
    assert launch.ignored == ()
    launch = read(
        "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = "
        '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]'
    )

    assert [stage.layers for stage in launch.layout] == [1, 1]
    assert launch.layout[1].loss
    launch = read('[training]\n[activation_checkpoint]\nselective_ac_option = "op"')

    assert launch.recompute_by_op
    assert launch.recompute is Recompute.SELECTIVE
    for text, compiled in (
        ("", set()),
        ("[compile]\nenable = false", set()),
        ("[compile]\nenable = true", {"model", "loss"}),
        ('[compile]\nenable = true\ncomponents = ["loss"]', {"loss"}),
        ('[compile]\ncomponents = ["loss"]', set()),
    ):
        launch = read(f"[parallelism]\ntensor_parallel_degree = 1\n{text}")
        assert set(launch.compiled or ()) == compiled
    assert set(read("[training]\ncompile = true").compiled or ()) == {"model", "loss"}
    assert "no list of" in said(
        torchtitan.read, '[training]\n[compile]\ncomponents = ["optimizer"]'
    )
    launch = read('[training]\ndtype = "bfloat16"')
    assert (launch.master_bytes, launch.moments_bytes, launch.gradient_bytes) == (2, 4, 2)


@each_row(
    ("text", "part"),
    [
        ("= 3", "not valid TOML"),
        ("[job]\n", "no [training] or [parallelism] section"),
        ("[parallelism]\ntensor_parallel_degree = 'two'", "'two' is not a whole number"),
        ("[parallelism]\ntensor_parallel_degree = 0", "outside 1..2147483648; the nearest is 1"),
        ("[parallelism]\ndata_parallel_shard_degree = 0", "-1 takes all ranks that are left"),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'V'",
            "is none of 1F1B, GPipe",
        ),
        (
            "[training]\nlocal_batch_size = 6\n[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_microbatch_size = 4",
            "not divisible by parallelism.pipeline_parallel_microbatch_size 4; the nearest "
            "that divides it is 3",
        ),
        ("[training]\n[activation_checkpoint]\nmode = 'some'", "is none of none, selective"),
        (
            "[training]\n[activation_checkpoint]\nselective_ac_option = '0'",
            "neither 'op' nor the text of a number",
        ),
        (
            "[training]\n[activation_checkpoint]\nmode = 'memory_budget'\nmemory_budget = 2",
            "outside 0..1",
        ),
        ("[training]\n[model]\nconverters = 'float8'", "no list of names"),
        (
            "[parallelism]\ntensor_parallel_degre = 8",
            "tensor_parallel_degre is no setting; did you mean parallelism.tensor_parallel_degree?",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [1]",
            "no list of lists",
        ),
    ],
)
def test_refuses_in_one_line_what_cannot_be_launched(text: str, part: str) -> None:
    with refused(SpecError, part):
        read(text)


KEYS = st.sampled_from(
    [
        "training.local_batch_size",
        "training.seq_len",
        "parallelism.tensor_parallel_degree",
        "parallelism.data_parallel_shard_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.module_fqns_per_model_part",
        "activation_checkpoint.mode",
        "activation_checkpoint.selective_ac_option",
        "model.converters",
        "model.flavor",
        "training",
    ]
)
VALUES = st.sampled_from(
    ["1", "-1", "0", "8", "1e400", "nan", "'full'", "'1F1B'", "[[]]", "{}", "true", "1979-05-27"]
)


@each_row("key", (".".join("a" * 95_000), f"b = {{{'.'.join('a' * 95_000)}"))
def test_a_key_of_endless_parts_is_refused_at_once(key: Any) -> None:
    assert "nested too deeply" in said(torchtitan.read, f"[training]\nsteps = 1\n{key} = 1\n")


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), st.text(max_size=30))
@settings(deadline=None, max_examples=100)
def test_any_toml_gives_settings_or_one_line(pairs: list[tuple[str, str]], text: str) -> None:
    for whole in ("\n".join(f"{key} = {value}" for key, value in pairs), text):
        assert "\n" not in said(torchtitan.read, whole)


@each_row(
    ("text", "changes"),
    (
        ("[training]\nenable_cpu_offload = true", "time"),
        ("[training]\n[optimizer]\nearly_step_in_backward = true", "memory"),
        ('[training]\nmixed_precision_reduce = "bfloat16"', "time"),
    ),
)
def test_settings_without_a_price_say_what_does_not_hold(text: str, changes: str) -> None:
    (found,) = read(text).unpriced
    assert found.changes == changes


PRIMUS = """
exp_name: ${PRIMUS_EXP_NAME:llama3.1_8B-pretrain}
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      training: {local_batch_size: ${PRIMUS_MBS:3}, steps: 50}
      parallelism: {tensor_parallel_degree: 2, expert_parallel_degree: 1}
      primus_turbo: {enable_primus_turbo: true}
"""


def test_primus_yaml_of_torchtitan_has_the_defaults_of_primus(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(PRIMUS)
    launch = read_launch(str(path))
    assert (launch.engine, launch.micro_batch, launch.tensor) == ("torchtitan", 3, 2)
    assert (launch.sequence, launch.recompute) == (2048, "none")
    assert set(launch.compiled or ()) == {"model", "loss"}
    assert any("PRIMUS_MBS=3" in note for note in launch.notes)
    path.write_text(
        PRIMUS.replace("${PRIMUS_MBS:3}", "4")
        .replace("8B.yaml", "8B-fp8.yaml")
        .replace("      primus_", "      activation_checkpoint: {mode: full}\n      primus_")
    )
    eight = read_launch(str(path))
    assert (eight.fp8_recipe, eight.recompute) == ("tensorwise", "full")
