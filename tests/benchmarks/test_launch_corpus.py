"""The count of public launches tells what is read from what is refused and what is lost.

The figures stand in README.md beside this, under "Launch files".
"""

from pathlib import Path

import pytest

from tests.benchmarks import launch_corpus

MARKDOWN = """
```bash
export TP=4
vllm serve a -tp $TP --no-such-flag 3
vllm serve b --tensor-parallel 2 \\
  --max-model-len auto
```
```text
trtllm-serve a --tp_size $UNSET
```
"""
OBJECT = """
kind: Pod
apiVersion: v1
spec: {containers: [{command: [sglang, serve], args: [--tp, 8, --kv-cache-dtype, fp8_e4m3]}]}
"""


def test_launches_of_a_folder_are_counted_once_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "read.md").write_text(MARKDOWN)
    (tmp_path / "again.md").write_text(MARKDOWN)
    (tmp_path / "pod.yaml").write_text(OBJECT)
    assert launch_corpus.main([str(tmp_path), "--show"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2].split()[:5] == ["all", "4", "3", "1", "0"]
    assert "--tensor-parallel-size '$UNSET' has no value here" in printed


def test_a_flag_that_a_reader_loses_is_found() -> None:
    around = launch_corpus._around()
    launch = launch_corpus.CorpusLaunch(
        place="", text="vllm serve m -tp 4", command="vllm serve m -tp 4"
    )
    assert launch_corpus.evaluate_launch(launch, around, given={}).kind == "read"
    for lost in ("--max-num-seqs 8", "-tp 8"):
        spoilt = launch_corpus.CorpusLaunch(
            place="", text=launch.text, command=f"vllm serve m {lost}"
        )
        assert launch_corpus.evaluate_launch(spoilt, around, given={}).kind == "lost"
