"""Every function of `tuner.api` once: python examples/api.py [FOLDER]. About a minute.

`api.plan` plans whatever the spec's goal is. A plan is a value; nothing is written until
`api.write` is called.
"""

import sys
import tempfile
from pathlib import Path

from tuner import api

HERE = Path(__file__).parent


def training(out: Path) -> None:
    """A training run: plan, write, explain, and what-ifs."""
    made = api.plan(HERE / "worked" / "two-pools" / "spec.yaml", time_limit_s=10.0)
    assert made.plan.decision is not None
    assert made.plan.predicted is not None
    print(made.plan.decision.pipeline_model_parallel_size, made.plan.predicted.step_time_s)
    api.write(out / "train", made)

    actual = api.what_ifs(
        out / "train" / "plan.json", api.parse_changes("memory=-20%"), time_limit_s=10.0
    )
    for outcome in (actual.base, *actual.outcomes):
        print(outcome.says, outcome.status, outcome.figures.get("step_time_s"))

    page = api.report(out / "train", with_what_if=False)
    text = api.rendered(page, kind="md")
    assert isinstance(text, str)
    print(text.splitlines()[0])

    explained = api.explain(out / "train", changes=())
    for rival in explained.why.rivals:
        print(rival.decision, rival.slower_s, rival.lost_by)

    compared = api.compare([HERE / "checks" / "train-two-pools", out / "train"])
    print(compared.verdict)


def deployment(out: Path) -> None:
    """A deployment: instances that serve the traffic within the SLO targets."""
    made = api.plan(HERE / "serving" / "mixed-pool.yaml", time_limit_s=10.0)
    assert isinstance(made, api.Deployed)
    assert made.plan.decision is not None
    for group in made.plan.decision.instances:
        print(group.role, group.pool, group.count, "x", group.devices)
    written = api.write(out / "serve", made)
    print(*written.files)


def placement(out: Path) -> None:
    """A placement of experts, evaluated on hold-out passes."""
    made = api.plan(f"{HERE}/placement/balance.yaml", time_limit_s=5.0)  # paths may be text
    assert isinstance(made, api.Placed)
    assert made.plan.verdict is not None
    print(made.plan.verdict.word, made.plan.verdict.gain_ratio)
    api.write(f"{out}/place", made)
    print(api.read_any_plan(out / "place").certificate.objective)


def launches_of_today() -> None:
    """Price an existing launch, and the smallest change that beats it."""
    folder = HERE / "worked" / "mixtral-8x7b-64-a100"
    actual = api.estimate(folder / "spec.yaml", launch=str(folder / "public.sh"))
    print(actual.step_time_s, actual.fits)

    served = api.estimate_serving(
        HERE / "serving" / "mixed-pool.yaml",
        launch="vllm serve M --tensor-parallel-size 4 --max-num-seqs 64",
        pool="h100",
    )
    print(served.fits, served.kv_tokens)


def tables() -> None:
    """Tables as data frames: candidates, trials, measured kernels, a comparison."""
    plan = api.read_any_plan(HERE / "checks" / "train-mixtral")
    print(plan.candidates()[["kind", "decision", "step_time_s"]].head(3))
    tried = HERE / "profiles" / "epyc-quickstart-1"
    verified = api.read_verified(tried)
    assert verified is not None
    print(verified.trials()[["status", "predicted_step_s", "measured_step_s"]])
    gemms = api.read_profile(tried / "used" / "profile").table("gemm")
    print(gemms.groupby(["m", "n", "k"])["median_s"].min())
    compared = api.compare([HERE / "checks" / name for name in ("train-mixtral", "train-qwen3")])
    print(compared.table().pivot_table(index="name", columns="plan", values="value"))


def checked() -> None:
    """Re-plan accepted plans."""
    actual = api.check(HERE / "checks", only=("train-llama-dense",))
    for one in actual.scenarios:
        print(one.name, one.verdict.value, one.reason)


def main() -> None:
    """Run every example, in the folder named or in a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        training(out)
        deployment(out)
        placement(out)
        launches_of_today()
        tables()
        checked()


if __name__ == "__main__":
    main()
