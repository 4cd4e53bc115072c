"""An estimate names what it takes for granted beside the launch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tests.tuner.engines.testing import sample_decision, sample_verified
from tuner.engines.assumptions import DEADLOCK
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.writers import emit
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.unpriced import unpriced_notes, unpriced_settings
from tuner.spec.huggingface.read import read_model
from tuner.spec.spec import Spec

MODELS = Path(__file__).parents[3] / "examples" / "models"
MakeSpec = Callable[..., Spec]
MIXTRAL = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 "
    "--global-batch-size 64 --seq-length 4096 --hidden-dropout 0 --attention-dropout 0 "
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 "
    "--moe-token-dispatcher-type alltoall "
)
PRICED = (
    "--moe-permute-fusion --cross-entropy-loss-fusion --manual-gc --manual-gc-interval 100 "
    "--moe-aux-loss-coeff 1e-2 "
)


def _notes(flags: str, spec: Spec) -> str:
    launch = megatron.read(MIXTRAL + flags, source="run.sh")
    return "\n".join(unpriced_notes(launch, build_configuration(launch, spec)[0], spec))


@each_row(
    ("flags", "said"),
    [
        ("", "nothing in the launch balances it (--moe-aux-loss-coeff is 0.0"),
        ("--moe-aux-loss-coeff 0.0", "nothing in the launch balances it"),
        ("--moe-aux-loss-coeff 0.001", "--moe-aux-loss-coeff 0.001 is to balance it"),
        (
            "--moe-aux-loss-coeff 0.001 --moe-router-load-balancing-type none",
            "nothing in the launch balances it",
        ),
        ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias is to balance it"),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0 1e-3",
            "--moe-aux-loss-coeff 0 1e-3 is to balance it",
        ),
    ],
)
def test_what_balances_the_experts_is_named(flags: str, said: str, spec_of: MakeSpec) -> None:
    assert said in _notes(flags, spec_of("mixtral-8x7b", nodes=2))


def test_coefficients_and_buckets_that_cannot_be_are_refused(spec_of: MakeSpec) -> None:
    with pytest.raises(SpecError, match="--moe-aux-loss-coeff 'much' is not a number"):
        _notes("--moe-aux-loss-coeff much", spec_of("mixtral-8x7b", nodes=2))
    with pytest.raises(SpecError, match="--ddp-num-buckets 4 and --ddp-bucket-size 9: choose one"):
        megatron.read(f"{MIXTRAL}--ddp-num-buckets 4 --ddp-bucket-size 9", source="run.sh")
    launch = megatron.read(f"{MIXTRAL}--ddp-num-buckets 4", source="run.sh")
    assert any("is priced as the engine's own size" in note for note in launch.notes)
    chunked = (
        "--recompute-granularity selective --recompute-modules moe --mlp-chunks-for-training 4"
    )
    spec = spec_of("mixtral-8x7b", nodes=2)
    assert DEADLOCK in _notes(chunked, spec)
    assert DEADLOCK not in _notes("", spec)


RECIPE = "model: {tensor_model_parallel_size: 1}\ntrain: {micro_batch_size: 1}\n"


def test_settings_that_differ_and_buckets_are_named_and_priced(spec_of: MakeSpec) -> None:
    spec = spec_of("mixtral-8x7b", nodes=2)
    bare = _notes("", spec)
    for flag in ("moe-permute-fusion", "cross-entropy-loss-fusion", "manual-gc"):
        assert f"no --{flag} (" in bare
    assert "set otherwise" not in _notes(PRICED, spec)
    dropped = _notes(f"{PRICED}--moe-expert-capacity-factor 1.25 --no-rope-fusion", spec)
    assert "experts drop copies beyond 1.25 times the mean load" in dropped
    assert "--no-rope-fusion (rotary positions are one fused kernel)" in dropped
    padded = f"{PRICED}--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity"
    assert "every expert computes 1.25 times the mean load" in _notes(padded, spec)
    for flags, size in (
        ("--ddp-bucket-size 80000000 --overlap-grad-reduce", 80_000_000),
        ("--ddp-bucket-size 80000000", None),
        ("--ddp-bucket-size 80000000 --overlap-grad-reduce --use-megatron-fsdp", None),
        ("--overlap-grad-reduce", None),
    ):
        launch = megatron.read(MIXTRAL + flags, source="run.sh")
        assert build_configuration(launch, spec)[0].ddp_bucket_size == size
    launch = megatron.read(f"{MIXTRAL}--ddp-bucket-size 80000000", source="run.sh")
    assert any("has no effect without --overlap-grad-reduce" in note for note in launch.notes)
    bridge = megatron.read_yaml(f"{RECIPE}ddp: {{bucket_size: 80000000}}\n", source="recipe.yaml")
    assert bridge.ddp_bucket_size == 80_000_000


def test_settings_of_recipes_and_of_emitted_files_are_the_priced_ones(spec_of: MakeSpec) -> None:
    launch = megatron.read_yaml(RECIPE, source="recipe.yaml")
    assert launch.differing_settings == {}
    assert launch.balance == "the recipe"
    model = read_model(MODELS / "mixtral-8x7b" / "config.json")
    files = emit("megatron-lm", sample_verified(model, sample_decision(), emit=("megatron-lm",)))
    launch = megatron.read(files[0].text, source="megatron_args.txt")
    # No overlap is decided, so that no weight gradient is delayed.
    assert set(launch.differing_settings) == {"delay_wgrad_compute"}


@each_row(
    ("flags", "changes"),
    (
        ("--distribute-saved-activations", {"memory"}),
        ("--optimizer dist_muon", {"memory and time"}),
        ("--optimizer soap", {"memory"}),
        ("--optimizer lion", set()),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"time"}),
        # Without context parallelism it moves nothing.
        ("--cp-comm-type a2a", set()),
        ("--distribute-saved-activations=false", set()),
    ),
)
def test_a_setting_that_changes_factors_and_has_no_price_says_what_does_not_hold(
    spec_of: MakeSpec, flags: str, changes: Any
) -> None:
    spec = spec_of("mixtral-8x7b", nodes=2)
    launch = megatron.read(MIXTRAL + flags, source="run.sh")
    configuration, _ = build_configuration(launch, spec)
    doubts = unpriced_settings(launch, configuration, spec)
    assert {one.changes for one in doubts} == changes, flags
    assert flags.split()[-1] not in launch.ignored
