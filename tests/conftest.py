"""Set-up of all tests: JAX on eight fake CPU devices, thread pools, and markers that skip."""

import collections
import importlib.metadata
import importlib.util
import os
import signal
import uuid
from pathlib import Path

from launch.garbage import collect_rarely

# A process started in the background of a shell ignores SIGINT and so do its children; tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_rarely()  # as entry points do; it takes less time of the processor

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# All of this has to be in the environment before JAX, NumPy or a tokenizer is imported for the first time.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads per device, as configure_cpu gives a run (parallel/platform.py).
os.environ.setdefault("NPROC", "16")
if WORKERS > 1:
    # BLAS pools over all cores in each worker make the workers wait for each other.
    for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(pool, "1")
# Eight devices on few cores reach a collective at very different times; a slow test is better than an aborted one.
# Tests compile far longer than they compute, so LLVM does not optimise.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        "--xla_backend_optimization_level=0",
    ]
).strip()
# The newer emitters, which go through MLIR, compile for longer: without a cache, tests/train/test_losses.py takes 32 s
# with them and 20 s with the older ones. JAX 0.11 has no older ones, and aborts at this flag. With the older ones the
# devices start two collectives in different orders, and wait for each other for good, in a step on data=2, expert=2,
# tensor=2 with the ring (docs/design.md, "Two cores"): no test has that mesh. With the newer ones it passed, but a
# worker of a whole run died of a segmentation fault while XLA compiled. Without the scheduler for concurrency others
# wait.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false"
if importlib.metadata.version("jax").startswith("0.10."):
    os.environ["XLA_FLAGS"] += OLD_EMITTERS

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.lib import xla_client  # noqa: E402

from tests.optional_files import pytest_sessionfinish  # noqa: E402, F401  # a hook
from tests.storage_emulator import BUCKET, storage_emulator  # noqa: E402

# JAX reads JAX_COMPILATION_CACHE_DIR, which tests/run.sh sets; a plain `pytest` has no cache.
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()  # from here on no config changes their number, so that no test depends on which one ran first

# The first example of a jitted function compiles, so a deadline per example says nothing. In CI the examples
# are the same in every run.
hypothesis.settings.register_profile("composer", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("composer")


PARITY_MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


def pytest_configure() -> None:
    if os.environ.get("COMPOSER_PARITY") == "1" and PARITY_MISSING:
        raise pytest.UsageError(f"COMPOSER_PARITY=1, but there is no {' and no '.join(PARITY_MISSING)} here")


@pytest.fixture(scope="session")
def emulated_storage():
    """Environment variables that lead to an emulator of Google Cloud Storage (tests/storage_emulator.py).

    One for the whole process, because gcsfs and TensorStore keep the address that they read first.
    """
    with storage_emulator() as environment:
        yield environment


@pytest.fixture
def bucket_url(emulated_storage, tmp_path, monkeypatch) -> str:
    """The gs:// URL of an empty folder; mirrors and copies lie in tmp_path/cache."""
    for name, value in emulated_storage.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"gs://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def libtpu():
    """Skips where libtpu is missing, and hides the flag that libtpu's XLA does not know either."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('needs libtpu, the compiler for TPUs: pip install "composer_jax[tpu]"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(OLD_EMITTERS, ""))
        yield


@pytest.fixture
def profiler(monkeypatch) -> list[tuple[str, str | None]]:
    """(what, folder) of the calls of JAX's profiler, which cannot run in a process that has libtpu and no TPU."""
    calls = []
    monkeypatch.setattr(xla_client, "pjrt_plugin_loaded", lambda name: False)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", None)))
    return calls


def _memory_maps() -> int:
    """How many this process has; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


MOST_MAPS = 30_000


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Each compiled program takes about ten memory maps; half of tests/parity leave 11,600. At the kernel's limit for a
    # process (vm.max_map_count: 65,530) LLVM aborts it.
    if nextitem is not None and nextitem.path != item.path and _memory_maps() > MOST_MAPS:
        jax.clear_caches()


SLOW_TEST_WEIGHT = 100  # a slow test takes about as long as so many others


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("parity") and PARITY_MISSING:
            reason = f"needs {' and '.join(PARITY_MISSING)}: COMPOSER_PARITY=1 bash tests/run.sh"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("tpu") and jax.default_backend() != "tpu":
            item.add_marker(pytest.mark.skip(reason="needs a TPU: JAX_PLATFORMS=tpu python -m pytest -m tpu"))
    if WORKERS > 1:
        # Workers take whole files in this order, so the longest must not come last.
        weights = collections.Counter()
        for item in items:
            weights[item.path] += SLOW_TEST_WEIGHT if item.get_closest_marker("slow") else 1
        items.sort(key=lambda item: (-weights[item.path], item.path))
