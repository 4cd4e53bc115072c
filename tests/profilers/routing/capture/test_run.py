"""What is recorded against choices that are computed here, by hand, from the gates' inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profilers.errors import ModelUnreadableError, RecordingUnreadableError
from profilers.routing.capture import run
from profilers.routing.capture.gates import GATES, choices, gates_of
from profilers.routing.capture.model import Loaded, load_model
from profilers.routing.capture.run import CaptureInput, capture, record
from profilers.routing.store import FOLDER, read_header, read_recording
from profilers.store import read_header as read_profile_header
from tests.rows import each_row

Save = Callable[[str], Path]
Array = np.ndarray[Any, np.dtype[Any]]

CPU = torch.device("cpu")


def reading(model: Path, text: Path, **changes: Any) -> CaptureInput:
    facts: dict[str, Any] = {"workload": "lines", "tokens": 32, "sequences": 2, "passes": 5}
    return CaptureInput(model=model, **{"texts": (text,)} | facts | changes)


def gate_inputs(loaded: Loaded, rows: list[list[int]]) -> dict[int, Array]:
    """The hidden states [T, H] that each gate sees."""
    seen: dict[int, Array] = {}
    gates = gates_of(loaded.decoder, model_type=loaded.model_type)

    def keep(layer: int) -> Any:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[layer] = inputs[0].reshape(-1, inputs[0].shape[-1]).double().numpy()

        return hook

    handles = [gate.register_forward_pre_hook(keep(layer)) for layer, gate in gates.items()]
    with torch.inference_mode():
        loaded.decoder(input_ids=torch.tensor(rows), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def by_hand(model_type: str, gate: torch.nn.Module, hidden_TH: Array) -> Array:
    """The sets of experts that the architecture's paper chooses, as a mask [T, E]."""
    facts = {
        name: value.detach().double().numpy()
        for name, value in (*gate.named_parameters(), *gate.named_buffers())
    }
    score_TE = hidden_TH @ facts["weight"].T + facts.get("bias", 0.0)
    if model_type == "deepseek_v3":
        # Two of four groups by the sum of their two best, then two experts of those; the bias
        # takes part in the choice.
        score_TE = 1.0 / (1.0 + np.exp(-score_TE)) + facts["e_score_correction_bias"]
        grouped = score_TE.reshape(len(score_TE), 4, 2)
        best = np.argsort(-np.sort(grouped, axis=2).sum(axis=2), axis=1)[:, :2]
        open_TG = np.zeros(grouped.shape[:2], dtype=bool)
        np.put_along_axis(open_TG, best, True, axis=1)
        score_TE = np.where(np.repeat(open_TG, 2, axis=1), score_TE, -np.inf)
    chosen = np.argsort(-score_TE, axis=1)[:, :2]
    mask = np.zeros(score_TE.shape, dtype=bool)
    np.put_along_axis(mask, chosen, True, axis=1)
    return mask


@each_row("model_type", sorted(GATES))
def test_what_is_recorded_is_what_the_gates_choose(
    saved_model: Save, text: Path, tmp_path: Path, model_type: str
) -> None:
    folder = saved_model(model_type)
    recording = capture(tmp_path / model_type, reading(folder, text))
    loaded = load_model(folder, device=CPU)
    tokens = list(text.read_bytes())
    layers = {"qwen3_moe": (0, 2), "deepseek_v3": (1, 2)}.get(model_type, (0, 1, 2))
    assert recording.layer_ids == layers
    assert recording.num_decoder_layers == 3
    assert (recording.num_experts, recording.top_k, recording.num_passes) == (8, 2, 5)

    gates = gates_of(loaded.decoder, model_type=model_type)
    between = np.zeros((len(layers) - 1, 8, 8))
    for number in range(5):
        start = number * 64
        rows = [tokens[start : start + 32], tokens[start + 32 : start + 64]]
        masks = [
            by_hand(model_type, gates[layer], hidden)
            for layer, hidden in sorted(gate_inputs(loaded, rows).items())
        ]
        for row, mask in enumerate(masks):
            assert recording.count_PLE[number, row].tolist() == mask.sum(axis=0).tolist()
            if row:
                between[row - 1] += masks[row - 1].T.astype(float) @ mask
    assert recording.transition_MEE is not None
    np.testing.assert_array_equal(recording.transition_MEE, between)


def test_the_recording_lies_beside_a_profile_of_the_machine(
    saved_model: Save, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "profile"
    for workload in ("one", "two"):
        wanted = reading(saved_model("mixtral"), text, workload=workload)
        recording = capture(out, wanted)
        stored = read_recording(out / FOLDER / workload)
        assert stored.workload == workload
        np.testing.assert_array_equal(stored.count_PLE, recording.count_PLE)
        # 64 tokens a pass of 2 choices.
        assert stored.count_PLE.sum(axis=2).tolist() == [[128] * 3] * 5
        assert stored.token_LTK is not None
        assert stored.token_LTK.shape == (3, 5 * 64, 2)
        assert "mixtral" in read_header(out / FOLDER / workload).origin
    assert read_profile_header(out).tables == {}


def test_best_choices_come_first(saved_model: Save, text: Path) -> None:
    loaded = load_model(saved_model("deepseek_v3"), device=CPU)
    found = record(loaded, reading(Path(), text, passes=1), device=CPU)
    gates = gates_of(loaded.decoder, model_type="deepseek_v3")
    tokens = list(text.read_bytes())
    seen = gate_inputs(loaded, [tokens[:32], tokens[32:64]])
    weight = next(gates[1].parameters()).detach().double().numpy()
    score_TE = 1.0 / (1.0 + np.exp(-(seen[1] @ weight.T)))
    assert found.token_LTK is not None
    first, second = found.token_LTK[0].T
    rows = np.arange(64)
    assert (score_TE[rows, first] >= score_TE[rows, second] - 1e-6).all()


@each_row(
    ("output", "wanted"),
    [
        # Release 5 of transformers: logits, weights, ids.
        ((torch.zeros(1, 4), torch.tensor([[0.2, 0.8]]), torch.tensor([[3, 1]])), [[1, 3]]),
        # Release 4: the logits of a linear layer, with the axes of the batch.
        (torch.tensor([[[0.1, 0.4, 0.3, 0.2]]]), [[1, 2]]),
        # Release 4, DeepSeek-V3: ids, weights.
        ((torch.tensor([[3, 1]]), torch.tensor([[0.2, 0.8]])), [[1, 3]]),
        # Release 4, gpt-oss: weights of all experts, ids in their order.
        ((torch.tensor([[0.0, 0.3, 0.0, 0.7]]), torch.tensor([[3, 1]])), [[3, 1]]),
    ],
)
def test_every_form_of_a_gates_output_is_understood(output: Any, wanted: list[list[int]]) -> None:
    assert choices(output, top_k=2).tolist() == wanted


def test_short_text_is_one_pass_and_no_text_is_refused(
    saved_model: Save, text: Path, tmp_path: Path
) -> None:
    loaded = load_model(saved_model("mixtral"), device=CPU)
    (tmp_path / "short").write_text("seven!!")
    found = record(loaded, reading(Path(), tmp_path / "short"), device=CPU)
    assert found.count_PLE.sum() == 7 * 2 * 3
    (tmp_path / "empty").write_text("")
    with pytest.raises(RecordingUnreadableError, match="no text in there"):
        record(loaded, reading(Path(), tmp_path / "empty"), device=CPU)
    with pytest.raises(RecordingUnreadableError, match="64 at most"):
        record(loaded, reading(Path(), text, tokens=65), device=CPU)


def test_folders_without_a_known_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadableError, match="--model is a folder"):
        load_model(tmp_path, device=CPU)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnreadableError, match=r"'llama' has no known gates.*mixtral"):
        load_model(tmp_path, device=CPU)
    config.write_text("{")
    with pytest.raises(ModelUnreadableError, match="cut short"):
        load_model(tmp_path, device=CPU)
    # Known, yet without weights.
    config.write_text('{"model_type": "mixtral", "vocab_size": 256}')
    with pytest.raises(ModelUnreadableError, match="cannot be loaded"):
        load_model(tmp_path, device=CPU)


def test_weights_as_a_pickle_are_not_read(saved_model: Save, tmp_path: Path) -> None:
    source = saved_model("mixtral")
    for file in source.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnreadableError, match="cannot be loaded"):
        load_model(tmp_path, device=CPU)


@each_row(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "tokens 0"),
        ({"workload": "../up"}, "names a folder"),
        ({"workload": ""}, "names a folder"),
        ({"texts": ()}, "no text"),
    ],
)
def test_an_impossible_reading_cannot_be_made(changes: dict[str, Any], reason: str) -> None:
    facts: dict[str, Any] = {"model": Path(), "texts": (Path(),), "workload": "w"}
    with pytest.raises(ValueError, match=reason):
        CaptureInput(**facts | changes)


def test_files_are_one_stream_and_a_large_one_comes_in_pieces(
    saved_model: Save, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(saved_model("mixtral"), device=CPU)
    whole = record(loaded, reading(Path(), text), device=CPU)
    monkeypatch.setattr(run, "PIECE", 7)
    content = text.read_text(encoding="utf-8")
    for name, part in (("first", content[:100]), ("second", content[100:])):
        (tmp_path / name).write_text(part, encoding="utf-8")
    texts = (tmp_path / "first", tmp_path / "second")
    parts = record(loaded, reading(Path(), text, texts=texts), device=CPU)
    np.testing.assert_array_equal(parts.count_PLE, whole.count_PLE)


def test_what_is_named_must_be_text(saved_model: Save, tmp_path: Path) -> None:
    loaded = load_model(saved_model("mixtral"), device=CPU)
    (tmp_path / "a").write_bytes(b"abc\xff")
    with pytest.raises(RecordingUnreadableError, match=r"no UTF-8 text: .* at byte 3"):
        record(loaded, reading(Path(), tmp_path / "a"), device=CPU)
    with pytest.raises(RecordingUnreadableError, match="No such file"):
        record(loaded, reading(Path(), tmp_path / "b"), device=CPU)
