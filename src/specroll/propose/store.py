"""Heads on disk: a folder with one safetensors file and `heads.json`, which names the model that they fit.

`heads.json` is replaced last and names its weights file by their digest, so a crash at any moment leaves either the old
heads or the new ones. Nothing is unpickled. Knows nothing of how heads are trained or used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from specroll.config import HeadsConfig
from specroll.files import write_atomic
from specroll.propose.heads import FutureHeads
from specroll.propose.readout import input_layer, output_layer

FORMAT = 3
MANIFEST = "heads.json"


class HeadsFileError(ValueError):
    """Heads that cannot be read: missing, damaged, or of a format that this version does not know."""


class HeadsMismatchError(ValueError):
    """Heads that were fitted to another model."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What makes two models the same to their heads: the shape, and the embedding and lm_head that heads share.

    The weights are hashed as bfloat16, so that one model loaded in two precisions is one model. LoRA leaves them alone.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: int
    embedding_sha256: str
    lm_head_sha256: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fingerprint:
        config = model.config
        text = config.get_text_config()
        embedding, lm_head = input_layer(model).weight, output_layer(model).weight
        embedding_digest = _weight_digest(embedding)
        tied = embedding.data_ptr() == lm_head.data_ptr() and embedding.shape == lm_head.shape
        return cls(
            architecture=config.model_type,
            hidden_size=lm_head.shape[1],
            vocab_size=lm_head.shape[0],
            layers=text.num_hidden_layers,
            embedding_sha256=embedding_digest,
            lm_head_sha256=embedding_digest if tied else _weight_digest(lm_head),
        )

    def check(self, model: PreTrainedModel, what: str, otherwise: str) -> Fingerprint:
        """`model`'s own, which is the same; else HeadsMismatchError for `what`, and what to do `otherwise`."""
        present = Fingerprint.of(model)
        if self != present:
            raise HeadsMismatchError(
                f"{what} fit another model.\n  they fit:   {self}\n  this model: {present}\n"
                f"Load the model that they fit, or {otherwise}"
            )
        return present

    def __str__(self) -> str:
        return (
            f"{self.architecture} with {self.layers} layers, width {self.hidden_size}, vocabulary {self.vocab_size}, "
            f"lm_head {self.lm_head_sha256[:12]}"
        )


def save_heads(heads: FutureHeads, folder: str | Path, model: PreTrainedModel) -> Path:
    """Write `heads`, which fit `model`, into `folder` (made if need be; earlier heads there are replaced).

    Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    payload = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()})
    digest = hashlib.sha256(payload).hexdigest()
    weights = folder / f"heads-{digest[:12]}.safetensors"
    manifest = {
        "format": FORMAT,
        "weights": weights.name,
        "weights_sha256": digest,
        "heads": asdict(heads.config),
        "draft_vocabulary": None if heads.vocabulary_V is None else heads.vocabulary_V.numel(),
        "model": asdict(Fingerprint.of(model)),
    }
    write_atomic(weights, payload)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    for stale in folder.glob("heads-*.safetensors"):
        if stale != weights:
            stale.unlink()
    return folder


def load_heads(folder: str | Path, model: PreTrainedModel) -> FutureHeads:
    """The heads in `folder`, on `model`'s device.

    Raises:
        HeadsFileError: nothing there, damaged, or an unknown format.
        HeadsMismatchError: fitted to another model.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        fitted = Fingerprint(**manifest["model"])
        config = HeadsConfig(**manifest["heads"])
        weights, digest = folder / Path(manifest["weights"]).name, manifest["weights_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise HeadsFileError(f"{folder / MANIFEST} is damaged ({error}); {_REFIT}") from error
    present = fitted.check(model, f"the heads in {folder}", "fit heads to this one: specroll heads fit")
    state = _read_weights(weights, digest)
    if wrong := _what_is_wrong(state, config, present):
        raise HeadsFileError(f"{weights} does not hold what {MANIFEST} says: {wrong}; {_REFIT}")
    heads = FutureHeads(present.hidden_size, present.vocab_size, config).to(model.device)
    heads.use_vocabulary(state.get("vocabulary_V"))
    heads.calibration_2PK = state.get("calibration_2PK")
    try:
        heads.load_state_dict(state)
    except RuntimeError as error:
        raise HeadsFileError(f"{weights} does not hold what {MANIFEST} says: {error}; {_REFIT}") from error
    return heads


def _what_is_wrong(state: dict[str, Tensor], config: HeadsConfig, model: Fingerprint) -> str | None:
    """Of what no shape of `FutureHeads` checks, or only once it has been allocated."""
    shape, second = (config.blocks, model.hidden_size, config.width_factor * model.hidden_size), state.get("second_BHF")
    if second is None or tuple(second.shape) != shape:
        return f"no weights of heads that see the {config.sees}, with width factor {config.width_factor}"
    bias = state.get("bias_KF")
    if bias is None or tuple(bias.shape) != (config.horizons, shape[2]):
        return f"no biases of {config.horizons} horizons"
    calibration = state.get("calibration_2PK")
    if calibration is not None and (
        tuple(calibration.shape) != (2, 2, config.horizons) or not bool(calibration.isfinite().all())
    ):
        return "its calibration is not that of its horizons"
    vocabulary = state.get("vocabulary_V")
    if vocabulary is not None and (
        vocabulary.dtype != torch.int64
        or vocabulary.dim() != 1
        or vocabulary.numel() == 0
        or not bool((vocabulary.diff() > 0).all())
        or not 0 <= int(vocabulary[0]) <= int(vocabulary[-1]) < model.vocab_size
    ):
        return f"its draft vocabulary is no ascending list of token ids below {model.vocab_size}"
    return None


_REFIT = "copy the folder again, or fit heads anew: specroll heads fit"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder says of its heads. Raises `HeadsFileError` where there are none, or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise HeadsFileError(
            f"no heads in {folder} (it has no {MANIFEST}); fit some first: specroll heads fit"
        ) from error
    except (ValueError, RecursionError) as error:
        raise HeadsFileError(f"{path} is damaged ({error}); {_REFIT}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise HeadsFileError(f"{path} is of format {found}, this version reads format {FORMAT}; {_REFIT}")
    return manifest


def _read_weights(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        payload = path.read_bytes()
    except FileNotFoundError as error:
        raise HeadsFileError(f"{path} is missing, though {MANIFEST} names it; {_REFIT}") from error
    except (OSError, ValueError) as error:
        raise HeadsFileError(f"{path} cannot be read ({error}); {_REFIT}") from error
    if hashlib.sha256(payload).hexdigest() != digest:
        raise HeadsFileError(f"{path} is damaged (its SHA-256 is not the one in {MANIFEST}); {_REFIT}")
    try:
        return load_tensors(payload)
    except SafetensorError as error:
        raise HeadsFileError(f"{path} is not a safetensors file ({error}); {_REFIT}") from error


def _weight_digest(weight: Tensor) -> str:
    """SHA-256 over the bfloat16 bytes, by blocks of rows so that no copy of the whole is made."""
    digest = hashlib.sha256()
    for block in weight.detach().split(4096):
        digest.update(block.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
