"""setup.py and the pinned requirements agree with each other."""

import runpy
import sys
import types
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def declared():
    """The arguments of setup(); a stub takes the place of setuptools, which newer Pythons do not include."""
    captured = {}
    stub = types.ModuleType("setuptools")
    stub.find_packages = lambda **kwargs: kwargs
    stub.setup = lambda **kwargs: captured.update(kwargs)
    before = sys.modules.get("setuptools")
    sys.modules["setuptools"] = stub
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        if before is None:
            del sys.modules["setuptools"]
        else:
            sys.modules["setuptools"] = before
    return captured


def pins(file: str) -> dict[str, str]:
    """{canonical name: version} of a requirements file and the ones it includes."""
    versions = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("-r "):
            versions |= pins(line.removeprefix("-r ").strip())
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"{file}: {line} is not pinned"
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{file}: {name} is pinned twice"
            versions[name] = specifier.version
    return versions


@pytest.mark.parametrize(
    ("extras", "file"),
    [
        ([], "requirements.txt"),
        (["test", "serve", "tasks", "prepare", "evals", "notebook"], "requirements-test.txt"),
        (["parity"], "requirements-parity.txt"),
        (["cluster"], "requirements-cluster.txt"),
        ([], "requirements-jax-next.txt"),
    ],
)
def test_pins_are_within_the_ranges(declared, extras, file):
    pinned = pins(file)
    requirements = [Requirement(line) for line in declared["install_requires"]]
    requirements += [Requirement(line) for extra in extras for line in declared["extras_require"][extra]]
    for requirement in requirements:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{file} does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{file} pins {requirement.name}=={version}"


def test_the_extras_users_ask_for(declared):
    assert set(declared["extras_require"]) >= {"test", "parity", "tpu", "gpu", "cluster", "notebook", "serve", "tasks"}
    assert declared["python_requires"] == ">=3.11" and declared["license"] == "Apache-2.0"


def test_the_wheel_is_marked_as_typed(declared):
    assert "py.typed" in declared["package_data"]["composer_jax"]
    assert (ROOT / "composer_jax" / "py.typed").exists()


def test_the_wheel_has_every_file_that_the_package_reads(declared):
    patterns = declared["package_data"]
    files = [path for path in (ROOT / "composer_jax").rglob("*") if path.is_file()]
    data = {path.relative_to(ROOT) for path in files if path.suffix not in (".py", ".pyc")}
    anywhere = {path for path in data if any(path.match(pattern) for pattern in patterns[""])}
    within = {
        path.relative_to(ROOT)
        for package, own in patterns.items()
        for pattern in own
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert data == (anywhere | within) & data and Path("composer_jax/sandbox/inside/site/packages.pth") in data


def test_runtime_requirements_bring_no_test_tools():
    assert (
        not {"pytest", "ruff", "basedpyright", "hypothesis", "torch", "transformers", "ray"}
        & pins("requirements.txt").keys()
    )


def test_installed_versions_are_the_pinned_ones():
    """A pass in this environment then holds for a fresh install, too."""
    for name in ("jax", "flax", "optax", "orbax-checkpoint", "grain"):
        assert distribution(name).version == pins("requirements.txt")[name]
