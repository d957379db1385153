"""From a name to a model and its tokenizer: the default model, a local folder, or a name on the hub.

Weights are read from safetensors only and code of a model repository is never run. What the engine does with the model
is `target`'s business; that it has a tokenizer and all its weights is settled here.

`python -m specroll.model.load` prepares the default model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specroll.device import best, multiplies_bfloat16
from specroll.model import default

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_model(
    name: str | None = None, *, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, with its tokenizer.

    Args:
        name: None or "smollm2" for the default model (prepared first if need be), a local folder, or a hub name.
        dtype: a torch dtype or its name; "auto" is `native_dtype(device)`.
        device: where to put the weights; None is the CUDA device if there is one, else the CPU.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it is not a causal language model with all of its
            weights in safetensors. The message says which, and what to do.
    """
    place = torch.device(device or best())
    resolved = _dtype(dtype, place)
    source = str(default.prepare()) if name in (None, default.NAME) else _checked_name(name)
    _refuse_other_than_causal(_read(AutoConfig, "configuration", source), source)
    model, report = _read(
        AutoModelForCausalLM,
        "weights",
        source,
        dtype=resolved,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # and refused just below, with the names
        output_loading_info=True,
    )
    broken = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if broken:
        raise ValueError(
            f"the weights of {source!r} do not fill the model: {len(broken)} tensors are missing or of another shape "
            f"({', '.join(broken[:3])}). Is it a checkpoint of a causal language model, wholly copied?"
        )
    tokenizer = _read(AutoTokenizer, "tokenizer", source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval().to(place), tokenizer


def native_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where the device has units for it, else float32: emulated bfloat16 products are several times slower."""
    return torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32


def _dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return native_dtype(device)
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in _DTYPES.values():
        raise ValueError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype}")
    return resolved


def _checked_name(name: str) -> str:
    """A folder that looks like a model, or a name that the hub could know."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name!r} is no model folder: it has no config.json (as `save_pretrained` writes it)")
        if not any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{name!r} has no *.safetensors file, and no other format of weights is read. "
                "Save the model again with save_pretrained, or convert it."
            )
        return str(folder)
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"there is no folder {name!r}, and it cannot be a name on the hub (those are OWNER/NAME)")
    return name


def _read(loader: Any, part: str, source: str, **options: Any) -> Any:
    """`loader.from_pretrained(source)`, its errors put in words that say what to do."""
    try:
        return loader.from_pretrained(source, trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load the {part} of {source!r}: {_reason(error, part)}") from error


def _reason(error: Exception, part: str) -> str:
    cause = error.__cause__
    if isinstance(error, SafetensorError):
        return f"a *.safetensors file is damaged ({error}). Copy or download it again"
    if isinstance(cause, GatedRepoError):
        return "access to it must be granted on the hub first; then log in with `hf auth login`"
    if isinstance(cause, RepositoryNotFoundError):
        return "neither a local folder nor the hub has it. Check the spelling; if it is private, `hf auth login`"
    if isinstance(cause, LocalEntryNotFoundError):
        return (
            "it is no local folder, it was not downloaded before, and the hub cannot be reached. Check the name and "
            "the network (HF_HUB_OFFLINE switches the hub off)"
        )
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run. Use a model that the installed transformers knows"
    first_line = str(error).strip().splitlines()[0].rstrip(" :")
    return f"{first_line}. Are the tokenizer's files there?" if part == "tokenizer" else first_line


def _refuse_other_than_causal(config: Any, source: str) -> None:
    declared = list(config.architectures or [])
    fitting = any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in declared)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "is_encoder_decoder", False)
    if not known or (declared and not fitting):
        kind = ", ".join(declared) or config.model_type
        raise ValueError(
            f"{source!r} is a {kind}, not a causal language model. Name one that AutoModelForCausalLM loads, "
            "such as Llama, Qwen or Gemma."
        )


if __name__ == "__main__":
    print(f"The default model is ready in {default.prepare()}")
