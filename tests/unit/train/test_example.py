from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tiny import tiny, tiny_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_trl.py"


# transformers warns of its own renaming of gradient checkpointing.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_the_example_trains(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    main = runpy.run_path(str(EXAMPLE))["main"]
    trainer = main(str(tmp_path / "model"), 2, str(tmp_path / "run"), save_strategy="no")
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2
    assert all(0 < log["reward"] <= 1 and log["specroll/logp_gap_max"] < 1e-4 for log in logs)
