"""The number of processes is read from every supported cluster environment."""

import http.server
import os
import threading

import pytest
from jax._src.clusters import cloud_tpu_cluster

from composer_jax.errors import UserError
from composer_jax.parallel.cluster_env import detect_process_count


@pytest.fixture
def machine(monkeypatch):
    """A machine without a cluster environment, until the test sets variables."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "MEGASCALE_", "GCE_", "JOB_COMPLETION_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no test asks Google's metadata server
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
MPIRUN = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1),
        (SLURM, 4),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, 4),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, 1),  # an interactive shell in an allocation of four tasks
        (MPIRUN, 3),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),  # any pod
    ],
    ids=["nothing", "SLURM", "SLURM step", "SLURM shell", "mpirun", "Kubernetes"],
)
def test_environment_variables_give_the_number_of_processes(machine, recwarn, variables, count):
    machine(**variables)
    assert detect_process_count() == count and not recwarn.list


@pytest.fixture
def tpu(machine, monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    return machine


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "MEGASCALE_NUM_SLICES": "1"}, 4),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "3"}, 6),
        ({"TPU_PROCESS_ADDRESSES": "a:8476,b:8476", "MEGASCALE_NUM_SLICES": "1"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"GCE_METADATA_IP": "127.0.0.1:1"}, 1),  # a TPU, and no metadata server
    ],
    ids=str,
)
def test_a_tpu_lists_its_hosts_in_variables(tpu, variables, count):
    tpu(**variables)
    assert detect_process_count() == count


@pytest.mark.parametrize(("workers", "count"), [("a,b,c,d", 4), ("x:0:10.0.0.1", 1), (None, 1)], ids=str)
def test_a_tpu_vm_queries_the_metadata_server(tpu, workers, count):
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": workers, "tpu-env": ""}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = self.headers["Metadata-Flavor"] == "Google" and workers is not None and name in attributes
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes[name].encode() if known else b"")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tpu(GCE_METADATA_IP=f"127.0.0.1:{server.server_port}")
        try:
            assert detect_process_count() == count
        finally:
            server.shutdown()


def test_an_unreadable_environment_names_the_way_out(machine):
    machine(**SLURM, SLURM_STEP_NUM_TASKS="many")
    with pytest.raises(UserError, match="cannot find out.*many.*--processes=1"):
        detect_process_count()
