"""Every field of a training decision through every emitter, and every emitted file read back.

What a target refuses by its manifest is not emitted. What its files cannot say stands in `UNSAID`
with the reason; an entry that nothing needs any longer fails.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.expect import present
from tests.tuner.engines.testing import sample_verified, write_emitted
from tuner.catalog.programs import WRAPPERS
from tuner.catalog.rules.decision import global_chunks, global_recompute, selective_modules
from tuner.config.train import TrainDecision
from tuner.engines.targets import TARGETS, programs
from tuner.engines.writers import EMITTERS, broken_rules, emit
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.registry import read_launch
from tuner.plans.train import VerifiedPlan
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.spec import Spec

OURS: Final = ("reference", "torchrun", "transformers-peft")
"""Programs that ship with the product, which no estimate reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """What the files of a target cannot say of a decision."""

    target: str | tuple[str, ...]
    """How the names of the targets begin."""
    fields: frozenset[str]
    reason: str
    applies: Callable[[TrainDecision], bool] = lambda _: True

    def covers(self, target: str, field: str, decision: TrainDecision) -> bool:
        return target.startswith(self.target) and field in self.fields and self.applies(decision)


UNSAID: Final = (
    Unsaid(
        target="",
        fields=frozenset({"ends_as_layers"}),
        reason="says how stages were balanced; what is launched has them written out",
    ),
    Unsaid(
        target=("megatron", "ms-swift"),
        fields=frozenset({"overlap_grad_reduce"}),
        reason="Megatron-FSDP overlaps the reduction of what it shards (core_v0.18.0)",
        applies=lambda decision: decision.zero_stage >= 2,
    ),
    Unsaid(
        target=("megatron", "ms-swift"),
        fields=frozenset({"overlap_param_gather"}),
        reason="Megatron-FSDP overlaps the all-gather of what it shards (core_v0.18.0)",
        applies=lambda decision: decision.zero_stage == 3,
    ),
    Unsaid(
        target="torchtitan",
        fields=frozenset({"overlap_grad_reduce", "overlap_param_gather"}),
        reason="FSDP2 has no switch: it always overlaps",
    ),
    Unsaid(
        target="deepspeed",
        fields=frozenset({"expert_model_parallel_size", "expert_data_parallel_size"}),
        reason="under a pipeline the user's program builds the experts; README.txt says the degree",
        applies=lambda decision: decision.pipeline_model_parallel_size > 1,
    ),
    Unsaid(
        target="deepspeed",
        fields=frozenset({"overlap_param_gather"}),
        reason="overlap_comm is one switch, and only ZeRO-3 gathers beside the forward pass",
    ),
)

READ: Final[Mapping[str, tuple[str, ...]]] = {
    "megatron-lm": ("megatron_args.txt", "run.sh"),
    "megatron-lm-0.16": ("megatron_args.txt", "run.sh"),
    "megatron-bridge": ("overrides.txt", "train.py", "run.sh"),
    "megatron-bridge-26.04": ("overrides.txt", "train.py", "run.sh"),
    "megatron-bridge-26.02": ("overrides.txt", "train.py", "run.sh"),
    "ms-swift": ("swift_args.txt", "run.sh"),
    "torchtitan": ("torchtitan.toml", "moetune_plan.py", "run.sh"),
    "deepspeed": ("deepspeed.json", "run.sh"),
}
"""Files that hold or start a configuration; `hosts.txt` and `README.txt` do neither."""


def _verified(pair: Any, decision: TrainDecision, target: str) -> VerifiedPlan:
    return sample_verified(pair.model, decision, emit=(target, "slurm"))


def _refused(pair: Any, decision: TrainDecision, target: str) -> tuple[str, ...]:
    return broken_rules(target, _verified(pair, decision, target).plan, decision)


def _text(pair: Any, decision: TrainDecision, target: str) -> str:
    """Return what is emitted without the comments that say the decision in words."""
    files = emit(target, _verified(pair, decision, target))
    return "\n".join(
        line
        for file in files
        for line in str(file.content).splitlines()
        if not line.startswith("#") and file.path.name != "README.txt"
    )


def test_every_target_is_walked() -> None:
    assert set(READ) | set(OURS) | set(WRAPPERS) == set(EMITTERS)


def test_a_field_changes_the_emitted_file_or_is_refused(pairs: Any, none_of: Any) -> None:
    failures = []
    for target in (*READ, *OURS):
        for pair in pairs:
            if _refused(pair, pair.before, target) or _refused(pair, pair.after, target):
                continue
            differs = _text(pair, pair.before, target) != _text(pair, pair.after, target)
            if not differs and not _unsaid(target, pair.field, pair.after):
                failures.append(f"{target}: {pair.field} changes no emitted file")
    none_of(failures)


def _unsaid(target: str, field: str, decision: TrainDecision) -> list[Unsaid]:
    return [one for one in UNSAID if one.covers(target, field, decision)]


def _spec(pair: Any, decision: TrainDecision) -> Spec:
    nodes = -(-decision.num_devices // 8)
    per_node = min(8, decision.num_devices)
    pool = Pool(name="pool", device="h100-sxm", nodes=nodes, devices_per_node=per_node)
    goal = sample_verified(pair.model, decision).plan.goal
    return Spec(
        path=Path("spec.yaml"),
        model_path=Path("config.json"),
        model=pair.model,
        cluster=Cluster(pools=(pool,)),
        goal=TrainGoal.model_validate(goal.model_dump()),
        programs=programs(("megatron-lm",)),
    )


def same_launch(model: ModelSpec, one: TrainDecision) -> TrainDecision:
    """Return a decision as every launch of the same work says it."""
    level, chunks = present(global_recompute(model, one)), present(global_chunks(model, one))
    ranks = one.data_parallel_size * one.context_parallel_size
    interleaved = one.virtual_pipeline_model_parallel_size > 1
    plain = "interleaved" if interleaved else "1f1b"
    modules = selective_modules(one) if level == "selective" else ()
    return one.model_copy(
        update={
            "recompute": level,
            "recompute_modules": tuple(sorted(modules)),
            "stage_recompute": (level,) * one.num_stages,
            "chunks": (chunks,) * one.num_stages,
            "schedule": one.schedule or plain,
            "shard_ranks": None if one.shard_ranks == ranks else one.shard_ranks,
        }
    )


def _launches(
    folder: Path, target: str, verified: VerifiedPlan, *, with_slurm: bool
) -> Iterator[Path]:
    write_emitted(folder / target, emit(target, verified))
    yield from (folder / target / name for name in READ[target])
    if with_slurm:
        write_emitted(folder / "slurm", emit("slurm", verified))
        yield folder / "slurm" / "job.sbatch"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_emitted_file_reads_back_to_its_decision(
    pairs: Any, none_of: Any, tmp_path: Path, *, every: bool
) -> None:
    failures, needed = [], set[str]()
    # Many pairs begin with the same decision.
    once = {
        (target, pair.model.name, repr(getattr(pair, name))): (target, pair, name)
        for target in READ
        for pair in pairs
        for name in (("before", "after") if every else ("after",))
    }
    for number, (target, pair, name) in enumerate(once.values()):
        decision = getattr(pair, name)
        if _refused(pair, decision, target):
            continue
        verified = _verified(pair, decision, target)
        want = same_launch(pair.model, decision)
        with_slurm = every or number % 3 == 0
        for path in _launches(tmp_path / str(number), target, verified, with_slurm=with_slurm):
            at = f"{target}/{path.name} ({pair.field}, {name})"
            try:
                own, _ = build_configuration(read_launch(str(path)), _spec(pair, decision))
                found = same_launch(pair.model, to_decision(own, pair.model))
            except SpecError as error:
                failures.append(f"{at}: {error}")
                continue
            for field in TrainDecision.model_fields:
                if getattr(want, field) == getattr(found, field):
                    continue
                excused = {one.reason for one in _unsaid(target, field, decision)}
                needed |= excused
                if not excused:
                    failures.append(
                        f"{at}: {field} {getattr(want, field)} reads back as"
                        f" {getattr(found, field)}"
                    )
    failures += [f"stale: {one.reason}" for one in UNSAID if one.reason not in needed]
    none_of(failures)


def test_the_capabilities_of_every_walked_target_are_known() -> None:
    assert set(READ) <= set(TARGETS)
