"""The frame of the command line: which commands exist, what is run, and how mistakes are told.

A command is a module with a dataclass `Options` (see `options`) and `main(options: Options) -> int | None`, plus one
line in `COMMANDS`. The module imports nothing heavy at its top, so that `--help` is quick. What the frame promises:

- exit code 2 and one line for a command line that cannot be understood;
- exit code 1 and one line for what the user can mend, that is any `ValueError` or `OSError`
  (`SPECROLL_DEBUG=1` shows the traceback); every other exception is a fault of ours and keeps its traceback;
- exit code 130 after Ctrl-C. A command that saved its state says where: `raise KeyboardInterrupt("saved in ...")`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from specroll.cli.options import UsageError, parse, suggestion

# Words of the command: (module, one line for --help).
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("specroll.cli.train", "Train with GRPO on speculative rollouts; --demo shows what they gain"),
    "generate": ("specroll.cli.generate", "Sample from a model, with speculation if heads are given"),
    "report": ("specroll.cli.report", "Draw a training run, finished or not, over its steps"),
    "check": ("specroll.cli.check", "Prove on your model that speculation changes no token"),
    "heads fit": ("specroll.cli.heads", "Fit future-token heads to a model's own samples"),
    "drafter fit": ("specroll.cli.drafter", "Pre-train the rival's drafter on a model's own samples"),
    "profile": ("specroll.cli.profile", "Show where a round's time goes, and what further rows of a pass cost"),
    "simulate": ("specroll.cli.simulate", "Predict what speculation gains on other devices, from a recorded trace"),
    "simulate record": (
        "specroll.cli.simulate_record",
        "Record what heads propose and what of it is drawn, as a trace",
    ),
    "bench --quick": (
        "specroll.cli.bench_quick",
        "Check in three minutes that ratios of speeds are as expected",
    ),
    "bench rollout": ("specroll.cli.bench", "Time transformers, the plain loop and speculation on the same work"),
    "bench peers": ("specroll.cli.peers", "Time the same against vLLM and the machine's limit"),
    "bench budget": (
        "specroll.cli.bench_budget",
        "Time the optimal node budget against the paper's and the plain loop",
    ),
    "bench scale": ("specroll.cli.bench_scale", "Time ever longer queues and contexts, and watch the memory"),
    "bench adapt": (
        "specroll.cli.bench_adapt",
        "Time heads with Reflex and the slow path, with either and without, while GRPO trains",
    ),
    "bench methods": ("specroll.cli.bench_methods", "Time methods against each other while GRPO trains"),
}

_HEADER = """\
usage: specroll COMMAND [options]

Exact speculative rollouts for GRPO: the same samples as plain decoding, sooner.
"""
_FOOTER = """
specroll COMMAND --help lists a command's options. SPECROLL_DEBUG=1 shows the traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    prog = "specroll"
    try:
        name, rest = _find(args)
        if name is None:
            return 0
        prog = f"specroll {name}"
        command = import_module(COMMANDS[name][0])
        return command.main(parse(command.Options, rest, prog=prog)) or 0
    except UsageError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt as stop:
        return _say(f"{prog}: interrupted" + (f"; {stop}" if str(stop) else ""), 130)
    except BrokenPipeError:
        # The reader of our output (a pager, head) has left. Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("SPECROLL_DEBUG", "") not in ("", "0"):
            raise
        return _say(f"{prog}: {_one_line(error)}", 1)


def _find(args: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The command's name and what follows it. No name: help or the version was asked for, and has been printed."""
    if not args or args[0] in ("-h", "--help"):
        print(_overview(COMMANDS))
        return None, ()
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"specroll {version('specroll')}")
        return None, ()
    for words in (2, 1):
        name = " ".join(args[:words])
        if len(args) >= words and name in COMMANDS:
            return name, args[words:]
    family = [name for name in COMMANDS if name.split()[0] == args[0]]
    if not family:
        raise UsageError("specroll", f"unknown command {args[0]!r}{suggestion(args[0], COMMANDS)}")
    if args[1:2] in (["-h"], ["--help"]):
        print(_overview(family))
        return None, ()
    given = f"unknown command {' '.join(args[:2])!r}; " if len(args) > 1 else ""
    raise UsageError("specroll", f"{given}{args[0]!r} is one of: {', '.join(family)}")


def _overview(names: Sequence[str] | dict[str, tuple[str, str]]) -> str:
    width = max(map(len, names), default=0)
    return "\n".join([_HEADER, "commands:", *(f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names), _FOOTER])


def _one_line(error: Exception) -> str:
    """The message; where it comes from another package, also how to learn more."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    origin = place.tb_frame.f_globals.get("__name__", "") if place else ""
    if origin.split(".")[0] == "specroll" or isinstance(error, OSError):
        return text
    return f"{text} (raised in {origin}; SPECROLL_DEBUG=1 shows the traceback)"


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
