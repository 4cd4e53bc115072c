"""What a plan decides about failures, in a sentence each."""

from collections.abc import Iterator

from tuner.faults.forecast import RunForecast
from tuner.report.checkpoint_levels import levels_sentence
from tuner.report.fewer_nodes import without_spare_sentence
from tuner.report.spare_choice import spares_sentence


def run_decisions(run: RunForecast) -> Iterator[tuple[str, str]]:
    """Yield a label and a sentence for each decision that the spec left to the plan."""
    for label, sentence in (
        ("checkpoints", levels_sentence(run)),
        ("spares", spares_sentence(run)),
        ("without spare", without_spare_sentence(run)),
    ):
        if sentence:
            yield label, sentence
