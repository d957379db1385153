"""scripts/gpu_check.py runs from end to end: here on the CPU and a tiny shape, on a GPU as it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specroll.budget import ContextPrice, LatencyCurve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick_surface(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of the real measurement: its repeats are for precision, which is not tested here."""
    measured = script.fresh_curve

    def once(target, sampling):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(
            "specroll.engine.measure.measure", lambda run, rows: run(4) or LatencyCurve((1, 4), (1.0, 2.0))
        )
        monkeypatch.setattr("specroll.engine.measure.measure_context", lambda run, far: ContextPrice(0.0, 0.0))
        return measured(target, sampling)

    monkeypatch.setattr(script, "fresh_curve", once)


CHECKS = {
    "noise",
    "logits",
    "tree pass, graphs",
    "tokens",
    "tokens, graphs",
    "tokens, speculation",
    "tokens, speculation and graphs",
    "graphs recorded",
}


def test_the_whole_script_runs_on_a_cpu(
    script: ModuleType, quick_surface: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert script.main(["--device", "cpu", "--shape", "tiny", "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    tiny = result["shapes"]["tiny"]
    assert result["ok"] and set(tiny["parity"]) == CHECKS and tiny["left_out"] == []
    assert set(tiny["plain_tokens_per_second"]) == {"1", "8"}
    assert all(set(v) == {"graphs", "eager"} and min(v.values()) > 0 for v in tiny["plain_tokens_per_second"].values())
    assert tiny["surface_s"] == {"1": 1.0, "4": 2.0} and set(tiny["context_s"]) == {"per_sequence", "per_row"}
    assert "All checks passed" in capsys.readouterr().out
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page[page.index("scripts/gpu_check.sh --json") :].partition("\n## ")[0]
    assert not [key for key in {*result, *tiny, *CHECKS} if f"`{key}`" not in section]


@pytest.mark.parametrize("bug", ["noise", "speculation"])
def test_a_device_that_differs_is_found_out(script: ModuleType, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "noise":
        keys, calls = script.noise.row_keys, []
        monkeypatch.setattr(script.noise, "row_keys", lambda *a: calls.append(1) or keys(*a) ^ (len(calls) - 1))
        assert script.noise_differs(torch.device("cpu"), 50) > 0
        return
    honest = script.tokens_of
    monkeypatch.setattr(
        script, "tokens_of", lambda engine, on: [[0, *t] if engine.proposer and on else t for t in honest(engine, on)]
    )
    checks = script.parity("tiny", torch.device("cpu"))
    assert [name for name, c in checks.items() if not c["ok"]] == ["tokens, speculation and graphs"]


def test_without_a_gpu_it_says_what_is_missing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.devices, "best", lambda: torch.device("cpu"))
    assert script.main([]) == 1
    said = capsys.readouterr().err
    assert "sees no cuda device" in said and "--device cpu --shape tiny" in said


def test_what_does_not_fit_is_left_out_and_is_no_success(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.devices, "free_bytes", lambda device: 1000)
    assert script.main(["--device", "cpu", "--shape", "tiny"]) == 1
    assert "too little memory" in capsys.readouterr().out


def test_the_shapes_are_the_published_sizes(script: ModuleType) -> None:
    for shape, parameters in (("1.5b", 1.54e9), ("7b", 7.62e9)):
        model = script.build(shape, "meta", torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.005)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    subprocess.run([ROOT / "scripts" / "gpu_check.sh"], check=True, timeout=360)
