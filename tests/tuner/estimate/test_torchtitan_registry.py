"""torchtitan's Python configurations, read as text beside the launch that names them."""

from collections.abc import Callable

import pytest

from tests.rows import each_row
from tests.tuner.estimate.conftest import predict
from tuner.engines.reading.launch import Graphs
from tuner.engines.torchtitan.config_registry import registered_sections, registry_paths
from tuner.engines.torchtitan.read import read
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.estimate import shipped_residuals
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
COMMAND = "torchrun --nproc_per_node 8 -m torchtitan.train --module own --config "
REGISTRY = """
from torchtitan.trainer import Trainer

def plain():
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=2, seq_len=4 * 512, steps=size_of(spec)),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )

def tokens():
    return Trainer.Config(
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=3 * 2048, max_context_length=2048
        ),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4),
    )

def eight_bits():
    config = plain()
    config.compile = CompileConfig(enable=True, components=["model"])
    config.parallelism.tensor_parallel_degree = 1
    config.activation_checkpoint = None
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config()])
    return config

LENGTH: int = 2 * 1024
LAYERS = DEPTH = 3

def annotated() -> Trainer.Config:
    steps: list[int]
    batch: int = 5
    config: Trainer.Config = plain()
    config.training.seq_len = LENGTH
    config.training.local_batch_size = config.training.microbatches = batch
    config.parallelism.tensor_parallel_degree: int = DEPTH
    return config

def endless():
    return endless()
"""


def _beside(text: str, folder: str = "models") -> Callable[[str], str | None]:
    return {f"torchtitan/{folder}/own/config_registry.py": text}.get


def test_a_function_of_the_file_beside_says_what_a_config_sets() -> None:
    for folder in ("models", "experiments"):
        plain = read(COMMAND + "plain", source="run.sh", beside=_beside(REGISTRY, folder))
        assert (plain.micro_batch, plain.sequence, plain.tensor) == (2, 2048, 2)
        assert plain.recompute.value == "full"
        assert not any("not known" in note for note in plain.notes)
    changed = read(COMMAND + "eight_bits", source="run.sh", beside=_beside(REGISTRY))
    assert (changed.micro_batch, changed.tensor, changed.fp8_recipe) == (2, 1, "mxfp8")
    assert changed.recompute.value == "none"
    assert "model" in (changed.compiled or ())
    flags = " --training.local_batch_size 5"
    over = read(COMMAND + "plain" + flags, source="run.sh", beside=_beside(REGISTRY))
    assert over.micro_batch == 5


def test_annotated_and_chained_assignments_and_constants_of_the_file_count() -> None:
    launch = read(COMMAND + "annotated", source="run.sh", beside=_beside(REGISTRY))
    assert (launch.micro_batch, launch.sequence, launch.tensor) == (5, 2048, 3)


def test_sizes_in_tokens_are_read_as_sequences() -> None:
    launch = read(COMMAND + "tokens", source="run.sh", beside=_beside(REGISTRY))
    assert (launch.sequence, launch.micro_batch, launch.accumulation) == (2048, 3, 4)
    flags = " --training.num_tokens_per_microbatch_per_dp_rank 8192"
    typed = read(COMMAND + "plain" + flags, source="run.sh", beside=_beside(REGISTRY))
    assert typed.micro_batch == 4
    odd = " --training.num_tokens_per_microbatch_per_dp_rank 3000"
    with pytest.raises(SpecError, match=r"3000 is no multiple of .*max_context_length 2048"):
        read(COMMAND + "plain" + odd, source="run.sh", beside=_beside(REGISTRY))


def test_a_step_is_one_graph_where_the_release_can_capture_it() -> None:
    # 0.3's trainer refuses graphs in a pipeline and where the dispatch waits for the host.
    for words, is_graph in (
        ("llama3_8b", True),
        ("llama3_8b --parallelism.pipeline_parallel_degree 2", False),
        ("mine --parallelism.expert_parallel_degree 8", False),
        ("deepseek_v3_16b_hybridep", True),
        ("llama3_8b --training.disable_cuda_graphs", False),
    ):
        launch = read(COMMAND + words, source="run.sh")
        assert (launch.cuda_graph is Graphs.FULL) is is_graph
    # A file that names the switch nowhere is of before August 2026, when there were no graphs.
    newer = REGISTRY + "\ndef varlen():\n    config.training.disable_cuda_graphs = True\n"
    for text, is_graph in ((REGISTRY, False), (newer, True)):
        launch = read(COMMAND + "plain", source="run.sh", beside=_beside(text))
        assert (launch.cuda_graph is Graphs.FULL) is is_graph


def test_what_no_file_says_of_a_config_is_the_specs(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, sequence_length=1024, global_batch_size=24)
    configured, notes = build_configuration(read(COMMAND + "unknown", source="run.sh"), spec)
    assert (configured.sequence, configured.micro_batch, configured.global_batch) == (1024, 3, 24)
    assert any("unknown" in note and "config_registry.py" in note for note in notes)
    stated = " --training.local_batch_size 2 --training.seq_len 512"
    configured, _ = build_configuration(read(COMMAND + "unknown" + stated, source="run.sh"), spec)
    assert (configured.sequence, configured.micro_batch, configured.global_batch) == (512, 2, 16)


def test_a_registry_is_text_whatever_it_holds() -> None:
    broken = ("def f(:", "x = " + "(" * 5000, "def f():\n    return " + "1*" * 50_000 + "1", "\0")
    for text in (*broken, "def f():\n    return None\n", ""):
        assert registered_sections(text, module="own", name="f") is None
    assert registered_sections(REGISTRY, module="own", name="endless") is None
    assert registered_sections(REGISTRY, module="own", name="missing") is None
    assert not [*registry_paths("../../etc"), *registry_paths("/etc/x"), *registry_paths("a b")]


NVFP4 = """
def plain():
    return Trainer.Config(
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=32768),
        compile=CompileConfig(enable=True, components=["model"]),
    )

def four_bits():
    config = plain()
    fqns = nvfp4_bf16_tail_fqns(len(config.model_spec.model.layers), 0.15)
    config.model_spec = model_registry(
        "8B", converters=[NVFP4LinearConverter.Config(fqns=fqns, model_compile_enabled=True)]
    )
    return config
"""


@each_row(("name", "gib", "seconds"), (("four_bits", 110.95, 2.18), ("plain", 174.49, 2.99)))
def test_checkpointing_by_operation_does_not_keep_what_nvfp4_gemms_return(
    spec_of: MakeSpec, name: str, gib: float, seconds: float
) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, device="gb200-nvl72", sequence_length=2048)
    tokens = " --training.num_tokens_per_microbatch_per_dp_rank 65536"
    command = COMMAND.replace("8 -m", "4 -m")
    launch = read(command + name + tokens, source="run.sh", beside=_beside(NVFP4))
    priced = predict(spec, launch, residuals=shipped_residuals())
    assert priced.peak_memory_bytes / (2**30) == pytest.approx(gib, rel=0.1), name
    low, high = priced.step_time_s_band
    assert low < seconds < high


def test_files_that_would_grow_or_return_no_configuration_are_not_read() -> None:
    grown = "def f0():\n    return C.Config(a=1)\n" + "".join(
        f"def f{i}():\n    return C.Config(a=f{i - 1}(), b=f{i - 1}())\n" for i in range(1, 40)
    )
    assert registered_sections(grown, module="own", name="f39") is None
    shared = "def f():\n    a = [C()]\n" + "    a = [a, a]\n" * 40 + "    return C.Config(a=a)\n"
    assert registered_sections(shared, module="own", name="f") is not None
    replaced = "def f():\n    return replace(base(), compile=CompileConfig(enable=True))\n"
    assert registered_sections(replaced, module="own", name="f") is None
