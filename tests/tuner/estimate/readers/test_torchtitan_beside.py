"""A command's flags override the TOML that it names."""

from pathlib import Path

from tuner.estimate.registry import read_launch

TOML = """
[model]
name = "deepseek_v3"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
expert_parallel_degree = 1
[compile]
enable = false
"""
COMMAND = """
EP=32
srun torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train --job.config_file train.toml \\
  --training.local_batch_size=8 --training.seq_len 8192 \\
  --parallelism.tensor_parallel_degree=2 --parallelism.expert_parallel_degree="${EP}" \\
  --compile.enable --compile.components="loss,model" \\
  --model.converters="quantize.linear.float8" --activation_checkpoint.mode=full
"""


def test_flags_of_the_command_override_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(TOML)
    (tmp_path / "launch.sh").write_text(COMMAND)
    read = read_launch(str(tmp_path / "launch.sh"))
    assert (read.tensor, read.expert, read.micro_batch, read.sequence) == (2, 32, 8, 8192)
    assert read.devices == 16
    assert set(read.compiled or ()) == {"loss", "model"}
    assert read.fp8_recipe
    assert read.recompute == "full"


def test_a_script_before_the_launch_is_left_where_it_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(TOML)
    (tmp_path / "setup.sh").write_text("pip install -e .\n")
    (tmp_path / "run.sh").write_text(
        'echo "it\'s $@"\nSIZE=${SIZE:-2}\ntorchrun --nproc_per_node 8 -m torchtitan.train'
        ' --job.config_file train.toml --training.local_batch_size=$SIZE "$@"\n'
    )
    launch = tmp_path / "launch.sh"
    for before in ("./setup.sh", "chmod +x ./setup.sh", "cp ./setup.sh ./b.sh", "echo ./setup.sh"):
        launch.write_text(f"{before}\nbash run.sh --training.seq_len 2048 SIZE=8\n")
        read = read_launch(str(launch))
        # Behind the script SIZE is an argument, and no variable.
        assert (read.sequence, read.micro_batch) == (2048, 2)


def test_the_script_of_the_repository_is_known_and_passes_its_arguments_on(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.toml").write_text(TOML)
    launch = tmp_path / "launch.sh"
    own = "#!/bin/bash\ntorchrun --nproc_per_node=4 -m torchtitan.train"
    own += ' --job.config_file ${CONFIG_FILE:-"none.toml"} --training.seq_len 2048 "$@"\n'
    # Up to July 2025 the script looked whether it had any.
    former = '#!/bin/bash\nmore=""\nif [ $# -ne 0 ]; then\n  more="$*"\nfi\n'
    former += "torchrun torchtitan/train.py --job.config_file ${CONFIG_FILE} $more\n"
    for script, sequence in ((None, 4096), (own, 2048), (former, 4096)):
        if script:
            (tmp_path / "run_train.sh").write_text(script)
        for wrapper in ("", "with-proxy "):
            launch.write_text(
                f'{wrapper}CONFIG_FILE="./configs/train.toml" ./run_train.sh'
                " --training.local_batch_size=2 --parallelism.expert_parallel_degree 8"
            )
            read = read_launch(str(launch))
            assert (read.expert, read.micro_batch, read.sequence) == (8, 2, sequence)
