"""`specroll generate`: samples for prompts, on the screen as they come, and in a JSON Lines file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from specroll.cli.common import (
    ModelOptions,
    SamplingOptions,
    check_at_least,
    find_own_modules,
    quiet_loading,
    refuse_existing,
    summary_line,
)  # fmt: skip
from specroll.config import BudgetConfig, BudgetRuleName, EngineConfig, ReflexName, proposer_names

if TYPE_CHECKING:
    from specroll.types import Completion, Request


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SamplingOptions):
    """Sample from a model, with speculation if heads are given: the same samples, sooner.

    The prompts come from --prompt, --prompt-file, or standard input (one prompt). A single sample is streamed.
    """

    prompt: tuple[str, ...] = field(default=(), metadata={"text": True})
    """Texts to answer."""
    prompt_file: Path | None = None
    """JSON Lines with "prompt" (a text or chat messages) or "question"."""
    chat: bool = True
    """Put a text to the model as a user's message; --no-chat continues the text as it stands."""
    samples: int = 1
    """Samples per prompt."""
    max_new_tokens: int = 256
    """Most tokens of a sample."""
    stop: tuple[str, ...] = ()
    """End a sample as soon as it contains one of these texts."""
    heads: Path | None = None
    """Folder of heads fitted to the model (specroll heads fit)."""
    proposers: str | None = None
    """What proposes, separated by commas: heads, suffix, or a class of your own as module:Class [heads, if they are
    given; else no speculation]."""
    max_nodes: int = BudgetConfig().max_nodes
    """Most tokens proposed per sample and round; how many pay is decided in each round."""
    budget: BudgetRuleName = BudgetConfig().rule
    """optimal verifies as many of them as pay in each round; paper is the published rule, a baseline."""
    reflex: ReflexName = BudgetConfig().reflex
    """associative: what the text holds already corrects what heads propose; hidden: past errors move the heads' states
    (the published form); off: heads alone."""
    max_running: int = EngineConfig().max_running
    """Samples decoded together."""
    json: Path | None = None
    """Append each sample to this file as soon as it ends (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, samples=self.samples, max_new_tokens=self.max_new_tokens, max_running=self.max_running)
        check_at_least(0, max_nodes=self.max_nodes)
        if self.proposers is not None:
            proposer_names(self.proposers)


def main(options: Options) -> int:
    prompts = read_prompts(options)
    refuse_existing(options.json, "samples")
    find_own_modules(options.proposers)
    from specroll.build import build_engine, make_requests

    sampling = options.sampling()
    with quiet_loading():
        engine = build_engine(
            options.model,
            heads=options.heads,
            proposers=options.proposers,
            dtype=options.dtype,
            max_nodes=options.max_nodes,
            rule=options.budget,
            reflex=options.reflex,
            max_running=options.max_running,
        )
    requests = make_requests(
        engine.tokenizer,
        prompts,
        samples=options.samples,
        max_new_tokens=options.max_new_tokens,
        chat=options.chat,
    )
    out = Output(requests, prompts, options.samples, options.json, engine.tokenizer)
    try:
        rollout = engine.generate(
            requests,
            sampling,
            stop=options.stop,
            on_tokens=out.tokens if len(requests) == 1 else None,
            on_completion=out.completion,
        )
    except KeyboardInterrupt:
        kept = f"{out.done} of {len(requests)} samples are in {options.json}" if options.json else ""
        raise KeyboardInterrupt(kept) from None
    finally:
        out.close()
    print(summary_line(rollout), file=sys.stderr)
    return 0


class Output:
    """Shows samples, one streamed or many as they end, and appends them to a file."""

    def __init__(
        self, requests: Sequence[Request], prompts: Sequence[Any], samples: int, path: Path | None, tokenizer: Any
    ) -> None:
        self.requests, self.prompts, self.samples = requests, prompts, samples
        self.done = 0
        self._file: IO[str] | None = path.open("a", encoding="utf-8") if path is not None else None
        self._stream = TextStream(tokenizer, lambda text: print(text, end="", flush=True))

    def tokens(self, index: int, new: list[int]) -> None:
        self._stream.add(new)

    def completion(self, index: int, completion: Completion) -> None:
        self.done += 1
        prompt, member = divmod(index, self.samples)
        if self._file is not None:
            from specroll.report.records import to_json

            record = {
                "prompt": self.prompts[prompt],
                "prompt_index": prompt,
                "sample": member,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "token_ids": completion.token_ids,
                "logp": completion.logp,
                "logp_raw": completion.logp_raw,
                "kept_mass": completion.kept_mass,
            }
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        if len(self.requests) == 1:
            self._stream.end()
            return
        which = f"prompt {prompt + 1}, sample {member + 1}" if len(self.prompts) > 1 else f"sample {member + 1}"
        print(f"--- {which} ({completion.finish_reason}, {len(completion.token_ids)} tokens)", flush=True)
        print(completion.text, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TextStream:
    """Turns tokens into text as they come; what may still change (half a character, a joined blank) waits."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._shown = ""

    def add(self, new: list[int]) -> None:
        self._ids += new
        text = self._text()
        if not text.endswith("\ufffd"):
            self._show(text)

    def end(self) -> None:
        self._show(self._text())
        self._write("\n")

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _show(self, text: str) -> None:
        self._write(text[len(self._shown) :])
        self._shown = text


def read_prompts(options: Options) -> list[Any]:
    """Texts or chat messages, from where the options say; ValueError names a broken line."""
    prompts: list[Any] = list(options.prompt)
    if options.prompt_file is not None:
        prompts += _from_file(options.prompt_file)
    if not prompts and not sys.stdin.isatty():
        text = sys.stdin.read()
        prompts = [text] if text.strip() else []
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or write one to standard input")
    return prompts


def _from_file(path: Path) -> list[Any]:
    import json

    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); write one whole object per line") from error
        prompt = value.get("prompt", value.get("question")) if isinstance(value, dict) else None
        if not (isinstance(prompt, str) or _are_messages(prompt)):
            raise ValueError(
                f'{path}, line {number}: no prompt; write {{"prompt": "..."}}, or chat messages as '
                '{"prompt": [{"role": "user", "content": "..."}]}'
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path}: no prompts; write one object per line: {{"prompt": "..."}}')
    return prompts


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )
