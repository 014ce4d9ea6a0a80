"""Slow, independent versions of `foredraft.sampling` and `foredraft.trees`, in float64 numpy
and plain loops.
"""

import numpy as np

from foredraft.types import SamplingParams


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Returns the exact distribution of one row after temperature and filters."""
    logits = logits.astype(np.float64)
    if params.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = (logits - logits.max()) / params.temperature
    probs = np.exp(scaled)
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda v: (-probs[v], v))
    if params.top_k > 0:
        for v in order[params.top_k :]:
            probs[v] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        reached = 0.0
        for v in order:
            if reached >= params.top_p:
                probs[v] = 0
            reached += probs[v]
        probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def penalised(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], ends: set[int]
) -> np.ndarray:
    """Applies penalties and biases to one row of logits."""
    out = logits.astype(np.float64)
    if params.repetition_penalty != 1:
        for v in set(prompt) | set(output):
            factor = params.repetition_penalty
            out[v] = out[v] / factor if out[v] > 0 else out[v] * factor
    for v in set(output):
        out[v] -= params.frequency_penalty * output.count(v) + params.presence_penalty
    for v, bias in params.logit_bias.items():
        out[v] += bias
    if len(output) < params.min_new_tokens:
        for v in ends:
            out[v] = -np.inf
    for word in params.bad_words:
        if (*output, word[-1])[-len(word) :] == word:
            out[word[-1]] = -np.inf
    if params.allowed_token_ids:
        for v in set(range(len(out))) - set(params.allowed_token_ids):
            out[v] = -np.inf
    return out
