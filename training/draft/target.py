"""The frozen target of a draft head: its features, its output head, and text that it writes
itself.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from training.lm.decoding import write_text
from training.lm.model import Llama, LlamaShape
from training.lm.trainer import load_model

_PART_BYTES = 1 << 20  # bytes of a file's begin, middle and end


class Target:
    """A frozen causal language model from a Hugging Face directory.

    A plain Llama runs in this package's own module, which compiles well; everything else runs in
    transformers.

    Args:
        path: Directory of the model.
        device: Device to run on.
        dtype: Dtype of the activations (and of the weights, in transformers).
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"no config.json in {path}")
        self.path, self.device, self.dtype = path, device, dtype
        config = json.loads((path / "config.json").read_text())
        self._own: Llama | None = None
        if config.get("architectures") == ["LlamaForCausalLM"] and not config.get("rope_scaling"):
            self._own = load_model(path, device, dtype)
            self.embed_weight = self._own.model.embed_tokens.weight.to(dtype)
            self.output_weight = self._own.output_weight.to(dtype)
            self.shape = self._own.shape
        else:
            self._theirs: Any = self._transformers(config.get("architectures") or [])
            self.embed_weight = self._theirs.get_input_embeddings().weight
            self.output_weight = self._theirs.get_output_embeddings().weight
            self.shape = LlamaShape.from_dir(path)

    @property
    def is_own(self) -> bool:
        """Whether features are computed by this package's own module."""
        return self._own is not None

    def identity(self) -> dict[str, str]:
        """Returns name and digest, which tell targets apart.

        The digest covers configuration, tokenizer and parts of the weights.
        """
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
        """Computes hidden states after the final norm, and the residual streams in `capture`.

        All are [B, T, H]; a stream has the number of the layer it enters.
        """
        if self._own is not None:
            return self._own(tokens, capture)
        output = self._theirs.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        return output.last_hidden_state, [output.hidden_states[index] for index in capture]

    def _transformers(self, architectures: list[str]) -> Any:
        import transformers
        from transformers import AutoModelForCausalLM

        for name in architectures:
            # A head names a class of its own beside the model_type of its target.
            if not hasattr(transformers, name):
                raise CheckpointError(f"{self.path} is no model that transformers runs: {name}")
        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        return model.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor,
        new_tokens: int,
        temperature: float,
        seed: int,
        on_token: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Continues prompts [B, P] by exactly `new_tokens` tokens each; end-of-text tokens do not
        end a row.

        Args:
            on_token: Called after each token of the batch.

        Returns:
            int64 [B, P + new_tokens].
        """
        if self._own is not None:
            return write_text(self._own, prompts, new_tokens, temperature, seed, on_token)
        torch.manual_seed(seed)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature > 0
            else {"do_sample": False}
        )
        self._theirs.generation_config.eos_token_id = None

        def watch(tokens: Tensor, scores: Any, **options: Any) -> Tensor:
            on_token()
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        tokens = self._theirs.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            stopping_criteria=[watch],
            **sampling,
        )
        return torch.as_tensor(tokens)
