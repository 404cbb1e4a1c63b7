# The image of the apex recipe: NVIDIA apex 25.05, the last with apex.amp, built with its CUDA extensions.
#
#   make image RECIPE=apex
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/runs" cluster-recipes/apex apex --runs-dir /runs
#
# BUILD_IMAGE has the CUDA toolkit, of torch's CUDA version to the minor number, that compiles the extensions. Without a
# toolkit apex is left out, and the recipe runs on torch.amp. CUDA_ARCHS names the GPUs to compile for.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# --- What all images share; the lines are the same in each, so that they also share these layers -------------------
FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# g++ and Python's headers are for --compile, which makes code while it trains.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ iproute2 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/run.txt /tmp/run.txt
RUN --mount=type=cache,target=/root/.cache/pip python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --require-hashes --requirement /tmp/run.txt \
    && rm /tmp/run.txt
# An ordinary user, who may be someone else (docker run --user): what finds its way by HOME or USER finds it then, too.
RUN useradd --uid 10001 --user-group --create-home --shell /bin/bash --password '*' trainer
ENV PATH=/opt/venv/bin:$PATH PYTHON=/opt/venv/bin/python PYTHONUNBUFFERED=1 HOME=/tmp USER=trainer

# --- apex's wheel ---------------------------------------------------------------------------------------------------
FROM ${BUILD_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/horovod-build.txt docker/build-apex.sh /build/
ARG APEX_REPOSITORY=https://github.com/NVIDIA/apex.git
ARG CUDA_ARCHS="8.0;9.0;10.0"
# The packages of the first stage, and what is written among them is dropped.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=base,source=/opt/venv,target=/opt/venv,rw \
    /opt/venv/bin/python -m pip install --require-hashes --no-deps --target /tools -r /build/horovod-build.txt \
    && PYTHON=/opt/venv/bin/python PYTHONPATH=/tools PATH=$PATH:/tools/bin /build/build-apex.sh /wheels

# --- The image ------------------------------------------------------------------------------------------------------
FROM base
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    find /wheels -name 'apex-*.whl' -exec python -m pip install --no-cache-dir --no-deps --no-index {} +
WORKDIR /opt/cluster-recipes
COPY . .
RUN python -m compileall -q recipes scripts slurm
ARG REVISION=unknown
ENV SOURCE_REVISION=${REVISION}
LABEL org.opencontainers.image.title="cluster-recipes/apex" \
    org.opencontainers.image.description="apex.amp training recipe, with NVIDIA apex 25.05" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
ENTRYPOINT ["scripts/launch.sh"]
CMD ["apex"]
