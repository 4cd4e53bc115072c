"""Every field of a placement through every wording, engine's file and the reader of such files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from solvers.placement.ranks import Ranks
from tests.tuner.engines.placement.testing import (
    sample_decision,
    sample_placement,
    without_replicas,
)
from tests.tuner.engines.testing import write_emitted
from tuner.config.place import PlaceDecision
from tuner.engines.place_writers import emit_placement, refusals
from tuner.engines.placement.targets import PLACE_TARGETS
from tuner.errors import SpecError
from tuner.goals.registry import load_goal
from tuner.spec.current_placement import read_placement

GOAL = load_goal("place")

_OTHER_ROWS: Final = ((0, 1, 2, 3, 4, 5, 0, 3), (5, 4, 3, 2, 1, 0, 4, 1))
FIELDS: Final[Mapping[str, tuple[PlaceDecision, PlaceDecision]]] = {
    "physical_to_logical": (sample_decision(), sample_decision(physical_to_logical=_OTHER_ROWS)),
    "layer_ids": (sample_decision(), sample_decision(layer_ids=(2, 3))),
    "num_experts": (
        sample_decision(),
        sample_decision(
            num_experts=4,
            physical_to_logical=((0, 1, 2, 3, 0, 1, 2, 3), (3, 2, 1, 0, 3, 2, 1, 0)),
        ),
    ),
    "num_layers": (sample_decision(), sample_decision(num_layers=8)),
    "ranks": (
        sample_decision(),
        sample_decision(ranks=8, ranks_per_node=8, slots_per_rank=(1,) * 8),
    ),
    "ranks_per_node": (sample_decision(), sample_decision(ranks_per_node=2)),
    "slots_per_rank": (sample_decision(), sample_decision(slots_per_rank=(3, 1, 2, 2))),
}
"""By field: two placements that differ in it, and in what must follow."""

READ: Final[Mapping[str, str]] = {
    "sglang": "*.json",
    "vllm-ascend": "*.json",
    "trtllm": "moe_load_balancer.yaml",
    "eplb": "physical_to_logical_map.npy",
}
"""Engines that start from a file, and which of theirs it is."""
UNREAD: Final[Mapping[str, str]] = {
    "vllm": "reads no file: the engine moves experts by itself while it runs",
    "megatron": "a program that writes a checkpoint with the experts in order",
}


def test_every_field_has_a_pair_of_placements() -> None:
    assert set(FIELDS) == set(PlaceDecision.model_fields)
    assert set(READ) | set(UNREAD) == set(PLACE_TARGETS)
    for field, (before, after) in FIELDS.items():
        assert getattr(before, field) != getattr(after, field), field


def test_placements_that_differ_in_a_field_read_differently(none_of: Any) -> None:
    failures = []
    for field, (before, after) in FIELDS.items():
        if not GOAL.differences(before, after):
            failures.append(f"explain's changes: none where {field} differs")
        if field != "physical_to_logical" and GOAL.words(before) == GOAL.words(after):
            failures.append(f"a cell of explain: {field} reads alike")
    none_of(failures)


def test_every_file_of_an_engine_reads_back_to_its_placement(none_of: Any, tmp_path: Path) -> None:
    failures = []
    every = [one for pair in FIELDS.values() for one in pair] + [without_replicas()]
    read = dict.fromkeys(READ, 0)
    for number, decision in enumerate(every):
        for engine, pattern in READ.items():
            if refusals(engine, decision):
                continue
            folder = tmp_path / str(number) / engine
            write_emitted(folder, emit_placement(engine, sample_placement(decision)))
            for path in sorted(folder.rglob(pattern)):
                at = f"{engine}/{path.name} ({number})"
                count = decision.ranks
                ranks = Ranks(
                    slots_G=np.array(decision.slots_per_rank),
                    node_G=np.arange(count) // decision.ranks_per_node,
                    speed_G=np.ones(count),
                )
                try:
                    found, held = read_placement(
                        path,
                        layer_ids=decision.layer_ids,
                        num_experts=decision.num_experts,
                        ranks=ranks,
                    )
                except SpecError as error:
                    failures.append(f"{at}: {error}")
                    continue
                read[engine] += 1
                rows = tuple(tuple(map(int, row)) for row in found.expert_LS)
                if rows != decision.physical_to_logical:
                    failures.append(f"{at}: {decision.physical_to_logical} reads back as {rows}")
                if tuple(map(int, held.slots_G)) != decision.slots_per_rank:
                    failures.append(f"{at}: other slots of ranks")
    failures += [f"{engine}: no file was read" for engine, count in read.items() if not count]
    none_of(failures)
