"""Text that a model writes with cached keys is what transformers writes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from training.lm.decoding import write_text
from training.lm.loading import load_model

MODEL = Path(__file__).parents[2] / "models" / "foredraft-demo"


def test_greedy_text_equals_that_of_transformers() -> None:
    prompts = torch.randint(0, 8192, (3, 17), generator=torch.Generator().manual_seed(5))
    written = write_text(load_model(MODEL, "cpu"), prompts, 12, 0.0, seed=1)
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert written.tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_are_sampled_from_the_distribution_at_a_temperature(temperature: float) -> None:
    model = load_model(MODEL, "cpu")
    prompt = torch.tensor([[0, 42]])
    drawn = write_text(model, prompt.expand(4096, -1), 1, temperature, seed=3)[:, -1]
    hidden, _ = model(prompt)
    expected = (model.logits(hidden[:, -1])[0] / temperature).softmax(-1)
    shares = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    deviation = (expected * (1 - expected) / len(drawn)).sqrt()
    likely = expected > 0.01
    assert likely.sum() > 3
    assert ((shares - expected).abs() < 4.5 * deviation)[likely].all()
    first, again = (
        write_text(model, prompt.expand(64, -1), 3, temperature, seed=3) for _ in range(2)
    )
    assert again.equal(first)
