"""The count of prefix hits of a trace, on four prompts."""

import importlib.util
import json
from pathlib import Path

PATH = Path(__file__).with_name("prefix_hits.py")


def test_lines_say_what_a_count_by_hand_finds(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("prefix_hits", PATH)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    rows = [([1, 2], 1024), ([9], 512), ([1, 2, 3], 1536), ([9, 8], 1024)]
    lines = [
        {"timestamp": 1000 * at, "input_length": tokens, "output_length": 8, "hash_ids": blocks}
        for at, (blocks, tokens) in enumerate(rows)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = list(benchmark.lines_of(trace, cache_tokens=100_000, stay_s=1.0))
    # 2 blocks and 1 block of 8 are found: 1536 of 4096 tokens.
    assert result[0] == "4 requests, 1024 prompt tokens on average"
    assert "one cache, unbounded: 37.5%" in result
    # Four instances in turn find nothing.
    assert any(line.startswith("4 instances") and "in turn 0.0%" in line for line in result)
    assert any("cache-aware 37.5%" in line for line in result)
    assert result[-1] == "2 requests (50.0%) are the next turn of another"
