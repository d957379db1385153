"""Heads on disk: what comes back is what went in, or an error that says what to do."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.config import HeadsConfig
from specroll.files import write_atomic
from specroll.propose.heads import FutureHeads
from specroll.propose.store import (
    MANIFEST,
    Fingerprint,
    HeadsFileError,
    HeadsMismatchError,
    load_heads,
    save_heads,
)


def tiny(seed: int = 0, **changes: int | bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    return save_heads(FutureHeads.for_model(model), tmp_path / "made" / "heads", model)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([5, 1, 9])])
def test_what_is_loaded_is_what_was_saved(
    tmp_path: Path, model: LlamaForCausalLM, vocabulary: torch.Tensor | None
) -> None:
    config = HeadsConfig(horizons=2, sees="state", width_factor=3)
    heads = FutureHeads.for_model(model, config, vocabulary=vocabulary, seed=4)
    with torch.no_grad():
        heads.second_BHF.normal_()
    heads.calibration_2PK = torch.tensor([[[0.7, 0.5], [0.4, 0.3]], [[0.9, 1.1], [0.8, 0.7]]])
    loaded = load_heads(save_heads(heads, tmp_path, model), model)
    assert loaded.config == config
    saved, back = heads.state_dict(), loaded.state_dict()
    assert saved.keys() == back.keys()
    assert all(torch.equal(saved[name], back[name]) for name in saved)
    assert vocabulary is None or loaded.vocabulary_V.tolist() == [1, 5, 9]  # type: ignore[union-attr]


def test_saving_again_replaces_and_leaves_no_litter(folder: Path, model: LlamaForCausalLM) -> None:
    save_heads(FutureHeads.for_model(model, seed=9), folder, model)
    assert len(list(folder.iterdir())) == 2
    assert torch.equal(load_heads(folder, model).first_BFI, FutureHeads.for_model(model, seed=9).first_BFI)


@pytest.mark.parametrize(
    "other",
    [tiny(seed=1), tiny(hidden_size=32), tiny(num_hidden_layers=2), tiny(vocab_size=65)],
    ids=["weights", "width", "layers", "vocabulary"],
)
def test_heads_of_another_model_are_refused(folder: Path, other: LlamaForCausalLM) -> None:
    with pytest.raises(
        HeadsMismatchError, match=r"(?s)fit another model.*they fit: .*llama with 1 layers.*specroll heads fit"
    ):
        load_heads(folder, other)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers by an old name
def test_the_fingerprint_is_of_the_weights_not_of_precision_or_adapters(folder: Path, model: LlamaForCausalLM) -> None:
    # Weights that bfloat16 holds come from a checkpoint in bfloat16, loaded in either precision.
    narrow = tiny().bfloat16()
    assert Fingerprint.of(narrow) == Fingerprint.of(tiny().bfloat16().float()) == Fingerprint.of(model)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules="all-linear", r=2))
    assert Fingerprint.of(adapted) == Fingerprint.of(model)
    assert load_heads(folder, adapted).horizons == 4


def test_a_tied_lm_head_is_the_embedding() -> None:
    print_ = Fingerprint.of(tiny(tie_word_embeddings=True))
    assert print_.lm_head_sha256 == print_.embedding_sha256
    untied = Fingerprint.of(tiny())
    assert untied.lm_head_sha256 != untied.embedding_sha256


def test_missing_and_damaged_files_are_named(folder: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(HeadsFileError, match="no heads in"):
        load_heads(tmp_path / "nowhere", model)
    weights = next(folder.glob("*.safetensors"))
    payload = weights.read_bytes()
    weights.write_bytes(payload[:-1] + bytes([payload[-1] ^ 1]))
    with pytest.raises(HeadsFileError, match="SHA-256"):
        load_heads(folder, model)
    weights.unlink()
    with pytest.raises(HeadsFileError, match="missing"):
        load_heads(folder, model)
    manifest = (folder / MANIFEST).read_text()
    for broken, said in (
        ("{", "damaged"),
        ("[]", "format"),
        ('{"format": 99}', "format 99"),
        ('{"format": 3}', "damaged"),
    ):
        (folder / MANIFEST).write_text(broken)
        with pytest.raises(HeadsFileError, match=said):
            load_heads(folder, model)
    (folder / MANIFEST).write_text(manifest.replace('"horizons": 4', '"horizons": "x"'))
    with pytest.raises(HeadsFileError, match="damaged"):
        load_heads(folder, model)
    (folder / MANIFEST).write_text(manifest.replace('"horizons": 4', '"horizons": 3'))
    weights.write_bytes(payload)
    with pytest.raises(HeadsFileError, match="does not hold what"):
        load_heads(folder, model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calibration_2PK", torch.ones(2, 2, 3)),
        ("calibration_2PK", torch.ones(1)),
        ("calibration_2PK", torch.full((2, 2, 4), float("nan"))),
        ("vocabulary_V", torch.tensor([9, 5, 7])),
        ("vocabulary_V", torch.tensor([5, 5])),
        ("vocabulary_V", torch.tensor([-1, 5])),
        ("vocabulary_V", torch.tensor([5, 64])),
        ("vocabulary_V", torch.tensor([5.0])),
        ("vocabulary_V", torch.tensor([], dtype=torch.int64)),
        ("second_BHF", torch.zeros(1)),
        ("second_BHF", None),
        ("bias_KF", torch.zeros(4, 3)),
        ("bias_KF", None),
    ],
)
def test_tensors_that_belong_to_no_such_heads_are_refused(
    folder: Path, model: LlamaForCausalLM, name: str, value: torch.Tensor | None
) -> None:
    weights = next(folder.glob("*.safetensors"))
    state = {**load_file(weights), name: value}
    payload = save({key: tensor for key, tensor in state.items() if tensor is not None})
    weights.write_bytes(payload)
    manifest = json.loads((folder / MANIFEST).read_text()) | {"weights_sha256": hashlib.sha256(payload).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(HeadsFileError, match="does not hold what"):
        load_heads(folder, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"sees": "path"', '"sees": "nonsense"'),
        ('"sees": "path"', '"sees": null'),
        ('"horizons": 4', '"horizons": 1000000'),
        ('"width_factor": 2', '"width_factor": 1000000'),
        ('"weights": "heads-', '"weights": ".", "x": "'),
        ('"weights": "heads-', '"weights": "\\u0000", "x": "'),
    ],
)
def test_a_manifest_of_impossible_heads_is_refused(folder: Path, model: LlamaForCausalLM, old: str, new: str) -> None:
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))
    with pytest.raises(HeadsFileError, match="specroll heads fit"):
        load_heads(folder, model)


def test_a_crash_while_saving_leaves_the_old_heads(
    folder: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(path: Path, payload: bytes) -> None:
        if path.name == MANIFEST:
            raise KeyboardInterrupt
        write_atomic(path, payload)

    monkeypatch.setattr("specroll.propose.store.write_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        save_heads(FutureHeads.for_model(model, seed=9), folder, model)
    assert torch.equal(load_heads(folder, model).first_BFI, FutureHeads.for_model(model).first_BFI)
