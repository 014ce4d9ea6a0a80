"""What absent fields mean, on a model whose generation_config.json says something else."""

import json
from pathlib import Path
from typing import Any

import grpc
import httpx

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from testing import stack as stacks

GREEDY: dict[str, Any] = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1}


def test_absent_fields_are_openais_defaults(tmp_path: Path) -> None:
    model = stacks.make_model(tmp_path / "model")
    file = model / "generation_config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | GREEDY | {"repetition_penalty": 1.9}))
    asked: dict[str, Any] = {"prompt": "The dog", "max_tokens": 30, "seed": 3, "ignore_eos": True}
    explicit = {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
    with stacks.running_stack(model) as stack, httpx.Client(base_url=stack.urls["http"]) as http:

        def text(**more: Any) -> str:
            answer = http.post("/v1/completions", json={**asked, **more}, timeout=60)
            return str(answer.json()["choices"][0]["text"])

        assert text() == text(**explicit)
        assert text() != text(temperature=0)
        sampling = inference_pb2.SamplingParams(seed=3, max_new_tokens=30, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="The dog", sampling=sampling)
        with grpc.insecure_channel(stack.urls["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            parts = [response.text for response in stub.Generate(request, timeout=60)]
        assert "".join(parts) == text()
