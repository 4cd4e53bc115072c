"""Rules for the placements that an engine accepts (its `PLACE_TARGET`), and the way out.

Engines with one flat row per layer read slot p as one of rank p // (slots / ranks), so ranks must
have equally many.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.devices.datasheet import Generation
from tuner.spec.cluster import Pool
from tuner.spec.lp_memory import lp_misfit, smallest_lp_misfit

NO_BACKEND: Final = "none"
"""Value of `--moe-a2a-backend` under which every rank all-gathers the tokens and reduces its
part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOffer:
    """One dispatch rule of an engine, with or without an all-to-all backend."""

    name: str
    """Name of the rule in `goal.dispatch` and the engine's option."""
    rule: str
    """Model of the rule in solvers/placement/dispatch/sampling.py."""
    has_backend: bool
    is_default: bool = False
    architectures: frozenset[str] | None = None
    """Models that support it; None: all."""
    generations: frozenset[Generation] | None = None
    """Devices that support it; None: all."""
    solves_program: bool = False
    """Solves a linear program for each layer, whose size is limited (lp_memory.py)."""
    cost: str = ""
    """Description of the rule's cost at run time, beyond the loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTarget:
    """Placement rules of one engine."""

    name: str
    release: str = ""
    """Release from which rules and files were read; empty if not of one release."""
    dispatches: frozenset[str] | None = None
    """Supported values of `goal.dispatch`; None: depends on the runtime above it."""
    default_dispatch: str = "even"
    """Engine's rule over replicas where the goal names none."""
    offers: tuple[DispatchOffer, ...] = ()
    """Rules that a launch can choose from; empty: it has one."""
    a2a_backends: tuple[str, ...] = ()
    """Values of `goal.a2a_backend`, the default first; empty: its placement needs none."""
    all_layers: bool = False
    """The file has a row for every decoder layer, so their number must be known."""
    every_moe_layer: bool = False
    """The engine counts MoE layers, so all of them must have been recorded."""
    replicas: bool = True
    """An expert may have several slots."""
    twins: bool = True
    """An expert may be twice on one rank."""


IN_TURN: Final = frozenset({"even", "dynamic"})
"""Dispatch rules that choose replicas by a token's position, which is even on average."""


def dispatch_refusal(
    target: PlaceTarget,
    *,
    dispatch: str | None,
    a2a_backend: str | None,
    architecture: str | None,
    pool: Pool | None,
) -> str | None:
    """Return why the engine cannot run a rule with a backend; None if it can.

    Args:
        target: of the engine.
        dispatch: of the goal; None: the best.
        a2a_backend: of the goal; None: one that suits the rule.
        architecture: of the model; None where none is named.
        pool: machines of the ranks; None where the spec names none.
    """
    known = target.dispatches
    if dispatch is not None and known is not None and dispatch not in known:
        said = ", ".join(sorted(known))
        return f"goal.dispatch: {target.name} has no rule {dispatch!r}; it runs {said}"
    if not target.offers:
        return None
    if a2a_backend is not None and a2a_backend not in target.a2a_backends:
        said = ", ".join(target.a2a_backends)
        return f"goal.a2a_backend: {target.name} has no {a2a_backend!r}; it has {said}"
    # `even` means the engine's nearest rule, which exists with and without a backend.
    if dispatch in (None, "even"):
        return None
    backend = launch_backend(target, dispatch=dispatch, a2a_backend=a2a_backend)
    offers = dispatch_offers(target, dispatch, backend)
    if not offers:
        return (
            f"goal.dispatch: {target.name} runs {dispatch!r} with an all-to-all backend only, not"
            f" with goal.a2a_backend none; say {target.a2a_backends[0]}, or dispatch dynamic"
        )
    misfit = launch_misfit(target, offers[0], architecture=architecture, pool=pool)
    if misfit is None or not misfit.is_known:
        # A rule named by the user is accepted if the spec leaves model or devices open.
        return None
    return f"goal.dispatch: {misfit.words}; say static or dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMisfit:
    """Why a launch cannot run an offer, or why that is not known."""

    is_known: bool
    """True: the spec conflicts with it; False: the spec names no model or no devices."""
    words: str


def launch_misfit(
    target: PlaceTarget,
    offer: DispatchOffer,
    *,
    architecture: str | None,
    pool: Pool | None,
) -> LaunchMisfit | None:
    """Return why a model or its devices cannot run an offer; None if they can."""
    runs = f"{target.name} {target.release} runs {offer.name!r}"
    sheet = None if pool is None or pool.device is None else pool.sheet
    devices = " or ".join(
        sorted(generation.value.capitalize() for generation in offer.generations or ())
    )
    # What the offer allows, what the spec has, and words for both, or for a spec that names none.
    rules = (
        (
            offer.architectures,
            architecture,
            f"for {', '.join(sorted(offer.architectures or ()))}, not for {architecture}",
            "for some models, and the spec names no model",
        ),
        (
            offer.generations,
            sheet and sheet.generation,
            f"on {devices} devices, not on {sheet and sheet.name}",
            f"on {devices} devices, and the spec names no devices",
        ),
    )
    stated = [rule for rule in rules if rule[0] is not None]
    for allowed, actual, conflict, _ in stated:
        if allowed and actual and actual not in allowed:
            return LaunchMisfit(is_known=True, words=f"{runs} {conflict}")
    unknown = next((words for _, actual, _, words in stated if actual is None), None)
    return None if unknown is None else LaunchMisfit(is_known=False, words=f"{runs} {unknown}")


def rows_misfit(
    target: PlaceTarget, offer: DispatchOffer, rows: Iterable[Sequence[int]], *, ranks: int
) -> str | None:
    """Return why a placement's rows cannot run with an offer; None if they can."""
    misfit = lp_misfit(rows, ranks=ranks) if offer.solves_program else None
    return None if misfit is None else f"{target.name} {target.release}: {offer.name!r} {misfit}"


def program_refusal(
    target: PlaceTarget, *, dispatch: str | None, num_slots: int, num_experts: int, ranks: int
) -> str | None:
    """Return why no placement of a shape can run the goal's rule; None if some can."""
    if not any(offer.solves_program for offer in target.offers if offer.name == dispatch):
        return None
    misfit = smallest_lp_misfit(num_slots=num_slots, num_experts=num_experts, ranks=ranks)
    if misfit is None:
        return None
    return (
        f"goal.dispatch: {target.name} {target.release}: {dispatch!r} {misfit}, however"
        f" the {num_slots} slots on {ranks} ranks are filled; say static or dynamic"
    )


def rule_run(target: PlaceTarget, *, dispatch: str, a2a_backend: str) -> str:
    """Return the behaviour of an engine's rule and backend, by the solvers' name.

    Engines without a choice use replicas round-robin: an even split.
    """
    beside = dispatch_offers(target, dispatch, a2a_backend) if target.offers else ()
    return beside[0].rule if beside else "even"


def same_loads(first: str, second: str) -> bool:
    """Return whether two rules, by the solvers' names, give ranks the same expected loads."""
    return first == second or {first, second} <= IN_TURN


def dispatch_offers(
    target: PlaceTarget, dispatch: str | None, a2a_backend: str
) -> tuple[DispatchOffer, ...]:
    """Return the offers of a rule, or of all, with a backend."""
    has_backend = a2a_backend != NO_BACKEND
    return tuple(
        offer
        for offer in target.offers
        if offer.has_backend == has_backend and dispatch in (None, offer.name)
    )


def launch_backend(target: PlaceTarget, *, dispatch: str | None, a2a_backend: str | None) -> str:
    """Return the backend of a launch.

    Where the goal names none, it is the target's default, but `none` for `dynamic` and `even`,
    which older plans evaluated as an even split.
    """
    if a2a_backend is not None:
        return a2a_backend
    return NO_BACKEND if dispatch in ("dynamic", "even") else target.a2a_backends[0]


def shape_refusals(
    target: PlaceTarget, *, slots_per_rank: Sequence[int], num_experts: int, num_layers: int | None
) -> tuple[str, ...]:
    """Return why the engine takes no placement of this shape, a line each.

    Args:
        target: of the engine.
        slots_per_rank: of every rank.
        num_experts: logical experts of a layer.
        num_layers: decoder layers of the model, None if not known.
    """
    refused = []
    ranks, slots = len(slots_per_rank), sum(slots_per_rank)
    if len(set(slots_per_rank)) > 1:
        refused.append(
            f"{target.name}: ranks hold {min(slots_per_rank)} to {max(slots_per_rank)} slots, the"
            f" engine gives every rank as many; say one slots_per_rank, at least"
            f" {-(-num_experts // ranks)}"
        )
    if not target.replicas and slots != num_experts:
        refused.append(
            f"{target.name}: {slots} slots for {num_experts} experts, the engine keeps one copy of"
            f" an expert; say redundant_experts 0, and ranks that divide {num_experts}"
        )
    if target.all_layers and num_layers is None:
        refused.append(
            f"{target.name}: its file has a row for every decoder layer, and the recordings neither"
            " say how many there are nor begin with layer 0 and have no gap; name `model` in the"
            " spec"
        )
    return tuple(refused)


def table_refusals(
    target: PlaceTarget,
    *,
    physical_to_logical: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    slots_per_rank: Sequence[int],
) -> tuple[str, ...]:
    """Return why the engine cannot take this table: the first violation."""
    for layer, row in zip(layer_ids, physical_to_logical, strict=True):
        copies_of = Counter(
            zip(np.repeat(range(len(slots_per_rank)), slots_per_rank), row, strict=True)
        )
        (rank, expert), copies = copies_of.most_common(1)[0]
        if copies > 1 and not target.twins:
            return (
                f"{target.name}: layer {layer} holds expert {expert} twice on rank {rank}, the"
                " engine can address it once; give it fewer redundant_experts, or emit for another"
                " engine",
            )
    return ()
