# syntax=docker/dockerfile:1
#
#   docker build --target gateway -t foredraft-gateway .    text only: no torch
#   docker build --target cpu     -t foredraft:cpu .        verifier, draft and gateway on CPUs
#   docker build --target cuda    -t foredraft:cuda .       the same with CUDA's libraries; needs the NVIDIA
#                                                           container toolkit to run
#
# Bases are pinned by version. Pin them by digest too where you build for others: --build-arg BASE=python@sha256:...
# All targets run as user 10001 and write only to /tmp, /run/foredraft and /cache, so the root may be read-only.

ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/foredraft/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# Compiles the C extensions; the compiler stays behind in this stage.
FROM base AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM base AS install-gateway
COPY --from=wheel /wheels /wheels
# Of the bundled models a gateway needs the tokenizers alone.
RUN python -m venv /opt/foredraft \
    && /opt/foredraft/bin/pip install /wheels/*.whl \
    && find /opt/foredraft -path '*/foredraft/bundled/*' -name '*.safetensors' -delete

FROM base AS install-cpu
COPY --from=wheel /wheels /wheels
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/foredraft \
    && /opt/foredraft/bin/pip install --extra-index-url "${TORCH_INDEX}" 'torch==2.13.0+cpu' \
    && /opt/foredraft/bin/pip install "$(echo /wheels/*.whl)[torch]"

# PyPI's torch brings Triton and CUDA's libraries with it; the driver comes from the host.
FROM base AS install-cuda
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/foredraft \
    && /opt/foredraft/bin/pip install 'torch==2.13.0' \
    && /opt/foredraft/bin/pip install "$(echo /wheels/*.whl)[torch]"

# What all images have in common when they run.
FROM base AS runtime
RUN groupadd --gid 10001 foredraft \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin foredraft \
    && install --directory --owner 10001 --group 10001 --mode 0700 /run/foredraft /cache
ENV HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    XDG_RUNTIME_DIR=/run/foredraft
WORKDIR /tmp
USER 10001:10001
STOPSIGNAL SIGTERM

FROM runtime AS gateway
COPY --from=install-gateway /opt/foredraft /opt/foredraft
EXPOSE 30000 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "foredraft.rpc.healthcheck", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--host", "0.0.0.0"]

FROM runtime AS cpu
COPY --from=install-cpu /opt/foredraft /opt/foredraft
EXPOSE 30000 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-m", "foredraft.rpc.healthcheck", "127.0.0.1:50051"]
CMD ["foredraft", "serve", "--host", "0.0.0.0"]

# Triton compiles kernels when a model first runs on a kind of GPU, what launches them with a C compiler. The cache keeps both.
FROM runtime AS runtime-cuda
USER 0:0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV TRITON_CACHE_DIR=/cache/triton

FROM runtime-cuda AS cuda
COPY --from=install-cuda /opt/foredraft /opt/foredraft
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
EXPOSE 30000 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-m", "foredraft.rpc.healthcheck", "127.0.0.1:50051"]
CMD ["foredraft", "serve", "--host", "0.0.0.0", "--device", "cuda"]
