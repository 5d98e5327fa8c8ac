"""Detects how many processes the cluster environment started, before this process waits for the others.

jax.distributed.initialize() reads the same environments (TPU pods, SLURM, Open MPI, Kubernetes) and then waits for as
many processes as they name, because it is meant for programs that are known to be distributed. Our entry points run on
a laptop, in a notebook and on a pod by the same command, so a machine that only resembles a cluster must cost neither
time nor an error.
"""

import os
import urllib.error
import urllib.request

from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster

from composer_jax.errors import UserError

METADATA_TIMEOUT_S = 2.0
"""Seconds to wait for Google's metadata server, which runs on the same machine if there is one."""


def detect_process_count() -> int:
    """Returns the number of processes of this TPU pod, SLURM step, mpirun or indexed Kubernetes Job; 1 elsewhere.

    If it is larger than 1, `processes.join_processes` needs no arguments.

    Raises:
      UserError: the environment looks like a cluster and its number of processes cannot be read.
    """
    try:
        for cluster in clusters.ClusterEnv._cluster_types:
            if cluster.opt_in_only_method or not _is_candidate(cluster) or not cluster.is_env_present():
                continue
            count = cluster.get_process_count()
            if cluster is clusters.SlurmCluster:
                # A shell inside an allocation of many tasks is a step of one.
                count = min(count, int(os.environ.get("SLURM_STEP_NUM_TASKS", count)))
            return count
    except Exception as error:  # from web requests, the Kubernetes client, missing or malformed variables
        raise UserError(
            f"cannot find out whether this process is one of several: {error}; pass --processes=1 if it is alone, or "
            "--coordinator, --processes and --process."
        ) from error
    return 1


def _is_candidate(cluster: type[clusters.ClusterEnv]) -> bool:
    """False where JAX would take one machine for a cluster, or wait long for a metadata server that does not exist."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES"))
    if cluster is clusters.K8sCluster:  # every pod matches; the pods of an indexed Job have an index
        return "JOB_COMPLETION_INDEX" in os.environ
    if cluster is clusters.GkeTpuCluster:  # notebooks with one TPU set this variable too
        return "," in (hosts or "") or int(os.environ.get("MEGASCALE_NUM_SLICES", 1)) > 1
    if cluster is clusters.GceTpuCluster:
        # JAX has no public form of this flag.
        on_tpu_vm = cloud_tpu_cluster.running_in_cloud_tpu_vm  # pyright: ignore[reportPrivateImportUsage]
        return on_tpu_vm and hosts is None and _is_tpu_worker()
    return True


def _is_tpu_worker() -> bool:
    """Whether Google's metadata server lists this machine as a worker of a TPU."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/agent-worker-number"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
