"""`specroll generate`: what it prints, what it keeps, and how it refuses."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specroll.build import build_engine, make_requests
from specroll.cli.generate import TextStream
from specroll.propose.heads import FutureHeads
from specroll.propose.store import save_heads
from specroll.types import SamplingParams
from tiny import VOCAB_SIZE, tiny, tiny_tokenizer

Run = Callable[..., Any]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    model = tiny("llama")
    heads = FutureHeads.for_model(model)
    with torch.no_grad():
        heads.second_BHF.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    return save_heads(heads, tmp_path / "heads", model)


def test_a_single_sample_is_streamed_and_summed_up(specroll: Run, tiny_folder: Path) -> None:
    done = specroll("generate", "--model", tiny_folder, "--prompt", "what is 2+3?", "--max-new-tokens", 12, "--seed", 7)
    assert done.code == 0
    engine = build_engine(tiny("llama"), tiny_tokenizer())
    requests = make_requests(engine.tokenizer, ["what is 2+3?"], max_new_tokens=12)
    completion = engine.generate(requests, SamplingParams(seed=7)).completions[0]
    assert done.out == f"{completion.text}\n"
    assert f"{len(completion.token_ids)} tokens in " in done.err and "without speculation" in done.err


def test_heads_change_the_speed_line_and_nothing_else(specroll: Run, tiny_folder: Path, heads_folder: Path) -> None:
    args = ("generate", "--model", tiny_folder, "--prompt", "one", "two", "--samples", 3, "--max-new-tokens", 24)
    plain = specroll(*args)
    spec = specroll(*args, "--heads", heads_folder)
    paper = specroll(*args, "--heads", heads_folder, "--budget", "paper")
    shown = {run.out.split("--- ")[0] for run in (plain, spec, paper)}
    assert (plain.code, spec.code, paper.code, shown) == (0, 0, 0, {""})
    assert sorted(plain.out.split("--- ")) == sorted(spec.out.split("--- ")) == sorted(paper.out.split("--- "))
    assert "tokens per round" in paper.err  # it always speculates


def test_every_sample_is_in_the_file(specroll: Run, tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "samples.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "1+1"}\n\n{"question": "2+2", "answer": "4"}\n{"prompt": [{"role": "user", "content": "3+3"}]}\n'
    )
    args = ("--model", tiny_folder, "--samples", 2, "--max-new-tokens", 9, "--top-p", 0.9)
    assert specroll("generate", *args, "--prompt-file", prompts, "--json", out).code == 0
    rows = sorted(records(out), key=lambda row: (row["prompt_index"], row["sample"]))
    assert [(row["prompt_index"], row["sample"]) for row in rows] == [(p, s) for p in range(3) for s in range(2)]
    assert [row["prompt"] for row in rows[::2]] == ["1+1", "2+2", [{"role": "user", "content": "3+3"}]]
    assert all(
        len(row["token_ids"]) == len(row["logp"]) == len(row["logp_raw"]) == len(row["kept_mass"]) for row in rows
    )
    assert all(row["finish_reason"] in ("eos", "length") for row in rows)
    again = specroll("generate", *args, "--prompt", "x", "--json", out)
    assert again.code == 1 and "exists already" in again.err
    assert len(records(out)) == 6


def test_a_sample_does_not_depend_on_how_many_there_are() -> None:
    tokenizer = tiny_tokenizer()
    few, many = (make_requests(tokenizer, ["a", "b"], samples=n) for n in (1, 5))
    assert [r.sample for r in few] == [many[0].sample, many[5].sample]
    assert len({r.sample for r in many}) == 10


def test_chat_and_raw_prompts_differ() -> None:
    tokenizer = tiny_tokenizer()
    chat = make_requests(tokenizer, ["hi"])[0].prompt_ids
    assert chat == make_requests(tokenizer, [[{"role": "user", "content": "hi"}]])[0].prompt_ids
    assert tokenizer.decode(chat).endswith("assistant: ")
    assert tokenizer.decode(make_requests(tokenizer, ["hi"], chat=False)[0].prompt_ids) == "hi"
    tokenizer.chat_template = None
    assert tokenizer.decode(make_requests(tokenizer, ["hi"])[0].prompt_ids) == "hi"
    with pytest.raises(ValueError, match="no chat template"):
        make_requests(tokenizer, [[{"role": "user", "content": "hi"}]])


def test_standard_input_is_a_prompt(specroll: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = specroll("generate", "--model", tiny_folder, "--max-new-tokens", 5, "--prompt", "say\nhello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("say\nhello"))
    assert specroll("generate", "--model", tiny_folder, "--max-new-tokens", 5).out == given.out
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    empty = specroll("generate", "--model", tiny_folder)
    assert empty.code == 1 and "no prompt: give --prompt" in empty.err


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"text": "a"}', "line 1: no prompt"),
        ('{"prompt": [{"content": "a"}]}', "line 1: no prompt"),
        ("\n", "no prompts"),
    ],
)
def test_a_broken_prompt_line_is_named(specroll: Run, tmp_path: Path, lines: str, told: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    done = specroll("generate", "--prompt-file", path)
    assert done.code == 1 and told in done.err and str(path) in done.err


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("--max-new-tokens", 0), 2, "max-new-tokens must be at least 1"),
        (("--max-new-tokens", 512), 1, "the model has 512 positions"),
        (("--budget", "best"), 2, "invalid choice: 'best'"),
        (("--temperature", -1), 2, "temperature must be finite and >= 0"),
        (("--heads", "nowhere"), 1, "no heads in nowhere"),
    ],
)
def test_refusals_are_one_line(
    specroll: Run, tiny_folder: Path, args: tuple[object, ...], code: int, told: str
) -> None:
    done = specroll("generate", "--model", tiny_folder, "--prompt", "hello", *args)
    assert (done.code, done.out) == (code, "") and told in done.err and done.err.count("\n") == 1


def test_ctrl_c_keeps_what_ended(
    specroll: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specroll.cli.generate import Output

    whole = Output.completion

    def interrupted(self: Output, *args: Any) -> None:
        whole(self, *args)
        if self.done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "completion", interrupted)
    out = tmp_path / "samples.jsonl"
    done = specroll(
        "generate", "--model", tiny_folder, "--prompt", "a", "--samples", 6, "--max-running", 2, "--json", out,
        "--max-new-tokens", 8,
    )  # fmt: skip
    assert done.code == 130 and f"2 of 6 samples are in {out}" in done.err
    assert len(records(out)) == 2


def test_the_stream_waits_for_whole_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    shown: list[str] = []
    stream = TextStream(Bytes(), shown.append)
    for byte in "aé€".encode():
        stream.add([byte])
    assert "".join(shown) == "aé€"
    assert "\ufffd" not in "".join(shown)
    stream.end()
    assert "".join(shown) == "aé€\n"


def test_a_bad_vocabulary_is_told() -> None:
    engine = build_engine(tiny("llama"), tiny_tokenizer())
    requests = make_requests(engine.tokenizer, ["a"])
    wrong = [type(requests[0])(prompt_ids=(VOCAB_SIZE,), sample=0, max_new_tokens=1)]
    with pytest.raises(ValueError, match="the tokenizer belongs to another model"):
        engine.generate(wrong, SamplingParams())
