import re
from pathlib import Path

import pytest

from tests.benchmarks.published_serving import documented
from tests.benchmarks.serving_accuracy import after_launches, main
from tests.expect import present
from tuner.backtest.serving.launches import parse_launch
from tuner.backtest.serving.prediction import MeanLatency
from tuner.backtest.serving.scores import Pair

HEADER = (
    "id,silicon_data_source,backend,model_path,system,precision,mode,isl,osl,tp_size,"
    "silicon_ttft_ms,silicon_tpot_ms"
)
LINE = (
    "{id},db-dump/1; silicon_concurrency={id},vllm,{model},h200_sxm,fp8,agg,512,64,4,5{id},"
    "{tpot_ms}"
)


def test_tokens_of_hopper_are_predicted_within_a_fifth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.csv"
    models = (("Llama-3.1-70B", 11.5), ("Llama-3.1-8B", 3.5), ("Qwen3-32B", 7))
    lines = [
        LINE.format(id=number, model=model, tpot_ms=tpot_ms)
        for number in range(1, 13)
        for model, tpot_ms in [models[number % 3]]
    ]
    runs.write_text("\n".join([HEADER, *lines]) + "\n")
    main([str(runs)])
    printed = capsys.readouterr().out
    # About 9 %; a step time made 1.5 times as long gives about 50 %.
    line = r"^hopper, uncalibrated: 12 predictions\n  TPOT median: ([\d.]+) %"
    assert float(present(re.search(line, printed, re.MULTILINE))[1]) < 20.0
    assert "eligible rows predicted: 100.00 %, aim 98.0 %, reached" in printed


def launches_of_one_model(count: int) -> list[Pair]:
    """Launches that take twice the predicted time."""
    line = LINE.format(id=1, model="Llama-3.1-8B", tpot_ms=9)
    cells = dict(zip(HEADER.split(","), line.split(","), strict=True))
    launch = parse_launch(documented(cells), number=1)
    latency = MeanLatency(ttft_s=launch.ttft_s / 2.0, tpot_s=launch.tpot_s / 2.0)
    return [Pair(launch=launch, latency=latency)] * count


def test_three_launches_of_the_same_take_off_most_of_an_error() -> None:
    after = after_launches(launches_of_one_model(6), launches=3, draws=2, seed=0)
    assert len(after.pairs) == 12
    # Three quarters of the logarithm: the prior is worth one launch.
    for pair in after.pairs:
        assert pair.launch.tpot_s / pair.latency.tpot_s == pytest.approx(2**0.25)
    assert after.held["tpot"] == 1.0


def test_too_few_launches_are_left_out() -> None:
    assert after_launches(launches_of_one_model(3), launches=3, draws=1, seed=0).pairs == []
