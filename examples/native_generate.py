"""SGLang's native route: text, accept length, and which tokens a draft brought."""

import sys

import httpx

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
answer = httpx.post(
    f"{server}/generate",
    json={
        "text": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
        "sampling_params": {"temperature": 0, "max_new_tokens": 64},
        "return_provenance": True,
    },
    timeout=60,
)
meta = answer.raise_for_status().json()["meta_info"]
tokens = meta["provenance"]
drafted = sum(token["drafted"] for token in tokens)
print("".join(f"[{token['text']}]" if token["drafted"] else token["text"] for token in tokens))
print(f"{drafted} of {len(tokens)} tokens drafted, {meta['spec_accept_length']:.2f} tokens a pass")
