"""Checkpoint levels in words."""

from typing import Any

from tests.expect import contains
from tests.tuner.engines.test_checkpoints import RUN
from tuner.faults.levels import Level
from tuner.faults.run_shares import CheckpointLevels, PolicyRatio
from tuner.report.run_section import interval_doubt, levels_sentence, run_notes

BOTH = (Level.HOST, Level.SHARED)
COMPARED = (
    PolicyRatio(
        levels=BOTH,
        replicas=1,
        host_interval_steps=30,
        shared_interval_steps=120,
        effective_time_ratio=0.9,
    ),
    PolicyRatio(levels=(Level.SHARED,), shared_interval_steps=70, effective_time_ratio=0.85),
    PolicyRatio(
        levels=BOTH,
        host_interval_steps=40,
        shared_interval_steps=80,
        effective_time_ratio=0.8123,
    ),
)


def levels(**changes: Any) -> CheckpointLevels:
    values: dict[str, Any] = {
        "levels": BOTH,
        "replicas": 1,
        "host_interval_s": 60.0,
        "host_interval_steps": 30,
        "host_bytes": 7 * 2**30,
        "host_restore_ratio": 0.93,
        "compared": COMPARED,
        "left_out": ("no third node",),
        "num_priced": 1234,
    }
    return CheckpointLevels(**(values | changes))


def test_the_chosen_levels_are_said_in_a_line() -> None:
    assert levels_sentence(RUN.model_copy(update={"checkpoint_levels": levels()})) == (
        "every 30 steps (1.00 min) in the memory of every machine and of another machine, 7.00 GiB"
        " a machine; every 120 steps (4.00 min) on shared storage"
    )
    for replicas, words in ((0, "every machine, 7.00"), (2, "every machine and of 2 others, 7.00")):
        run = RUN.model_copy(update={"checkpoint_levels": levels(replicas=replicas)})
        assert words in levels_sentence(run)
    assert levels_sentence(RUN) == ""
    only = levels(levels=(Level.SHARED,), replicas=0, host_interval_steps=None)
    assert levels_sentence(RUN.model_copy(update={"checkpoint_levels": only})) == ""


def test_notes_compare_with_every_other_policy() -> None:
    assert list(run_notes(RUN)) == []
    notes = list(run_notes(RUN.model_copy(update={"checkpoint_levels": levels()})))
    assert notes == [
        "checkpoints on hosts with 1 replica let 90.00 % of the time train; at their best intervals"
        " on shared storage alone 85.00 %, on hosts without replicas 81.23 % (each of 1,234"
        " policies is computed exactly)",
        "93.0 % of restarts continue from copies on hosts, the others from shared storage",
        "not possible: no third node",
    ]
    only = levels(
        levels=(Level.SHARED,), replicas=0, host_interval_steps=None, host_restore_ratio=None
    )
    first, *others = run_notes(RUN.model_copy(update={"checkpoint_levels": only}))
    assert first.startswith("checkpoints on shared storage alone let 90.00 %")
    assert others == ["not possible: no third node"]


def test_checkpoints_that_keep_storage_busy_are_questioned() -> None:
    # 1.3 TiB every 2.4 minutes at 40 GB/s: 36 s of every 144 are writing, 858e12 bytes a day.
    size, every_s = int(1.43e12), 144.0
    often = RUN.model_copy(
        update={
            "checkpoint_bytes": size,
            "checkpoint_interval_s": every_s,
            "checkpoint_stall_s": 0.1,
            "checkpoint_write_s": size / 40e9,
            "checkpoint_in_background": True,
            "failure_interval_s": 88_000.0,
        }
    )
    said = interval_doubt(often)
    contains(
        said,
        "1.30 TiB every 2.40 min are 780 TiB a day",
        "storage busy 24.8 % of the time",
        "no less than 35.8 s apart, as one must end before the next begins",
    )
    # Four times as long loses 216 s more to a failure in 88,000 s, 0.25 %, and stops less, 0.05 %.
    assert "every 9.60 min would cost no more than 0.2 % of the time" in said
    # Training that waits has no such floor; a write each half hour is no question.
    waits = often.model_copy(update={"checkpoint_in_background": False})
    assert "no less than" not in interval_doubt(waits)
    assert interval_doubt(often.model_copy(update={"checkpoint_interval_s": 1800.0})) == ""
    assert interval_doubt(RUN) == ""
    assert "not 20.0 s" in interval_doubt(often, launched_s=20.0)
