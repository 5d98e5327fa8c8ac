"""What a machine says of the processes it started: whether a program is one of several, before it waits for the others.

jax.distributed.initialize() asks the same machines in the same way, and then waits for as many processes as they name.
It is meant for programs that know that they are several. Ours run on a laptop, in a notebook and on a pod by the same
command, so what only looks like a cluster must cost no time and no error.
"""

import os
import urllib.error
import urllib.request

from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster

from composer_jax.errors import UserError

METADATA_S = 2.0
"""How long Google's metadata server, which is on the same machine, has for its answer; elsewhere there is none."""


def announced() -> int:
    """How many processes this program was started as: those of a TPU pod, a SLURM step, mpirun or an indexed Job of
    Kubernetes; 1 where nobody says anything. Where it is more, `processes.join` needs no arguments.

    Raises:
      UserError: the machine should be able to say, and cannot.
    """
    try:
        for cluster in clusters.ClusterEnv._cluster_types:
            if cluster.opt_in_only_method or not _worth_asking(cluster) or not cluster.is_env_present():
                continue
            count = cluster.get_process_count()
            if cluster is clusters.SlurmCluster:
                # A shell inside an allocation of many tasks is a step of one.
                count = min(count, int(os.environ.get("SLURM_STEP_NUM_TASKS", count)))
            return count
    except Exception as error:  # of web requests, of Kubernetes' client, of missing variables
        raise UserError(
            f"cannot find out whether this process is one of several: {error}; with --processes=1 it is not, and "
            "--coordinator, --processes and --process say which it is."
        ) from error
    return 1


def _worth_asking(cluster: type[clusters.ClusterEnv]) -> bool:
    """False where JAX would take one machine for a cluster, or wait long for a server that is not there."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES"))
    if cluster is clusters.K8sCluster:  # any pod looks like it; those of an indexed Job have a number
        return "JOB_COMPLETION_INDEX" in os.environ
    if cluster is clusters.GkeTpuCluster:  # notebooks with one TPU have this variable too
        return "," in (hosts or "") or int(os.environ.get("MEGASCALE_NUM_SLICES", 1)) > 1
    if cluster is clusters.GceTpuCluster:
        return cloud_tpu_cluster.running_in_cloud_tpu_vm and hosts is None and _metadata_answers()
    return True


def _metadata_answers() -> bool:
    """Whether Google's metadata server knows this machine as a worker of a TPU."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/agent-worker-number"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
