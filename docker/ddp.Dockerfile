# The image of every recipe on torch.distributed: single, dataparallel, ddp, spawn, fsdp, tensor, pipeline, scratch, probe.
#
#   make image RECIPE=ddp
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/runs" cluster-recipes/ddp ddp --runs-dir /runs --epochs 3
#
# BASE_IMAGE is any Debian or Ubuntu with Python 3.11 or later in its packages: torch brings its own CUDA libraries.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

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

# --- The image ------------------------------------------------------------------------------------------------------
FROM base
WORKDIR /opt/cluster-recipes
COPY . .
RUN python -m compileall -q recipes scripts slurm
ARG REVISION=unknown
ENV SOURCE_REVISION=${REVISION}
LABEL org.opencontainers.image.title="cluster-recipes/ddp" \
    org.opencontainers.image.description="PyTorch training recipes on torch.distributed" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
ENTRYPOINT ["scripts/launch.sh"]
CMD ["ddp"]
