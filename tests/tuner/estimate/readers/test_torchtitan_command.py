"""torchtitan's commands, compared with its own parser and configurations."""

import json
import time
from pathlib import Path
from typing import Final

import pytest

from profilers.steps.config import Recompute
from tests.expect import present, refused
from tests.rows import each_row
from tests.tuner.real_torchtitan import run_with_torchtitan
from tuner.engines.reading.launch import TokenDispatcher, TrainingEngine
from tuner.engines.torchtitan.command import CONFIGS, read_training_command
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch, read_text

START: Final = "torchrun --nnodes 2 --nproc_per_node=8 -m torchtitan.train --module m --config "
SCRIPT: Final = """#!/usr/bin/bash
NGPU=${NGPU:-"8"}
CONFIG=${CONFIG:-"llama3_8b"}
# -m torchtitan.train --module other --config other
torchrun --nproc_per_node=${NGPU} --local-ranks-filter 0 \\
-m torchtitan.train --module ${MODULE:-llama3} --config ${CONFIG} "$@"
"""


def test_a_command_is_read_over_its_configuration() -> None:
    launch = read_launch(
        f"{START}deepseek_v3_16b_hybridep --training.local-batch-size 8"
        " --parallelism.tensor_parallel_degree=2 --parallelism.pipeline_parallel_degree 2"
        " --training.disable_cuda_graphs --parallelism.no-enable-sequence-parallel"
    )
    assert (launch.devices, launch.devices_per_node) == (16, 8)
    assert (launch.tensor, launch.pipeline, launch.expert, launch.virtual_pipeline) == (2, 2, 8, 2)
    assert (launch.sequence, launch.flush, launch.micro_batch) == (4096, None, 1)
    assert (launch.recompute, launch.sequence_parallel) == (Recompute.SELECTIVE, False)
    assert launch.dispatcher is TokenDispatcher.HYBRIDEP
    assert [size.value for size in launch.stated] == [27, 2048, 64]
    full = read_launch(f"{START}llama3_8b activation-checkpoint:full")
    assert (full.recompute, full.sequence) == (Recompute.FULL, 8192)
    assert not full.notes
    for config in CONFIGS:
        assert read_launch(f"{START}{config}").ignored == ()


def test_a_script_is_followed_and_an_own_configuration_is_said_to_be_unknown(
    tmp_path: Path,
) -> None:
    script = tmp_path / "run_train.sh"
    script.write_text(SCRIPT)
    launch = read_launch(str(script))
    assert launch.source.endswith("run_train.sh")
    assert (launch.micro_batch, launch.sequence) == (1, 8192)
    assert "not set in the file, so its default counts: CONFIG=llama3_8b" in launch.notes
    (note,) = read_launch(f"{START}mine").notes
    assert note.startswith("what 'mine' sets is not known here, no config_registry.py of --module")


@each_row(
    ("words", "said"),
    (
        ("python -m torchtitan.train --module llama3", "--config is missing"),
        (f"{START}$MINE", "--config \\$MINE has no value here"),
        (f"{START}llama3_8b activation-checkpoint:half", "is none of activation-checkpoint:none"),
        (f"{START}llama3_8b --parallelism.tensor_parallel_degree two", "is not a whole number"),
        (f"{START}llama3_8b --training.seq_len.deep 1", "seq_len is no section"),
        (f"{START}llama3_8b & {START}llama3_8b", "starts torchtitan 2 times"),
    ),
)
def test_commands_that_torchtitan_refuses_are_refused(words: str, said: str) -> None:
    with refused(SpecError, match=said):
        read_launch(words)


# Seconds, of importing torch: torchtitan's own parser says what is right.
READS: Final = """
import dataclasses, importlib, json, sys
from torchtitan.config.manager import ConfigManager
made = {}
for name, *arguments in json.loads(sys.argv[1]):
    module = name.split("_")[0]
    module = {"deepseek": "deepseek_v3", "gpt": "gpt_oss"}.get(module, module)
    try:
        config = ConfigManager().parse_args(["--module", module, "--config", name, *arguments])
    except ImportError:
        continue  # of numbers in eight bits, which need torchao
    made[" ".join([name, *arguments])] = {
        "training": dataclasses.asdict(config.training),
        "parallelism": dataclasses.asdict(config.parallelism),
        "compile": dataclasses.asdict(config.compile),
        "checkpoint": str(type(config.activation_checkpoint)),
        "flavor": config.model_spec.flavor,
    }
print(json.dumps(made))
"""


@pytest.mark.slow
def test_the_release_itself_reads_the_same(tmp_path: Path) -> None:
    options = [[name] for name in CONFIGS] + [
        ["llama3_8b", "--training.local_batch_size", "3", "--parallelism.tensor-parallel-degree=2"],
        ["qwen3_32b", "--training.disable-cuda-graphs", "activation-checkpoint:none"],
        ["llama3_70b", "--parallelism.no-enable-sequence-parallel"],
    ]
    said, errors = run_with_torchtitan(tmp_path, READS, json.dumps(options))
    assert said, errors
    made = json.loads(said.splitlines()[-1])
    assert len(made) > len(options) / 2
    defaults = made["llama3_8b"]
    for text, real in made.items():
        name, _, words = text.partition(" ")
        read = present(
            read_training_command(f"-m torchtitan.train --config {name} {words}", source="it")
        )
        sections = read.sections
        assert sections["model"]["flavor"] == real["flavor"]
        for section in ("training", "parallelism", "compile"):
            ours = sections.get(section, {})
            for key, value in real[section].items():
                known = key in ours or value == defaults[section][key]
                # Of what is compiled only asynchronous tensor parallelism is priced.
                is_free = key in ("steps", "local_batch_size", "seq_len", "enable", "components")
                assert known or is_free, (text, key)
                assert key not in ours or ours[key] == value, (text, key)
        mode = sections["activation_checkpoint"]["mode"]
        assert {"full": "FullAC", "selective": "SelectiveAC", "none": "NoneType"}[mode] in real[
            "checkpoint"
        ], text


def test_only_a_command_that_starts_it_is_torchtitans() -> None:
    megatron = "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1"
    launch = read_launch(f"python -c 'import torchtitan.train'; {megatron}")
    assert (launch.engine, launch.tensor) == (TrainingEngine.MEGATRON, 2)
    text = 'description = "torchtitan.train"\nmodel = "x"\n[training]\nseq_len = 4096\n'
    read = read_text(text, format_name="torchtitan", source="it")
    assert (read.sequence, read.notes) == (4096, ())
    overlapped = read_launch(
        f"{START}llama3_8b --compile.enable --compile.enable_async_tensor_parallel"
    )
    assert overlapped.overlap_tensor
    # What one command states is not left for the next.
    changed = read_launch(f"{START}llama3_405b --quantize.linear.float8.recipe_name tensorwise")
    assert changed.fp8_recipe == "tensorwise"
    assert read_launch(f"{START}llama3_405b").fp8_recipe == "blockwise"
    started_s = time.process_time()
    with pytest.raises(SpecError):
        read_text("\n" * 150_000, format_name="torchtitan", source="it")
    assert time.process_time() - started_s < 5.0
