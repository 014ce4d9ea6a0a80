"""From tokens and page tables to logits and hidden states. Knows no request, no draft and no service."""
