"""Emits SGLang's `init_expert_location.json` and a `run.sh` with the flags that must agree with it.

The file has one key, `physical_to_logical_map`, because the engine passes every other key on as an
argument. It has a row for each decoder layer. A layer without planned experts (dense, or not
recorded) has them in order; under `lp`, whose solvers are built for every row and limited in size,
it repeats the planned layer with the smallest program. Read from SGLang 0.5.23:
sglang/srt/eplb/expert_location.py and sglang/srt/arg_groups (`static` and `lp` need an all-to-all
backend, `dynamic` runs with and without).
"""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from tuner.catalog.place_rules import NO_BACKEND, dispatch_offers, rows_misfit
from tuner.catalog.serve_rules.manifest import DEEPEP
from tuner.config.place import PlaceDecision
from tuner.config.serve import Instances
from tuner.engines.files import EmittedFile
from tuner.engines.placement.launch_script import num_nodes, run_script
from tuner.engines.sglang.capabilities import PLACE_TARGET
from tuner.errors import UnsuitedPlacementError
from tuner.plans.place import MadeFor, PlacePlan, VerifiedPlacement
from tuner.spec.lp_memory import program_shape
from tuner.spec.place import Dispatch

SERVED_FILE: Final = "init_expert_location.json"

_FORMER: Final[Mapping[Dispatch | None, tuple[str, str]]] = {
    None: ("static", "deepep"),
    Dispatch.STATIC: ("static", "deepep"),
    Dispatch.LP: ("lp", "deepep"),
    Dispatch.DYNAMIC: ("dynamic", "none"),
    Dispatch.EVEN: ("dynamic", "none"),
}
"""Dispatch rule and backend of older plans, which do not store them."""


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the map and the script.

    Raises:
        UnsuitedPlacementError: the engine cannot be started with the rule on this placement.
        ValueError: the number of decoder layers is not known.
    """
    decision = verified.decision
    mark = planned_mark(verified.plan)
    rows = _rows(decision, solves_program=mark.dispatch == Dispatch.LP.value)
    for offer in dispatch_offers(PLACE_TARGET, mark.dispatch, mark.a2a_backend):
        misfit = rows_misfit(PLACE_TARGET, offer, rows, ranks=decision.num_devices)
        if misfit is not None:
            raise UnsuitedPlacementError(f"{misfit}; plan again without dispatch lp")
    location = json.dumps({"physical_to_logical_map": rows}, separators=(",", ":"))
    nodes = num_nodes(verified)
    several = (f"--nnodes {nodes}", '--node-rank "$node"', '--dist-init-addr "$MASTER_ADDR:20000"')
    command = (
        "python -m sglang.launch_server",
        f'--init-expert-location "$here/{SERVED_FILE}"',
        f"--ep-num-redundant-experts {decision.redundant_experts}",
        f"--tp-size {decision.num_devices}",
        f"--ep-size {decision.num_devices}",
        f"--moe-a2a-backend {mark.a2a_backend}",
        f"--ep-dispatch-algorithm {mark.dispatch}",
        *(several if nodes > 1 else ()),
        '"$@"',
    )
    return (
        EmittedFile(path=PurePosixPath(SERVED_FILE), text=location + "\n"),
        run_script(
            verified,
            usage=("Usage: ./run.sh --model-path MODEL [more flags of the engine]",),
            command=command,
        ),
    )


def planned_mark(plan: PlacePlan) -> MadeFor:
    """Return what the plan's placement for SGLang was made for, also if it is not stored."""
    for mark in plan.made_for:
        if mark.engine == "sglang":
            return mark
    # A rule that the engine lacks was evaluated for another engine.
    dispatch, backend = _FORMER.get(plan.goal.dispatch, _FORMER[None])
    ranks = plan.goal.ranks
    return MadeFor(
        engine="sglang",
        release="",
        nodes=-(-ranks // (plan.goal.ranks_per_node or ranks)),
        ep_size=ranks,
        dispatch=dispatch,
        a2a_backend=backend,
    )


def served_rule(mark: MadeFor, group: Instances) -> dict[str, str]:
    """Return the dispatch rule and backend of an instance that serves a placement.

    The rule is the planned one where the instance has an all-to-all backend exactly if the plan
    does, otherwise `dynamic`: the only rule without a backend, and with one the nearest to an even
    split.
    """
    has_backend = group.a2a_backend in DEEPEP
    as_planned = has_backend == (mark.a2a_backend != NO_BACKEND)
    return {
        "dispatch": mark.dispatch if as_planned else "dynamic",
        "a2a_backend": "deepep" if has_backend else NO_BACKEND,
    }


def _rows(decision: PlaceDecision, *, solves_program: bool) -> tuple[tuple[int, ...], ...]:
    """Return the experts of every decoder layer's slots."""
    if decision.num_layers is None:
        raise ValueError("a row for every decoder layer needs their number")
    unplanned = tuple(slot % decision.num_experts for slot in range(decision.num_slots))
    if solves_program:
        unplanned = min(
            decision.physical_to_logical,
            key=lambda row: program_shape(row, ranks=decision.num_devices),
        )
    planned = dict(zip(decision.layer_ids, decision.physical_to_logical, strict=True))
    return tuple(planned.get(layer, unplanned) for layer in range(decision.num_layers))
