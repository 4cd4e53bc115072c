"""Plans that offload, on hosts whose memory is stated or not."""

from pathlib import Path
from typing import Any

import pytest

from tests.expect import present, refused
from tests.printed import unwrapped
from tests.tuner.search.train.test_host_checkpoints import OLMOE, spec_with
from tests.tuner.search.train.testing import planned
from tuner.cli.plan_text import plan_text
from tuner.config.host_memory import RENAMED
from tuner.errors import SpecError
from tuner.goals.train_notes import analytic_notes, with_assumptions
from tuner.search.reasons import HOST_LIMIT
from tuner.spec.cluster import Cluster, Host
from tuner.spec.goal import Checkpoint
from tuner.spec.huggingface.read import read_model
from tuner.spec.search import Search
from tuner.spec.spec import Spec

PARAMETERS = 6.92e9
GIB = 2**30
FEW = {
    "tensor_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "expert_model_parallel_size": (8,),
    "micro_batch_size": (1,),
    "activation_offload": (False,),
}


def spec_on(host: Host | None, *, checkpoint: Checkpoint | None = None, **search: Any) -> Spec:
    """OLMoE on two H100 servers with hosts of some memory."""
    spec = spec_with(checkpoint or Checkpoint())
    model = {"model": read_model(OLMOE), "model_path": OLMOE}
    pool = spec.cluster.pools[0].model_copy(update={"host": host})
    limits = Search(**(FEW | search))
    return spec.model_copy(
        update={**model, "cluster": Cluster(pools=(pool,)), "search": limits, "failures": None}
    )


def test_an_offloaded_optimizer_is_counted_by_node_and_held_to_the_host() -> None:
    offloading: dict[str, Any] = {"optimizer_offload": (True,)}
    unknown = planned(spec_on(None, **offloading))
    host = present(present(unknown.predicted).host_memory)
    # 16 bytes a parameter over two nodes, the head of another size than the layers.
    (needed,) = host.parts.values()
    assert needed == pytest.approx(16 * PARAMETERS / 2, rel=0.15)
    text = unwrapped(plan_text(unknown, folder=Path("plan")))
    assert "not checked: state cluster.pools[].host: {memory, reserve}" in text
    enough = planned(spec_on(Host(memory=2 * needed + 1, reserve=needed), **offloading))
    assert enough.decision == unknown.decision
    assert present(present(enough.predicted).host_memory).limit_bytes == needed + 1
    assert "that may be used" in unwrapped(plan_text(enough, folder=Path("plan")))


def test_a_host_with_too_little_memory_is_named_with_what_would_do() -> None:
    less = planned(spec_on(Host(memory=32 * GIB), optimizer_offload=(True,)))
    assert less.decision is None
    assert HOST_LIMIT in less.binding_constraint
    offer = next(one for one in less.relaxations if one.limit == HOST_LIMIT)
    assert "of a node's memory instead of 32.0 GiB: cluster.pools[].host" in offer.change
    assert present(offer.decision).optimizer_offload
    # Left open, the plan keeps the optimizer on the devices.
    both = planned(spec_on(Host(memory=32 * GIB), optimizer_offload=(True, False)))
    assert not present(both.decision).optimizer_offload


def test_copies_of_checkpoints_count_and_have_room_or_are_not_made() -> None:
    # 14 bytes a parameter over two nodes wait in memory for a write in the background.
    saving = Checkpoint(asynchronous=True, bandwidth=1e9)
    plan = planned(spec_on(None, checkpoint=saving))
    (copies,) = present(present(plan.predicted).host_memory).parts.values()
    assert copies == pytest.approx(14 * PARAMETERS / 2, rel=0.01)
    small = Host(memory=copies - 1)
    with refused(SpecError, "copies of checkpoints", match="a node has no memory for copies"):
        planned(spec_on(small, checkpoint=saving))
    waiting = planned(spec_on(small, checkpoint=Checkpoint(asynchronous="auto", bandwidth=1e9)))
    assert present(present(waiting.predicted).run).checkpoint_in_background is False
    assert present(waiting.predicted).host_memory is None
    notes = with_assumptions(waiting).provenance.notes
    assert any("waits until" in note and "more of a node's memory than" in note for note in notes)


def test_the_older_name_tells_the_newer_one() -> None:
    older = spec_on(None, checkpoint=Checkpoint(levels="auto", host_memory=512 * GIB))
    assert RENAMED in analytic_notes(older, {}, calibrated=True)
    assert RENAMED not in analytic_notes(spec_on(None), {}, calibrated=True)
