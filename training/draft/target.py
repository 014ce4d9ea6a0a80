"""The frozen target of a draft head: its features, its output head, and text that it writes
itself.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.config_reader import read_json
from foredraft.models.weights import first_line
from training.lm.decoding import write_text
from training.lm.loading import load_model
from training.lm.model import Llama, LlamaShape, is_plain_llama

_REMEDY = "train on the plain checkpoint"
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
        self._own: Llama | None = None
        self._softcap: float | None = None
        if is_plain_llama(path):
            self._own = load_model(path, device, dtype)
            self.embed_weight = self._own.model.embed_tokens.weight.to(dtype)
            self.output_weight = self._own.output_weight.to(dtype)
            self.shape = self._own.shape
        else:
            self._theirs: Any = self._transformers()
            self.embed_weight = self._theirs.get_input_embeddings().weight
            self.output_weight = self._theirs.get_output_embeddings().weight
            self.shape = LlamaShape.from_dir(path)
            self._softcap = getattr(self._theirs.config, "final_logit_softcapping", None)

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

        All are [B, T, H]; a stream has the number of the layer it enters, and the one that leaves
        the last layer their number.
        """
        if self._own is not None:
            return self._own(tokens, capture)
        last: list[Any] = []  # `hidden_states` ends with this stream behind the norm
        hook = self._theirs.model.layers[-1].register_forward_hook(
            lambda layer, inputs, output: last.append(output)
        )
        try:
            # The whole model, since quantised ones unpack their weights in their first forward.
            output = self._theirs(
                input_ids=tokens, output_hidden_states=True, use_cache=False, logits_to_keep=1
            )
        finally:
            hook.remove()
        *streams, hidden = output.hidden_states
        streams.append(last[0][0] if isinstance(last[0], tuple) else last[0])
        return hidden, [streams[index] for index in capture]

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits of hidden states [..., H], float32 [..., V]."""
        logits = F.linear(hidden, self.output_weight).float()
        return logits if self._softcap is None else self._softcap * (logits / self._softcap).tanh()

    def _transformers(self) -> Any:
        import transformers
        from transformers import AutoModelForCausalLM

        for name in read_json(self.path / "config.json").get("architectures") or []:
            # A head names a class of its own beside the model_type of its target.
            if not hasattr(transformers, name):
                raise CheckpointError(f"{self.path} is no model that transformers runs: {name}")
        load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
        try:
            model, info = load(self.path, dtype=self.dtype, output_loading_info=True)
        except ImportError as error:  # a package that transformers wants for a quantization
            raise CheckpointError(
                f"{self.path}: transformers does not run it: {first_line(error)}; {_REMEDY}"
            ) from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.path}: transformers cannot load it: {first_line(error)}"
            ) from error
        if not hasattr(getattr(model, "model", None), "layers"):
            raise CheckpointError(
                f"{self.path}: {type(model).__name__} has no layers at model.layers, whose outputs"
                " heads read"
            )
        # transformers warns of both, and computes another model.
        scales = [name for name in info["unexpected_keys"] if ".weight_" in name]
        if scales:
            raise CheckpointError(f"{self.path}: transformers leaves {min(scales)} out; {_REMEDY}")
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{self.path} lacks {missing[0]}")
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
        # Nothing of the checkpoint's own defaults, such as a repetition penalty.
        self._theirs.generation_config = type(self._theirs.generation_config)()

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
