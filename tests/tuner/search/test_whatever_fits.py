"""Whatever the limit: no decision that a plan names is predicted to need more than there is."""

from pathlib import Path

import pytest
import yaml

from tests.expect import present
from tuner.api import plan

EXAMPLES = Path(__file__).parents[3] / "examples"
PROFILE = EXAMPLES / "profiles/epyc-2-ranks/used/profile"
USABLE_RATIO = 0.95
MIB = 2**20


@pytest.mark.parametrize(
    "limit_mib", [216, *(pytest.param(one, marks=pytest.mark.slow) for one in (208, 220))]
)
def test_no_named_decision_needs_more_than_is_usable(tmp_path: Path, limit_mib: int) -> None:
    spec = yaml.safe_load((EXAMPLES / "quickstart/spec.yaml").read_text(encoding="utf-8"))
    spec["model"] = str(EXAMPLES / "quickstart" / spec["model"])
    routing = spec["goal"]["routing"]
    routing["path"] = str(EXAMPLES / "quickstart" / routing["path"])
    (pool,) = spec["cluster"]["pools"]
    pool["memory_per_device"] = f"{limit_mib}MiB"
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    made = plan(tmp_path / "spec.yaml", profiles=[PROFILE], top=20).plan
    named = [present(made.predicted), *(other.predicted for other in made.runners_up)]
    assert len(named) > 5
    assert max(max(one.peak_memory_bytes) for one in named) <= USABLE_RATIO * limit_mib * MIB
