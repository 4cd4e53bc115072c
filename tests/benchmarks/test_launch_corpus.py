"""The count of public launches tells what is read from what is refused and what is lost.

The figures stand in README.md beside this, under "Launch files".
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("launch_corpus.py")
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


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_corpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["launch_corpus"] = module
    spec.loader.exec_module(module)
    return module


def test_launches_of_a_folder_are_counted_once_each(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "read.md").write_text(MARKDOWN)
    (tmp_path / "again.md").write_text(MARKDOWN)
    (tmp_path / "pod.yaml").write_text(OBJECT)
    assert script.main([str(tmp_path), "--show"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2].split()[:5] == ["all", "4", "3", "1", "0"]
    assert "--tensor-parallel-size '$UNSET' has no value here" in printed


def test_a_flag_that_a_reader_loses_is_found(script: ModuleType) -> None:
    around = script._around()
    launch = script.CorpusLaunch(place="", text="vllm serve m -tp 4", command="vllm serve m -tp 4")
    assert script.evaluate_launch(launch, around, given={}).kind == "read"
    for lost in ("--max-num-seqs 8", "-tp 8"):
        spoilt = script.CorpusLaunch(place="", text=launch.text, command=f"vllm serve m {lost}")
        assert script.evaluate_launch(spoilt, around, given={}).kind == "lost"
