from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import serving_agreement

HEADER = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,"
    "tp_size,silicon_ttft_ms,silicon_tpot_ms"
)
LINE = (
    "{c},db-dump/1; silicon_concurrency={c},{engine},0.19.0,{model},h200_sxm,fp8,agg,{i},256,4,"
    "5{c},9"
)


def test_plan_and_backtest_agree_on_launches_of_every_engine(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    # Both draw lengths of their own. TensorRT-LLM takes whole prompts, so that one of which almost
    # four fill a step of 16,384 tokens (512 * 9) would tell the draws apart, not the predictions.
    lines = [
        LINE.format(c=count, engine=engine, model=model, i=512 * count)
        for count, engine in ((4, "vllm"), (7, "sglang"), (8, "trtllm"))
        for model in ("Llama-3.1-70B", "Llama-3.1-8B")
    ]
    runs.write_text("\n".join([HEADER, *lines]) + "\n")
    result, left = serving_agreement.both_ways(runs, [])
    assert (len(result), left) == (6, 0)
    ratios = np.array([np.divide(row.planned, row.backtested) for row in result])
    assert ratios == pytest.approx(np.ones_like(ratios), rel=0.06)
    assert np.median(ratios, axis=0) == pytest.approx(1.0, rel=0.02)
