from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.megatron_lm.flags import KNOWN, SWITCHES
from tuner.engines.reading.launch import Graphs, LaunchSettings, TokenDispatcher
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch

LAUNCHES = Path(__file__).parents[1] / "launches"
LEAST = "--tensor-model-parallel-size 1 --micro-batch-size 1 "


def read(text: str) -> LaunchSettings:
    return megatron.read(text, source="run.sh")


def said(reader: Callable[..., LaunchSettings], text: str) -> str:
    """Return the refusal, or nothing where the text is read."""
    try:
        assert reader(text, source="x").micro_batch >= 1
    except SpecError as error:
        return str(error)
    return ""


def refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith("run.sh: ")
    assert "\n" not in message
    return message


def test_how_processes_find_each_other_is_not_noted_and_all_else_is() -> None:
    golden = Path(__file__).parents[2] / "engines" / "golden" / "megatron-lm"
    launch = megatron.read(
        (golden / "run.sh").read_text(),
        source="run.sh",
        beside=lambda name: (golden / name).read_text(),
    )
    assert not [note for note in launch.notes if "a condition decides" in note]
    for assigned, is_noted in (
        ("L+=(--node-rank=$R --master_addr ${A:?is needed} --rdzv-backend=static)", False),
        ("MASTER_PORT=${P:-$((20000 + RANDOM % 12000))}", False),
        ("L+=(--node-rank=0 --recompute-granularity full)", True),
        ("L+=(--node-rank 0 stray)", True),
        ("L=()", True),
        ("L+=(--master-addr --micro-batch-size=4)", True),
        ("TP=4", True),
    ):
        launch = read(f"if true; then\n{assigned}\nfi\npretrain_gpt.py {LEAST}")
        assert any("a condition decides" in note for note in launch.notes) == is_noted, assigned


def test_a_script_with_arrays_variables_and_a_launcher_is_read() -> None:
    launch = read((LAUNCHES / "mixtral.sh").read_text())

    assert (launch.devices, launch.devices_per_node) == (64, 8)
    assert (launch.tensor, launch.pipeline, launch.expert, launch.expert_tensor) == (1, 4, 8, 1)
    assert (launch.sequence, launch.micro_batch, launch.global_batch) == (4096, 1, 256)
    assert launch.dispatcher is TokenDispatcher.ALLTOALL
    assert (launch.zero_stage, launch.overlap_grad_reduce, launch.overlap_param_gather) == (1, 1, 1)
    assert not launch.dropout
    assert "--lr 1e-4" in launch.ignored
    assert "--tokenizer-model my tokenizer" in launch.ignored
    assert "--bf16" in launch.understood
    notes = read((LAUNCHES / "mixtral.sh").read_text()).notes

    assert any("MODEL+=--wandb-project mixtral" in note for note in notes)
    assert not any("SLURM_NNODES" in note for note in notes)
    assert any("$@" in note for note in notes)


def test_arguments_are_read_in_every_form() -> None:
    text = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python pretrain_gpt.py " + LEAST

    assert read(text).devices == 32
    text = "MODEL_ARGS:\n  --tensor-model-parallel-size: 4\n  --micro-batch-size: 2\n  --bf16: true"
    launch = megatron.read_yaml(text, source="m.yaml")

    assert (launch.tensor, launch.micro_batch, launch.precision) == (4, 2, "bf16")
    launch = read(LEAST + "--pipeline-model-parallel-layout Et|(tt|)*2tL\n--moe-layer-freq ([1]*6)")

    assert [stage.layers for stage in launch.layout] == [1, 2, 2, 1]
    launch = read(LEAST + "--decoder-seq-length 128 --tp-comm-overlap-cfg overlap.yaml")

    assert "--decoder-seq-length 128" in launch.ignored
    assert not launch.overlap_tensor
    assert read(LEAST + "--seq-length 4096 --seq-length 8192").sequence == 8192
    assert read(LEAST + "--cuda-graph-impl full_iteration").cuda_graph is Graphs.FULL
    assert read(LEAST + "--external-cuda-graph").cuda_graph is Graphs.PARTIAL


def test_a_layout_places_every_stage_and_deprecated_flags_are_named() -> None:
    launch = read((LAUNCHES / "deepseek-v3.sh").read_text())

    # E and three layers, 29 pairs, MTP, loss: 32 stages.
    assert len(launch.layout) == 32
    assert launch.layout[0].embedding
    assert [stage.layers for stage in launch.layout] == [3, *[2] * 29, 0, 0]
    assert launch.layout[30].mtp_layers == 1
    assert launch.layout[31].loss
    assert launch.fp8_recipe == "blockwise"
    assert launch.recompute_modules == ("mla_up_proj", "mlp", "moe", "layernorm")

    assert launch.dispatcher is TokenDispatcher.DEEPEP
    assert launch.deprecated == ("--moe-enable-deepep: say --moe-flex-dispatcher-backend deepep",)


def test_names_of_other_builds_are_read_as_these_builds_mean_them() -> None:
    sizes = LEAST + "--num-layers 8 --linear-attention-freq 4 "
    for old, new in (
        ("--linear-attention-type gated_delta_net", "gated_delta_net"),
        ("--sparse-attention-type dsa", "dsa"),
    ):
        launch = read(sizes + old)
        assert launch.stated == read(f"{sizes}--experimental-attention-variant {new}").stated
        assert f"{old.split()[0]}: say --experimental-attention-variant" in launch.deprecated
    assert read(LEAST + "--persistent-save-interval 50").save_interval == 50
    assert "--fp4-param-gather" in read(LEAST + "--fp4-param-gather").ignored
    assert "is none of gated_delta_net, dsa" in refusal(sizes + "--linear-attention-type mamba")
    for flag in ("offload-optimizer-states", "moe-paged-stash", "hybrid-context-parallel"):
        assert [one.said for one in read(f"{LEAST}--{flag}").unpriced] == [f"--{flag}"]


def test_sections_of_yaml_are_over_what_every_recipe_sets() -> None:
    launch = megatron.read_yaml((LAUNCHES / "llama.yaml").read_text(), source="llama.yaml")

    assert (launch.tensor, launch.context, launch.pipeline, launch.virtual_pipeline) == (8, 2, 8, 8)
    assert (launch.embedding_as_layers, launch.loss_as_layers) == (1, 1)
    assert launch.gradient_bytes == 2
    text = "model: {expert_model_parallel_size: 16}\ntrain: {micro_batch_size: 1}\n"
    launch = megatron.read_yaml(text, source="recipe.yaml")
    said = megatron.read_yaml(
        text + "ddp: {use_distributed_optimizer: false, grad_reduce_in_fp32: false}", source="r"
    )

    assert (launch.precision, launch.zero_stage, launch.dropout) == ("bf16", 1, False)
    assert launch.dispatcher is TokenDispatcher.ALLTOALL
    assert not launch.sequential_experts
    assert (said.zero_stage, said.gradient_bytes) == (0, 2)


PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    overrides:
      micro_batch_size: 2
      global_batch_size: 256
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      expert_model_parallel_size: ${oc.env:PRIMUS_EP,8}
      context_parallel_size: ${CP:-${OTHER:2}}
      save: ${SAVE:null}
      overlap_grad_reduce: true
      overlap_param_gather: true
"""


def test_primus_has_defaults_of_its_own_and_variables_have_theirs() -> None:
    launch = megatron.read_yaml(PRIMUS, source="p.yaml")

    assert (launch.sequence, launch.tensor, launch.expert, launch.context) == (4096, 1, 8, 2)
    assert (launch.precision, launch.zero_stage, launch.dropout) == ("bf16", 1, False)
    assert (launch.dispatcher, launch.sequential_experts) == (TokenDispatcher.ALLTOALL, False)
    assert any("PRIMUS_TP=1" in note for note in launch.notes)
    turbo = megatron.read_yaml(f"{PRIMUS}      use_turbo_deepep: true\n", source="p.yaml")
    assert turbo.dispatcher is TokenDispatcher.DEEPEP
    assert turbo.ignored == ()


def test_flags_of_primus_count_over_its_file_and_null_takes_back(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "p.yaml").write_text(
        PRIMUS + "      recompute_granularity: full\n      recompute_num_layers: 1\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "export PRIMUS_EP=16\n./primus-cli slurm srun -N 4 -- -- train pretrain"
        " --config configs/p.yaml --seq_length 8192 --pipeline_model_parallel_size 4"
        " --recompute_granularity null --overlap_grad_reduce False"
    )
    launch = read_launch(str(script))
    script.write_text(
        "export PRIMUS_SEQ_LENGTH=2048\nprimus-cli direct -- train"
        " --config configs/p.yaml --recompute_granularity null"
    )
    assert read_launch(str(script)).sequence == 2048
    script.write_text(
        "export EXP=configs/p.yaml\nbash ./examples/run_slurm_pretrain.sh --seq_length 1024"
        " --recompute_granularity None"
    )
    older = read_launch(str(script))
    assert (older.sequence, older.recompute, older.micro_batch) == (1024, Recompute.NONE, 2)
    script.write_text("primus-cli direct -- train --config configs/other.yaml")
    with pytest.raises(SpecError, match="is not beside the launch"):
        read_launch(str(script))

    assert (launch.sequence, launch.pipeline, launch.micro_batch) == (8192, 4, 2)
    assert (launch.global_batch, launch.context, launch.zero_stage) == (256, 2, 1)
    assert launch.recompute is Recompute.NONE
    assert not launch.overlap_grad_reduce


def test_variables_of_a_slurm_job_are_those_of_its_options() -> None:
    for options, found in (
        ("#SBATCH --nodes=64\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4", 256),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-node h100:8  # all", 16),
        ("#SBATCH -N3\n#SBATCH --gpus-per-node=gpu:2", 6),
    ):
        launch = read(
            f"{options}\nARGS=(--nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_PER_NODE)\n"
            f"srun torchrun ${{ARGS[@]}} pretrain_gpt.py {LEAST}"
        )
        assert launch.devices == found, options
    # A range of nodes says no number.
    ranged = f"#SBATCH --nodes=2-4\ntorchrun --nnodes=8 --nproc-per-node 2 pretrain_gpt.py {LEAST}"
    assert read(ranged).devices == 16


@each_row(
    ("text", "named"),
    (
        (PRIMUS.replace("framework: megatron", "framework: maxtext"), "framework 'maxtext'"),
        (f"{PRIMUS}      lora: {{enabled: true}}\n", "overrides.lora"),
    ),
)
def test_what_primus_starts_beside_megatron_is_refused_by_name(text: Any, named: str) -> None:
    assert named in said(megatron.read_yaml, text)


def test_fields_that_are_on_by_default_change_nothing_where_they_say_so() -> None:
    text = "model: {tensor_model_parallel_size: 1}\ntrain: {micro_batch_size: 1}\n"
    for field, row in (
        ("bias_swiglu_fusion", "bias_swiglu_fusion"),
        ("gradient_accumulation_fusion", "gradient_accumulation_fusion"),
        ("apply_rope_fusion", "apply_rope_fusion"),
        ("overlap_p2p_comm", "overlap_p2p_comm"),
    ):
        on = megatron.read_yaml(f"{text}optimizer: {{{field}: true}}", source="r.yaml")
        off = megatron.read_yaml(f"{text}optimizer: {{{field}: false}}", source="r.yaml")
        assert row not in on.differing_settings
        assert row in off.differing_settings
    for value, is_off in {"1": 0, "on": 0, "yes": 0, "0": 1, "off": 1, "no": 1}.items():
        words = f"{text}optimizer: {{apply_rope_fusion: '{value}'}}"
        launch = megatron.read_yaml(words, source="r.yaml")
        assert ("apply_rope_fusion" in launch.differing_settings) == is_off, value


def test_switches_take_their_value_in_every_spelling() -> None:
    for spelled in ("--bf16", "--bf16=true", "--bf16 True", "--bf16=1", "--bf16 on"):
        assert read(f"--micro-batch-size 1 {spelled}").precision == "bf16", spelled
    for spelled in ("", "--bf16=false", "--bf16 False", "--bf16 0"):
        assert read(f"--micro-batch-size 1 {spelled}").precision == "fp32", spelled


def test_optimizer_states_have_the_bytes_of_their_types() -> None:
    aware = (
        "--micro-batch-size 1 --bf16 --use-distributed-optimizer --use-precision-aware-optimizer "
    )
    for flags, state in (
        ("", (2, None, 4)),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16", (2, 4, 2)),
        ("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16", (2, 3, 4)),
        ("--main-params-dtype fp16", (2, None, 4)),
        ("--no-store-param-remainders", (None, None, 4)),
        ("--fp8-format hybrid --fp8-recipe blockwise", (None, None, 4)),
    ):
        launch = read(aware + flags)
        assert (launch.master_bytes, launch.moments_bytes, launch.gradient_bytes) == state, flags
    plain = read("--micro-batch-size 1 --bf16")
    assert (plain.master_bytes, plain.moments_bytes, plain.gradient_bytes) == (None, None, 4)
    assert read("--micro-batch-size 1 --fp16").gradient_bytes == 2
    for optimizer, moments in {
        **{"adam": None, "adamw": None, "soap": None, "sgd": 4, "lion": 4},
        **{"muon": 4, "dist_muon": 4},
    }.items():
        launch = read(f"--micro-batch-size 1 --bf16 --optimizer {optimizer}")
        assert launch.moments_bytes == moments, optimizer
        assert launch.shards_optimizer == ("muon" not in optimizer)


@each_row(
    ("flags", "expected"),
    [
        ("", Recompute.NONE),
        ("--recompute-activations", Recompute.SELECTIVE),
        ("--recompute-granularity selective", Recompute.SELECTIVE),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            Recompute.FULL,
        ),
    ],
)
def test_recompute_levels(flags: str, expected: Recompute) -> None:
    assert read(LEAST + flags).recompute is expected


@each_row(
    ("flags", "expected"),
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp", 3),
        ("--use-torch-fsdp2", 3),
        # Muon shards its state by layers, under either name.
        ("--optimizer muon", 0),
        ("--optimizer dist_muon", 1),
        ("--optimizer muon --use-distributed-optimizer", 1),
    ],
)
def test_sharding_of_state(flags: str, expected: int) -> None:
    assert read(LEAST + flags).zero_stage == expected


@each_row(
    ("text", "part"),
    [
        ("echo hello", "no command with Megatron-LM flags"),
        ("--tensor-model-parallel-size 2", "--micro-batch-size is missing"),
        (LEAST + "--seq-length many", "--seq-length 'many' is not a whole number"),
        (LEAST + "--seq-length 0", "--seq-length 0 is outside 1..2147483648; the nearest is 1"),
        (LEAST + "--seq-length $SEQ", "--seq-length '$SEQ' has no value here"),
        (LEAST + "--seq-length", "--seq-length has no value; it takes one"),
        (LEAST + "--bf16 --fp16", "--fp16 and --bf16: choose one"),
        (LEAST + "--fp8-format e4m3 --fp4-format e2m1", "choose one"),
        (LEAST + "--batch-size 4", "no longer read by Megatron-LM; say --micro-batch-size"),
        (LEAST + "--recompute-granularity full", "needs --recompute-method uniform or block"),
        (
            LEAST + "--recompute-granularity selective --recompute-method uniform",
            "--recompute-method uniform belongs to --recompute-granularity full",
        ),
        (
            LEAST + "--recompute-granularity selective --recompute-modules attention",
            "'attention' is none of core_attn",
        ),
        (LEAST + "--moe-enable-deepep", "needs --moe-token-dispatcher-type flex"),
        (LEAST + "--pipeline-model-parallel-layout Etx|L", "'x' is no part of a layout"),
        (LEAST + "--pipeline-model-parallel-layout tt|L", "must begin with its only E"),
        (LEAST + "--pipeline-model-parallel-layout Et|t", "must end with its only L"),
        (LEAST + "--pipeline-model-parallel-layout Em|tL", "every m must follow the last t"),
        (
            LEAST + "--pipeline-model-parallel-layout Et*999999|L",
            "expands to more than 100000 parts",
        ),
        (
            LEAST + "--num-layers 4 --num-experts 8 --moe-layer-freq [0]*3+[1]*2",
            "names 5 layers, --num-layers 4",
        ),
        (
            LEAST + "--num-layers 4 --num-experts 8 --moe-layer-freq __import__('os')",
            "is no pattern of layers",
        ),
        (LEAST + "--lr 'open", "line 1: a quote is never closed"),
        (
            LEAST + "--expert-model-parallel-sise 8",
            "is no flag of Megatron-LM; did you mean --expert-model-parallel-size?",
        ),
        ("ARGS=(" + LEAST, "is never closed with )"),
        (
            'A="xxxxxxxxxx xxxxxxxxxx"\n'
            + 'A="$A $A $A $A"\n' * 12
            + f"pretrain_gpt.py $A {LEAST}",
            "more than 2000000 characters",
        ),
        (LEAST + "--bf16 --exp-avg-dtype bf16", "needs --use-precision-aware-optimizer"),
        (
            LEAST + "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8",
            "none of fp32",
        ),
        (
            LEAST + "--bf16 --moe-pad-expert-input-to-capacity",
            "needs --moe-expert-capacity-factor",
        ),
        (LEAST + "--bf16 --moe-expert-capacity-factor much", "not a number"),
    ],
)
def test_refuses_in_one_line_what_cannot_be_launched(text: str, part: str) -> None:
    assert part in refusal(text)


WORDS = st.one_of(
    st.sampled_from(sorted(f"--{name}" for name in KNOWN)),
    st.sampled_from(
        ["1", "8", "-3", "full", "selective", "$X", "${Y:-2}", "flex", "true", "[1]*4"]
    ),
    st.sampled_from(["A=(", ")", ";", "&&", "if", "fi", "\n", "'", '"', "\\\n", "#", "A+=(", "$A"]),
    st.text(max_size=8),
)


@given(st.lists(WORDS, max_size=30))
@settings(deadline=None, max_examples=100)
def test_any_shell_text_gives_settings_or_one_line(words: list[str]) -> None:
    for text in (" ".join(words), LEAST + " ".join(words)):
        assert "\n" not in said(megatron.read, text)


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=60)
def test_any_yaml_text_gives_settings_or_our_error(text: str) -> None:
    for whole in (text, f"micro_batch_size: 1\nseq_length: {text}"):
        assert "\n" not in said(megatron.read_yaml, whole)


def test_every_switch_is_a_known_flag() -> None:
    assert SWITCHES <= KNOWN
