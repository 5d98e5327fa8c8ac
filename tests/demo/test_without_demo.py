"""A user can delete composer_jax/demo and the configs that name it: everything else still works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
import composer_jax
from composer_jax.schema.run_config import run_config
from configs import kimi_k2_5, moonlight

assert composer_jax.__file__.startswith(sys.argv[1]), composer_jax.__file__
plain_files = {  # scripts that import files beside them, on machines without this package
    "composer_jax.sandbox.landlock_launcher",
    "composer_jax.tasks.harbor.verify_cases",
    "composer_jax.tasks.harbor.verify_suite",
}
optional_packages = {  # each needs the package of an extra
    "composer_jax.observe.tensorboard",
    "composer_jax.observe.weights_and_biases",
}
names = {module.name for module in pkgutil.walk_packages(composer_jax.__path__, "composer_jax.")}
assert not [name for name in names if name.startswith("composer_jax.demo")]
for name in sorted(names - plain_files - optional_packages):
    importlib.import_module(name)
for config in (kimi_k2_5, moonlight):
    run_config(config.get_config())
print(len(names), "modules")
"""


def test_the_library_and_the_large_configs_work_without_the_demo(tmp_path):
    without = shutil.ignore_patterns("__pycache__", "demo", "tiny.py", "memory_chain.py")
    for folder in ("composer_jax", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=without)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 200
