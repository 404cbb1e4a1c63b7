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
# A snapshot of the distribution's archive, for repeatable builds. Unset, the packages are today's.
ARG APT_SNAPSHOT=
COPY docker/apt-snapshot.sh /usr/local/sbin/
RUN apt-snapshot.sh "$APT_SNAPSHOT"
# --compile needs g++ and Python's headers. Without libibverbs1 and its providers, NCCL uses TCP and prints no warning.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ ibverbs-providers iproute2 libibverbs1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# For AWS: the version of its EFA installer (libfabric, aws-ofi-nccl), and the archive's SHA-256.
ARG EFA_INSTALLER=
ARG EFA_SHA256=
# hadolint ignore=DL3003,DL3008
RUN if [ -n "$EFA_INSTALLER" ]; then \
        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends curl \
        && curl -fsSL -o /tmp/efa.tar.gz "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz" \
        && echo "$EFA_SHA256  /tmp/efa.tar.gz" | sha256sum --check \
        && tar -xzf /tmp/efa.tar.gz -C /tmp \
        && (cd /tmp/aws-efa-installer && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify) \
        && ldconfig && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/*; \
    fi
# Another lock, such as run-cu128.txt, and the index of its torch (docker/README.md).
ARG LOCK=run.txt
ARG TORCH_INDEX=
COPY requirements/${LOCK} /tmp/run.txt
RUN --mount=type=cache,target=/root/.cache/pip python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --require-hashes --requirement /tmp/run.txt \
    && rm /tmp/run.txt
# A non-root user. HOME and USER are set for any user id (docker run --user).
RUN useradd --uid 10001 --user-group --create-home --shell /bin/bash --password '*' trainer
ENV PATH=/opt/venv/bin:$PATH PYTHON=/opt/venv/bin/python PYTHONUNBUFFERED=1 HOME=/tmp USER=trainer

# --- apex's wheel ---------------------------------------------------------------------------------------------------
FROM ${BUILD_IMAGE} AS build
ARG APT_SNAPSHOT=
COPY docker/apt-snapshot.sh /usr/local/sbin/
RUN bash /usr/local/sbin/apt-snapshot.sh "$APT_SNAPSHOT"
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/horovod-build.txt docker/build-apex.sh /build/
ARG APEX_REPOSITORY=https://github.com/NVIDIA/apex.git
ARG CUDA_ARCHS="8.0;9.0;10.0"
# The packages of the first stage are mounted; changes to them are dropped.
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
