"""The frozen target of a draft head: its features, its output head, and text that it writes itself."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from training.lm.model import LlamaShape
from training.lm.trainer import load_model

_PART_BYTES = 1 << 20  # of a file's begin, middle and end


class Target:
    """A causal language model out of a Hugging Face directory, frozen.

    A plain Llama runs in this package's own module, which compiles well; everything else runs in transformers.

    Args:
        path: The directory.
        device: Where it runs.
        dtype: Dtype of its activations (and of its weights, in transformers).
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"no config.json in {path}")
        self.path, self.device, self.dtype = path, device, dtype
        config = json.loads((path / "config.json").read_text())
        self._own = None
        self._theirs: Any = None
        if config.get("architectures") == ["LlamaForCausalLM"] and not config.get("rope_scaling"):
            self._own = load_model(path, device, dtype)
            self.embed_weight = self._own.model.embed_tokens.weight.to(dtype)
            self.output_weight = self._own.output_weight.to(dtype)
            self.shape = self._own.shape
        else:
            self._theirs = self._transformers()
            self.embed_weight = self._theirs.get_input_embeddings().weight
            self.output_weight = self._theirs.get_output_embeddings().weight
            self.shape = LlamaShape.from_dir(path)

    @property
    def is_own(self) -> bool:
        """Whether features are computed by this package's own module."""
        return self._own is not None

    def identity(self) -> dict[str, str]:
        """What tells it from other targets: a digest of its configuration, of its tokenizer, and of parts of its weights."""
        digest = hashlib.sha256()
        names = ("config.json", "tokenizer.json", "*.safetensors")
        for file in (file for name in names for file in sorted(self.path.glob(name))):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                for start in (0, size // 2, max(0, size - _PART_BYTES)):
                    content.seek(start)
                    digest.update(content.read(_PART_BYTES))
        return {"model": self.path.name, "sha256": digest.hexdigest()}

    def features(self, tokens: Tensor, capture: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm, and the residual streams entering the layers in `capture`; [B, T, H] each."""
        if self._own is not None:
            return self._own(tokens, capture)
        output = self._theirs.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        return output.last_hidden_state, [output.hidden_states[index] for index in capture]

    def _transformers(self) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        return model.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
        """Continues prompts [B, P] by exactly `new_tokens` tokens each; end-of-text tokens do not end a row.

        Returns:
            int64 [B, P + new_tokens].
        """
        if self._theirs is None:
            self._theirs = self._transformers()
        torch.manual_seed(seed)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature > 0
            else {"do_sample": False}
        )
        self._theirs.generation_config.eos_token_id = None
        tokens = self._theirs.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            **sampling,
        )
        return torch.as_tensor(tokens)

    def release_generator(self) -> None:
        """Frees the memory of the generating copy where features do not need it."""
        if self._own is not None:
            self._theirs = None
