"""A stream over gRPC: text as it comes, then what speculation did for it."""

import sys

import grpc

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc

server = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
request = inference_pb2.GenerateRequest(
    text="def add(a, b):\n",
    sampling=inference_pb2.SamplingParams(temperature=0, max_new_tokens=48),
)
with grpc.insecure_channel(server) as channel:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for response in stub.Generate(request, timeout=60):  # the verifier keeps the deadline, too
        print(response.text, end="", flush=True)
figures = response.completion.speculation
print(f"\n{figures.accepted_tokens} of {figures.drafted_tokens} drafted tokens accepted")
