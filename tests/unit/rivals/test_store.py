"""A drafter on disk: what comes back is what went in, or an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafted import drafter_of, plain
from safetensors.torch import load_file, save_file

from specroll.propose.store import HeadsFileError, HeadsMismatchError
from specroll.rivals.eagle import Drafter
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.store import LEARNING, WEIGHTS, load_drafter, save_drafter
from tiny import tiny


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, architecture: str) -> None:
    model = plain(architecture)[0]
    drafter = drafter_of(architecture, taught=True)
    loaded = load_drafter(save_drafter(drafter, tmp_path / "made", model), model)
    saved, back = drafter.state_dict(), loaded.state_dict()
    assert saved.keys() == back.keys() and all(torch.equal(saved[name], back[name]) for name in saved)
    kept = FastGRPO.for_model(model, tmp_path / "made").drafter.state_dict()
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_another_models_drafter_is_refused(tmp_path: Path) -> None:
    save_drafter(Drafter.for_model(tiny("llama")), tmp_path, tiny("llama"))
    with pytest.raises(HeadsMismatchError, match="fit another model"):
        load_drafter(tmp_path, tiny("llama", seed=1))
    with pytest.raises(ValueError, match="width 32"):
        FastGRPO.for_model(_wider(), Drafter.for_model(tiny("llama")))


def _wider():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tiny import SHAPE

    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "hidden_size": 64}))


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(HeadsFileError, match="no drafter in"):
        load_drafter(tmp_path, model)
    save_drafter(Drafter.for_model(model), tmp_path, model)
    file = tmp_path / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadsFileError, match="damaged"):
        load_drafter(tmp_path, model)
    file.write_bytes(whole)
    tensors = load_file(file)
    for about, words in (
        ({}, "damaged"),
        ({"specroll": "no json"}, "damaged"),
        ({"specroll": json.dumps({"format": 99})}, "another format"),
        ({"specroll": json.dumps({"format": 1, "model": {"wrong": 1}})}, "damaged"),
    ):
        save_file(tensors, file, metadata=about)
        with pytest.raises(HeadsFileError, match=words):
            load_drafter(tmp_path, model)
    file.write_bytes(whole)
    load_drafter(tmp_path, model)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    drafter = Drafter.for_model(model)
    drafter.fuse = torch.nn.Linear(4, 4)
    save_drafter(drafter, tmp_path, model)
    with pytest.raises(HeadsFileError, match="does not hold a drafter of this model"):
        load_drafter(tmp_path, model)


def test_a_drafter_without_its_learning_is_said(tmp_path: Path) -> None:
    model = tiny("llama")
    rival = FastGRPO.for_model(model)
    save_drafter(rival.drafter, tmp_path, model)
    with pytest.raises(HeadsFileError, match=LEARNING):
        rival.learner.load(tmp_path)
