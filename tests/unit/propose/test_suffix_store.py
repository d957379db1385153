"""What is kept of finished responses: the latest, within bounds, and the same again from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specroll.propose import kept
from specroll.propose.suffix import FILE, SuffixProposer
from specroll.propose.suffix_store import MOST_OF_ONE, ResponseStore
from specroll.types import RunningText

PROMPTS = [(1, 2, 3), (1, 2, 4), ()]


class Remembered:
    """The same bounds on a plain list of everything."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.all: list[tuple[int, list[int]]] = []

    def add(self, prompt: int, response: list[int]) -> None:
        if not 0 < len(response) <= self.max_tokens:
            return
        self.all.append((prompt, response))
        own = [pair for pair in self.all if pair[0] == prompt]
        if len(own) > MOST_OF_ONE:
            self.all.remove(own[0])
        while sum(len(r) for _, r in self.all) > self.max_tokens:
            self.all.pop(0)

    def of(self, prompt: int) -> list[list[int]]:
        return [response for owner, response in self.all if owner == prompt]


@given(
    added=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=120),
    max_tokens=st.integers(1, 400),
)
def test_keeps_the_latest_within_its_bounds(added: list[tuple[int, int]], max_tokens: int) -> None:
    store, remembered = ResponseStore(max_tokens), Remembered(max_tokens)
    for number, (prompt, length) in enumerate(added):
        response = list(range(number, number + length))  # no two alike
        store.add(PROMPTS[prompt], response)
        remembered.add(prompt, response)
        assert store.tokens == sum(len(r) for _, r in remembered.all) <= max_tokens
        assert len(store) == len(remembered.all)
    assert [store.of(prompt) for prompt in PROMPTS] == [remembered.of(i) for i in range(3)]
    assert store.of((9,)) == []


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        SuffixProposer(max_tokens=0)


def taught() -> SuffixProposer:
    proposer = SuffixProposer()
    for sample, prompt in enumerate([(1, 2), (1, 2), (3,), (1, 2)]):
        proposer.ended(RunningText(prompt, [sample, 7, 8, sample + 5], sample))
    proposer.hits.drawn_I[3], proposer.hits.promised_I[3] = 2.5, 4.25
    return proposer


def test_comes_back_from_a_file_as_it_was(tmp_path: Path) -> None:
    saved, restored = taught(), SuffixProposer()
    saved.save(tmp_path / "deep")
    restored.ended(RunningText((4,), [1], 9))  # what was there before is replaced
    restored.load(tmp_path / "deep")
    for prompt in [(1, 2), (3,), (4,)]:
        assert restored.store.of(prompt) == saved.store.of(prompt)
    assert restored.store.tokens == 16
    assert restored.hits.drawn_I.tolist() == saved.hits.drawn_I.tolist()
    assert restored.hits.promised_I.tolist() == saved.hits.promised_I.tolist()
    restored.ended(RunningText((3,), [5], 10))
    assert restored.store.of((3,)) == [[2, 7, 8, 7], [5]]


def test_an_empty_store_comes_back_empty(tmp_path: Path) -> None:
    SuffixProposer().save(tmp_path)
    restored = taught()
    restored.load(tmp_path)
    assert (restored.store.tokens, len(restored.store)) == (0, 0)


def test_with_less_room_the_oldest_are_dropped(tmp_path: Path) -> None:
    taught().save(tmp_path)
    restored = SuffixProposer(max_tokens=9)
    restored.load(tmp_path)
    assert restored.store.of((1, 2)) == [[3, 7, 8, 8]]
    assert restored.store.of((3,)) == [[2, 7, 8, 7]]


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "another file":
        save_file({"weight": torch.zeros(3)}, path)
    elif how == "another format":
        save_file({"weight": torch.zeros(3)}, path, {"suffix": json.dumps({"format": 99})})
    else:
        tensors = kept.read(path, "suffix")[0]
        changes = {
            "no tokens": lambda t: t.pop("token_T"),
            "no hits": lambda t: t.pop("drawn_I"),
            "not finite": lambda t: t["promised_I"].fill_(float("nan")),
            "other lengths": lambda t: t["length_R"].add_(1),
            "negative": lambda t: t["token_T"].fill_(-3),
            "other kinds": lambda t: t.update(token_T=t["token_T"].float()),
            "other prompts": lambda t: t.update(prompt_RB=t["prompt_RB"][:, :-1]),
        }
        changes[how](tensors)
        kept.write(path, "suffix", tensors)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "not there"),
        ("cut", "no usable suffix"),
        ("empty", "no usable suffix"),
        ("a folder", "no usable suffix"),
        ("another file", "no usable suffix"),
        ("another format", "format"),
        ("no tokens", "responses are tensors"),
        ("no hits", "no usable drawn_I"),
        ("not finite", "no usable promised_I"),
        ("other lengths", "do not fit"),
        ("negative", "do not fit"),
        ("other kinds", "responses are tensors"),
        ("other prompts", "do not fit"),
    ],
)
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, how: str, words: str) -> None:
    path = tmp_path / FILE
    taught().save(tmp_path)
    damage(path, how)
    proposer = taught()
    with pytest.raises(ValueError, match=words) as error:
        proposer.load(tmp_path)
    assert str(path) in str(error.value)
    assert proposer.store.of((3,)) == [[2, 7, 8, 7]] and proposer.hits.drawn_I[3] == 2.5
