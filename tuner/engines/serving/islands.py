"""A deployment of islands as one deployment per island, and the router in front of them.

Each island is emitted into a folder of its own, as a plan with its share of the requests.
`front/front.sh` starts nginx, which splits requests over the islands' routers by weight
(`upstream`, nginx documents, ngx_http_upstream_module).
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from tuner.config.serve import Island, Role, ServeDecision, ServeRouter
from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.router import FRONT_NGINX
from tuner.engines.serving.shape import dns_label
from tuner.engines.serving.statement import brief_statement
from tuner.plans.serve import ServePrediction, VerifiedServing
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.routers import RouterPolicy

FRONT: Final = "front"
"""Folder of the router in front."""
WHOLE: Final = 1000
"""Sum of the islands' weights."""


def island_parts(verified: VerifiedServing) -> Iterator[tuple[str, VerifiedServing]]:
    """Yield each island as a deployment of its own, by its folder."""
    for island in verified.decision.islands:
        decision = verified.decision.model_copy(
            update={
                "instances": tuple(
                    group for group in verified.decision.instances if group.island == island.name
                ),
                "islands": (island,),
            }
        )
        pools = {group.pool for group in decision.instances}
        transfers = tuple(
            transfer
            for transfer in verified.decision.handovers
            if {transfer.from_pool, transfer.to_pool} <= pools
        )
        router = _router(verified.decision.router, decision)
        decision = decision.model_copy(update={"handovers": transfers, "router": router})
        predicted = _share(verified.predicted, island)
        plan = verified.plan.model_copy(
            update={
                "goal": _goal(verified.plan.goal, island),
                "decision": decision,
                "predicted": predicted,
            }
        )
        yield (
            dns_label(island.name),
            verified.model_copy(
                update={"plan": plan, "decision": decision, "predicted": predicted}
            ),
        )


def of_pools_used(verified: VerifiedServing) -> VerifiedServing:
    """Return the deployment reduced to the pools that it uses, with their engine as the goal's.

    Targets that name one of the plan's engines then name that one.
    """
    plan = verified.plan
    goal, used = plan.goal, {group.pool for group in verified.decision.instances}
    pools = tuple(pool for pool in plan.cluster.pools if pool.name in used)
    engines = {pool.name: goal.engine_on(pool.name) for pool in pools}
    if len(pools) == len(plan.cluster.pools) and goal.engine in engines.values():
        return verified
    goal_engine = goal.engine if goal.engine in engines.values() else engines[pools[0].name]
    names = {goal.engine.name, *(engine.name for engine in goal.engines.values())}
    links = tuple(link for link in plan.cluster.links if set(link.between) <= used)
    stated = {pool: engine for pool, engine in goal.engines.items() if pool in used}
    changes = {
        "cluster": plan.cluster.model_copy(update={"pools": pools, "links": links}),
        "goal": goal.model_copy(update={"engine": goal_engine, "engines": stated}),
        "emit": tuple(
            dict.fromkeys(goal_engine.name if target in names else target for target in plan.emit)
        ),
    }
    is_part = verified.is_part or len(pools) < len(plan.cluster.pools)
    return verified.model_copy(update={"plan": plan.model_copy(update=changes), "is_part": is_part})


def front_files(verified: VerifiedServing) -> tuple[EmittedFile, ...]:
    """Return the router in front of the islands."""
    islands = verified.decision.islands
    names = [_variable(island) for island in islands]
    checks = "".join(
        f': "${{{name}:?set it to the address of that island, such as http://host:8000}}"\n'
        for name in names
    )
    lists = " ".join(f'"${name}"' for name in names)
    weights = " ".join(str(max(1, round(WHOLE * island.share_ratio))) for island in islands)
    text = (
        "#!/usr/bin/env bash\n"
        + comment(
            (
                *brief_statement(verified),
                "",
                f"Usage: {' '.join(f'{name}=http://host:port' for name in names)} ./front.sh",
                "Each is the router of an island, or its only instance; start them first.",
            )
        )
        + "set -euo pipefail\n"
        + checks
        + f"WORKER=({lists})\nWEIGHTS=({weights})\n"
        + FRONT_NGINX
    )
    return (EmittedFile(path=PurePosixPath("front.sh"), text=text, executable=True),)


def _variable(island: Island) -> str:
    return f"{dns_label(island.name).replace('-', '_').upper()}_URL"


def _router(router: ServeRouter | None, decision: ServeDecision) -> ServeRouter | None:
    """Return the router of one island; a role with one instance is round-robin."""
    if router is None:
        return None
    last = sum(group.count for group in decision.instances if group.role is Role.DECODE)
    first = sum(group.count for group in decision.instances) - last
    changes: dict[str, object] = {}
    if first == 1 and router.ranks is None:
        changes = {"policy": RouterPolicy.ROUND_ROBIN, "cache_threshold": None}
    if last == 1:
        changes["decode_policy"] = RouterPolicy.ROUND_ROBIN
    return router.model_copy(update=changes)


def _goal(goal: ServeGoal, island: Island) -> ServeGoal:
    return goal.model_copy(update={"traffic": goal.traffic.scaled(island.share_ratio)})


def _share(predicted: ServePrediction, island: Island) -> ServePrediction:
    """Return the throughput of one island; latency is that of all islands together."""
    share = island.share_ratio
    return predicted.model_copy(
        update={
            "requests_per_s": share * predicted.requests_per_s,
            "output_tokens_per_s": share * predicted.output_tokens_per_s,
        }
    )
