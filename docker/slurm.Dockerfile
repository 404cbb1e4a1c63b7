# A test cluster of Slurm in a container, with the recipes in it: docker/slurm.compose.yaml says how to use it.
#
# IMAGE is a recipe's image: ddp's for all but slurm/horovod.sbatch, horovod's for all but slurm/apex.sbatch's backend. make image
# gives it this name, too: a build pulls a missing image, and no public registry can have a name below .invalid.
ARG IMAGE=registry.invalid/cluster-recipes/ddp:latest
FROM ${IMAGE}
# munge, slurmd and the nodes' namespaces need root.
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends iproute2 munge slurm-wlm \
    && rm -rf /var/lib/apt/lists/*
# The settings of `source .../activate`, so that Slurm's commands work in every shell of the container.
ENV SLURM_CLUSTER_DIR=/run/cluster-recipes-slurm \
    PATH=/run/cluster-recipes-slurm/bin:$PATH \
    GOMP_SPINCOUNT=1000 OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ENTRYPOINT []
CMD ["bash", "-c", "scripts/lab/slurm_cluster.sh up \"${NODES:-2}\" && exec sleep infinity"]
