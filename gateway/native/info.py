"""What /model_info and /server_info answer."""

from typing import Any

from foredraft import __version__
from gateway.serving import Serving


def model_info(serving: Serving) -> dict[str, Any]:
    """Returns the model: names, context length, vocabulary."""
    info = serving.info
    return {
        "model_path": info.model_path,
        "tokenizer_path": serving.config.tokenizer_path or info.model_path,
        "is_generation": True,
        "served_model_name": info.model,
        "architecture": info.architecture,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "has_chat_template": serving.tokenizer.chat_template is not None,
    }


def server_info(serving: Serving) -> dict[str, Any]:
    """Returns the server: version, device, KV pool, drafts."""
    info = serving.info
    return {
        "version": __version__,
        "model_path": info.model_path,
        "served_model_name": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "tp_size": info.tensor_parallel_size or 1,
        "max_total_num_tokens": info.kv_tokens,
        "page_size": info.page_size,
        "context_length": info.context_length,
        "max_running_requests": info.max_running_requests,
        "speculative_algorithm": info.speculative_algorithm,
        "speculative_draft_model_path": info.draft_model,
        "speculative_num_steps": info.speculative_num_steps,
        "speculative_eagle_topk": info.speculative_eagle_topk,
        "speculative_num_draft_tokens": info.speculative_num_draft_tokens,
        "checksum": info.checksum,
        "drafts": [
            {
                "name": draft.name,
                "model": draft.model,
                "checksum": draft.checksum,
                "quantization": draft.quantization,
                "trained_for": draft.trained_for,
                "note": draft.note,
            }
            for draft in info.drafts
        ],
        "exactness": {
            "level": info.exactness.level,
            "fingerprint": info.exactness.fingerprint,
            "depends_on": dict(info.exactness.depends_on),
        },
        "verifiers": {
            target: {
                "waiting": load.waiting,
                "running": load.running,
                "free_pages": load.free_pages,
                "total_pages": load.total_pages,
                "draft_available": load.draft_available,
                "drafting_since": load.drafting_since or None,
            }
            for target, load in serving.pool.loads.items()
        },
    }
