"""Small random checkpoints of every architecture, written by transformers itself."""

import json

import pytest
import safetensors.torch
import torch

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN = BASE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, "truncate": False}
GEMMA = BASE | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# name -> (transformers' class, its configuration)
VARIANTS = {
    "llama": ("Llama", BASE),
    "llama-bias": ("Llama", BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-llama3": ("Llama", BASE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": (
        "Llama",
        BASE | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama-yarn": ("Llama", BASE | {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", BASE | {"rope_parameters": YARN_MSCALE}),
    "mistral": ("Mistral", BASE | {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", BASE | {"sliding_window": 8}),
    "mistral-layers": (
        "Ministral",
        BASE
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
        },
    ),
    "qwen2": ("Qwen2", BASE),
    "qwen2-window": ("Qwen2", QWEN),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": ("Qwen3", QWEN | {"head_dim": 8}),
    "mimo": ("Qwen2", BASE),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-softcap": ("Gemma3", GEMMA | {"final_logit_softcapping": 5.0}),
}


def build(name, directory):
    """Saves a variant's checkpoint and returns transformers' model of it."""
    import transformers

    family, values = VARIANTS[name]
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**values, attn_implementation="eager")
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if key.endswith("norm.weight") and family != "Gemma3" else 0.0
            parameter.normal_(around, 0.3)
    model.save_pretrained(directory)
    if name == "mimo":
        add_mtp_layers(directory)
    if family == "Ministral":  # published as a Mistral, which transformers tells by its layer_types
        file = directory / "config.json"
        file.write_text(file.read_text().replace("Ministral", "Mistral").replace("mini", "mi"))
    return model


def add_mtp_layers(directory):
    """Makes a Qwen2 checkpoint look like MiMo's: other name, and layers that the decoder does not
    use.
    """
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    weights["model.mtp_layers.0.input_proj.weight"] = torch.randn(32, 64)
    safetensors.torch.save_file(weights, directory / "model.safetensors")


class Checkpoints:
    """Builds each variant once per session."""

    def __init__(self, factory):
        self._factory = factory
        self._built = {}

    def __call__(self, name):
        """(directory, transformers' model)."""
        if name not in self._built:
            directory = self._factory.mktemp(name)
            self._built[name] = (directory, build(name, directory))
        return self._built[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory)


@pytest.fixture(scope="session", params=list(VARIANTS))
def variant(request, checkpoints):
    """(name, directory, transformers' model) of each variant."""
    return request.param, *checkpoints(request.param)
