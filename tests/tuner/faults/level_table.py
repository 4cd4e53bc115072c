"""Policies, durations and failure rates that the formulas and the simulation are compared on."""

from dataclasses import dataclass

from tuner.faults.levels import FailureClass, FailureRates, Level, RunSeconds, SavePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row."""

    policy: SavePolicy
    seconds: RunSeconds
    rates: FailureRates


def seconds(
    *,
    step_s: float = 10.0,
    stall_s: tuple[float, float] = (1.0, 4.0),
    durable_after_s: tuple[float, float] = (0.0, 0.0),
    host_restart_s: tuple[float, float] = (60.0, 120.0),
    shared_restart_s: tuple[float, float, float] = (100.0, 200.0, 300.0),
) -> RunSeconds:
    """Durations by host and shared, and by class of failure."""
    levels, classes = tuple(Level), tuple(FailureClass)
    restart_s = {
        (Level.SHARED, kind): value for kind, value in zip(classes, shared_restart_s, strict=True)
    }
    restart_s |= {
        (Level.HOST, kind): value for kind, value in zip(classes, host_restart_s, strict=False)
    }
    return RunSeconds(
        step_s=step_s,
        stall_s=dict(zip(levels, stall_s, strict=True)),
        durable_after_s=dict(zip(levels, durable_after_s, strict=True)),
        restart_s=restart_s,
    )


def case(
    host: int | None,
    shared: int,
    times: RunSeconds,
    rates: tuple[float, float, float],
    *,
    replicas: int = 0,
    asynchronous: bool = False,
) -> Case:
    """A row; mean seconds between failures by class, 0: never."""
    per_s = [0.0 if mean_s == 0.0 else 1.0 / mean_s for mean_s in rates]
    return Case(
        policy=SavePolicy(
            host_interval_steps=host,
            shared_interval_steps=shared,
            replicas=replicas,
            asynchronous=asynchronous,
        ),
        seconds=times,
        rates=FailureRates(process_per_s=per_s[0], node_per_s=per_s[1], together_per_s=per_s[2]),
    )


BEHIND = seconds(durable_after_s=(8.0, 35.0))
FAR_BEHIND = seconds(durable_after_s=(3.0, 110.0))
LONG_RESTARTS = seconds(
    host_restart_s=(300.0, 900.0), shared_restart_s=(700.0, 1200.0, 1500.0), stall_s=(0.5, 9.0)
)

TABLE = {
    "one level": case(None, 12, seconds(), (900.0, 1500.0, 4000.0)),
    "one level, in the background": case(
        None, 12, BEHIND, (900.0, 1500.0, 4000.0), asynchronous=True
    ),
    "no replica": case(3, 12, seconds(), (500.0, 3000.0, 0.0)),
    "no replica, in the background": case(3, 12, BEHIND, (500.0, 3000.0, 0.0), asynchronous=True),
    "one replica": case(3, 15, seconds(), (800.0, 900.0, 3000.0), replicas=1),
    "one replica, the write overlaps with a segment": case(
        2, 12, BEHIND, (600.0, 900.0, 2500.0), replicas=1, asynchronous=True
    ),
    "the write overlaps with most of the period": case(
        2, 14, FAR_BEHIND, (400.0, 600.0, 1500.0), replicas=1, asynchronous=True
    ),
    "the write ends in the last segment": case(
        3,
        12,
        seconds(durable_after_s=(4.0, 111.0)),
        (500.0, 800.0, 1200.0),
        replicas=1,
        asynchronous=True,
    ),
    "copies on hosts wait for a long write": case(
        1,
        12,
        seconds(durable_after_s=(1.0, 100.0)),
        (400.0, 600.0, 1500.0),
        replicas=1,
        asynchronous=True,
    ),
    "a host copy is durable when the next is due": case(
        1,
        6,
        seconds(durable_after_s=(10.0, 15.0)),
        (300.0, 500.0, 1500.0),
        replicas=2,
        asynchronous=True,
    ),
    "the background is waited for": case(
        2, 8, BEHIND, (600.0, 900.0, 2500.0), replicas=1, asynchronous=False
    ),
    "restarts are interrupted": case(4, 12, LONG_RESTARTS, (900.0, 1500.0, 6000.0), replicas=1),
    "restarts are interrupted, in the background": case(
        4,
        12,
        seconds(
            durable_after_s=(30.0, 60.0),
            host_restart_s=(300.0, 900.0),
            shared_restart_s=(700.0, 1200.0, 1500.0),
        ),
        (900.0, 1500.0, 6000.0),
        replicas=1,
        asynchronous=True,
    ),
    "two segments": case(5, 10, BEHIND, (0.0, 700.0, 1200.0), replicas=1, asynchronous=True),
    "most failures take everything": case(
        3, 9, BEHIND, (4000.0, 4000.0, 400.0), replicas=1, asynchronous=True
    ),
}
