"""Changes that are proposed can be launched, and then do what was predicted."""

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tuner.engines.megatron_lm import read as megatron
from tuner.engines.reading.launch import LaunchSettings
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import estimate, pricing_setup
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import price_configurations
from tuner.estimate.records import Change, Estimate
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
Flags = dict[str, str]

COMMON: Flags = {
    "--micro-batch-size": "1",
    "--global-batch-size": "256",
    "--seq-length": "4096",
    "--bf16": "",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--moe-token-dispatcher-type": "alltoall",
}
LAUNCHES = st.fixed_dictionaries(
    {
        "--tensor-model-parallel-size": st.sampled_from(["1", "2", "4"]),
        "--pipeline-model-parallel-size": st.sampled_from(["1", "2", "4"]),
        "--expert-model-parallel-size": st.sampled_from(["1", "4", "8"]),
        "--sequence-parallel": st.just(""),
    },
    optional={
        "--expert-tensor-parallel-size": st.just("1"),
        "--context-parallel-size": st.just("2"),
        "--num-layers-per-virtual-pipeline-stage": st.sampled_from(["1", "2", "4"]),
        "--micro-batch-size": st.sampled_from(["2", "4"]),
        "--use-distributed-optimizer": st.just(""),
        "--overlap-grad-reduce": st.just(""),
        "--recompute-activations": st.just(""),
        "--external-cuda-graph": st.just(""),
        "--moe-enable-deepep": st.just(""),
        "--overlap-moe-expert-parallel-comm": st.just(""),
        "--num-distributed-optimizer-instances": st.just("2"),
    },
)


def read(flags: Flags) -> LaunchSettings:
    text = " ".join(f"{flag} {value}" for flag, value in flags.items())
    return megatron.read(text, source="args")


def read_and_estimate(flags: Flags, spec: Spec) -> Estimate:
    return estimate(spec, read(flags))


def changed(flags: Flags, lines: Iterable[str]) -> Flags:
    """Edit a launch as the lines say."""
    result = dict(flags)
    for line in lines:
        first, *rest = shlex.split(line)
        if first == "remove":
            del result[rest[0]]
            continue
        value = " ".join(rest)
        result[first] = f"'{value}'" if "|" in value or "(" in value else value
    return result


def all_changes(result: Estimate) -> list[Change]:
    single = [result.smallest_change] if result.smallest_change else []
    return [*result.changes, *single, *([result.best_pair] if result.best_pair else [])]


@given(flags=LAUNCHES)
@settings(
    deadline=None,
    max_examples=6,
    # Every example prices thousands of configurations; shrinking would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_change_is_launched_by_its_lines_and_brings_what_it_promised(
    spec_of: MakeSpec, flags: Flags
) -> None:
    spec = spec_of("mixtral-8x7b", nodes=4)
    launch = COMMON | flags
    if "--moe-enable-deepep" in flags:
        launch["--moe-token-dispatcher-type"] = "flex"
    try:
        result = read_and_estimate(launch, spec)
    except SpecError:
        return
    setup = pricing_setup(spec, None)
    for change in all_changes(result):
        settings_again = read(changed(launch, change.lines))
        own, _ = build_configuration(settings_again, spec)
        assert next(broken_rules(own, spec.model, name=settings_again.name), None) is None
        assert to_decision(own, spec.model) == change.decision, change
        (again,) = price_configurations((own,), setup)
        assert again.step_s == pytest.approx(change.step_time_s, rel=1e-9)
        assert again.peak_bytes_P.max() == pytest.approx(change.peak_memory_bytes, rel=1e-9)
        assert change.peak_memory_bytes <= result.memory_limit_bytes


def test_deepep_is_not_proposed_where_it_does_not_run(spec_of: MakeSpec) -> None:
    flags = COMMON | {"--expert-model-parallel-size": "8", "--use-distributed-optimizer": ""}
    on_a100 = read_and_estimate(flags, spec_of("mixtral-8x7b", nodes=8, device="a100-80gb"))

    assert all(one.decision.dispatcher == "alltoall" for one in all_changes(on_a100))


def test_what_the_manifest_refuses_is_not_proposed(spec_of: MakeSpec) -> None:
    flags = COMMON | {
        "--pipeline-model-parallel-size": "4",
        "--expert-model-parallel-size": "8",
        "--use-distributed-optimizer": "",
    }
    result = read_and_estimate(flags, spec_of("mixtral-8x7b", nodes=8))

    for change in all_changes(result):
        decision = change.decision
        # Overlap in a pipeline needs interleaving, in the engine and so in every proposal.
        overlaps = decision.a2a_overlap and decision.pipeline_model_parallel_size > 1
        assert not overlaps or decision.virtual_pipeline_model_parallel_size > 1


def test_a_hopeless_launch_reports_that_no_small_change_helps(spec_of: MakeSpec) -> None:
    flags = COMMON | {"--micro-batch-size": "8", "--global-batch-size": "64"}
    result = read_and_estimate(flags, spec_of("llama-3.1-405b", nodes=1))

    assert not result.fits
    assert result.smallest_change is None
    assert result.changes == ()
    assert result.num_tried > 10


def test_the_same_launch_gives_the_same_estimate(spec_of: MakeSpec) -> None:
    flags = COMMON | {"--expert-model-parallel-size": "8", "--use-distributed-optimizer": ""}
    spec = spec_of("mixtral-8x7b", nodes=2)

    assert read_and_estimate(flags, spec) == read_and_estimate(flags, spec)


def test_examples_in_the_tree_are_launches(spec_of: MakeSpec) -> None:
    folder = Path(__file__).parents[3] / "examples" / "worked"
    names = {
        "mixtral-8x7b-64-a100": ("mixtral-8x7b", 8, "a100-80gb"),
        "qwen3-30b-a3b-16-h100": ("qwen3-30b-a3b", 2, "h100-sxm"),
    }
    for name, (model, nodes, device) in names.items():
        text = (folder / name / "public.sh").read_text()
        result = estimate(
            spec_of(model, nodes=nodes, device=device), megatron.read(text, source="public.sh")
        )
        assert result.devices == 8 * nodes
