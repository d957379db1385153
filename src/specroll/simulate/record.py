"""Record a trace: sample with the plain loop, then ask the proposer what it would have offered at every token.

What a response would have become with any tree is known without running one, because its tokens are the target's own
draws whatever is proposed. So the proposer is asked behind every token of finished responses, and verification's own
walk over their tokens says what would have been accepted. It is told what was drawn and which responses have ended, as
in a rollout.

What rounds cost on this machine is `timing`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch

from specroll.engine import Engine
from specroll.simulate.trace import Response, Round
from specroll.tree.grow import Ranked, rank
from specroll.types import (
    Draws,
    Features,
    Follower,
    Listener,
    Proposer,
    Request,
    RunningText,
    SamplingParams,
    Trajectory,
    Tree,
    Verdict,
)
from specroll.verify.walk import walk

_ROWS = 64  # sequences that are proposed for together: bounds the memory of the draft's logits
_NOTHING = -1  # the token behind a response's end: no candidate

OnProgress = Callable[[str, int, int], None]
"""Stage, how much of it is done, how much there is."""


def record(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, nodes: int, on_progress: OnProgress
) -> list[Response]:
    """The responses to `requests`, in their order, with the best `nodes` nodes behind every token.

    The engine's proposer is asked; it goes on learning from what it is told. Raises ValueError without one, and for one
    that follows the states of running sequences, as none run.
    """
    proposer = engine.proposer
    if proposer is None:
        raise ValueError("a trace records what a proposer offers, and the engine has none: give it heads")
    if isinstance(proposer, Follower):
        raise ValueError(
            f"a trace is recorded of finished responses, but {proposer.name!r} has to follow running ones: "
            "record another, or measure this one in rollouts"
        )
    engine.proposer = None
    try:
        trajectories = _sample(engine, requests, sampling, on_progress)
    finally:
        engine.proposer = proposer
    rounds: list[list[Round]] = [[] for _ in requests]
    texts = [RunningText(r.prompt_ids, [], r.sample) for r in requests]
    longest = max(t.token_T.numel() for t in trajectories)
    emitted = 0
    while live := _go_on(texts, trajectories, proposer):
        emitted += 1
        for start in range(0, len(live), _ROWS):
            part = live[start : start + _ROWS]
            some = [trajectories[i] for i in part]
            features = _features([texts[i] for i in part], some, sampling, engine.target.device)
            for i, found in zip(part, _ask(proposer, features, some, emitted, nodes), strict=True):
                rounds[i].append(found)
        on_progress("proposing", emitted, longest - 1)
    numbers: dict[tuple[int, ...], int] = {}
    return [
        Response(numbers.setdefault(request.prompt_ids, len(numbers)), len(request.prompt_ids), tuple(of_one))
        for request, of_one in zip(requests, rounds, strict=True)
    ]


def _sample(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, on_progress: OnProgress
) -> list[Trajectory]:
    done = count(1)
    _, trajectories = engine.record(
        requests, sampling, on_completion=lambda *_: on_progress("sampling", next(done), len(requests))
    )
    return trajectories


def _go_on(texts: Sequence[RunningText], trajectories: Sequence[Trajectory], proposer: Proposer) -> list[int]:
    """Give every text that goes on its next token, and say of the others that they have ended. Returns those that live,
    which are those with a token still to come."""
    live = []
    for i, (text, trajectory) in enumerate(zip(texts, trajectories, strict=True)):
        known, count = len(text.token_ids), trajectory.token_T.numel()
        if known == count:
            continue
        text.token_ids.append(int(trajectory.token_T[known]))  # type: ignore[attr-defined] - a list of ours
        if known + 1 < count:
            live.append(i)
        elif isinstance(proposer, Listener):
            proposer.ended(text)
    return live


def _features(
    texts: Sequence[RunningText], some: Sequence[Trajectory], sampling: SamplingParams, device: torch.device
) -> Features:
    """What the proposer would have seen with so much of each response drawn."""
    root_S = torch.tensor([text.token_ids[-1] for text in texts], device=device)
    past = [torch.tensor([*text.prompt_ids, *text.token_ids]) for text in texts]
    return Features(
        hidden_SH=torch.stack([t.hidden_TH[len(x.token_ids) - 1] for x, t in zip(texts, some, strict=True)]).to(device),
        root_S=root_S,
        sample_S=torch.tensor([text.sample for text in texts], device=device),
        position_S=torch.tensor([len(x) - 1 for x in past], device=device),
        sampling=sampling,
        past_SL=torch.nn.utils.rnn.pad_sequence(past, batch_first=True).to(device),
        texts=texts,
    )


@torch.no_grad()
def _ask(proposer: Proposer, features: Features, some: Sequence[Trajectory], emitted: int, nodes: int) -> list[Round]:
    """One round per sequence: what is ranked best for it, and what of that its own next tokens are."""
    draft = proposer.propose(features)
    ranked = rank(draft, features.root_S, nodes * len(some), nodes)
    tree = ranked.plant(len(ranked.gain))
    next_SD = torch.full((len(some), tree.max_depth + 1), _NOTHING)  # column d is what a node of depth d draws
    for row_D, trajectory in zip(next_SD, some, strict=True):
        ahead_D = trajectory.token_T[emitted : emitted + row_D.numel()]
        row_D[: ahead_D.numel()] = ahead_D
    token_N = next_SD.to(features.root_S.device)[tree.sequence_N, tree.depth_N]  # right wherever the walk comes
    unknown_N = torch.zeros_like(token_N, dtype=torch.float32)
    verdict = walk(tree, Draws(token_N, unknown_N, unknown_N, unknown_N))
    proposer.observe(draft, tree, verdict)
    return _rounds(ranked, tree, verdict, len(some))


def _rounds(ranked: Ranked, tree: Tree, verdict: Verdict, sequences: int) -> list[Round]:
    gains: list[list[float]] = [[] for _ in range(sequences)]
    hits: list[list[int]] = [[] for _ in range(sequences)]
    for gain, sequence in zip(ranked.gain, ranked.sequence, strict=True):
        gains[sequence].append(gain)
    # A sequence's rows are its root and then its nodes, best first.
    for sequence, slot in torch.stack((tree.sequence_N, tree.slot_N), dim=1)[verdict.accepted_N].tolist():
        if slot:
            hits[sequence].append(slot - 1)
    return [Round(tuple(g), tuple(h)) for g, h in zip(gains, hits, strict=True)]
