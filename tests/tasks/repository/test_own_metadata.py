"""Name, version and entry points of a repository's own package, from whatever file says them."""

import importlib.metadata
import subprocess

import pytest

from composer_jax.tasks.repository.own_metadata import read_metadata, write_metadata
from tests.tasks.conftest import lay

PKG_INFO = "Metadata-Version: 2.1\nName: Some.Shop\nVersion: 3.1rc1\nRequires-Dist: rich\n\nLong text.\nName: no\n"
REPOSITORIES = {
    "sdist": ({"PKG-INFO": PKG_INFO, "pyproject.toml": "[project]\nname = 'x'"}, "Some.Shop", "3.1rc1"),
    "egg-info": ({"src/shop.egg-info/PKG-INFO": PKG_INFO}, "Some.Shop", "3.1rc1"),
    "pyproject.toml": ({"pyproject.toml": "[project]\nname = 'shop'\nversion = '1.2'\n"}, "shop", "1.2"),
    "poetry": ({"pyproject.toml": "[tool.poetry]\nname = 'shop'\nversion = '0.3.0'\n"}, "shop", "0.3.0"),
    "dynamic": (
        {
            "pyproject.toml": "[project]\nname = 'shop'\ndynamic = ['version']\n",
            "src/shop/__init__.py": "from ._version import __version__\n",
            "src/shop/_version.py": "__version__: str = '4.5.6'\n",
        },
        "shop",
        "4.5.6",
    ),
    "attr": (
        {"setup.cfg": "[metadata]\nname = shop\nversion = attr: shop.VERSION\n", "shop.py": "VERSION = '7.0'\n"},
        "shop",
        "7.0",
    ),
    "setup.py": ({"setup.py": "import setuptools\nsetuptools.setup(name='shop', version='8')\n"}, "shop", "8"),
    "setup.py with a variable": (
        {"setup.py": "import setuptools\nRELEASE: str = '2.0'\nsetuptools.setup(name='shop', version=RELEASE)\n"},
        "shop",
        "2.0",
    ),
    "file in setup.cfg": (
        {"setup.cfg": "[metadata]\nname = shop\nversion = file: none.txt, VERSION\n", "VERSION": "3.2\n"},
        "shop",
        "3.2",
    ),
    "file in pyproject.toml": (
        {
            "pyproject.toml": "[project]\nname = 'shop'\n[tool.setuptools]\ndynamic.version = {file = ['a/VERSION']}\n",
            "a/VERSION": "3.3\n",
        },
        "shop",
        "3.3",
    ),
    "a file elsewhere": ({"setup.cfg": "[metadata]\nname = shop\nversion = file: ../VERSION\n"}, "shop", "0"),
    "capitals": ({"setup.cfg": "[metadata]\nName = shop\nVersion = 1.0\n"}, "shop", "1.0"),
    "a byte order mark": ({"setup.cfg": "\ufeff[metadata]\nname = shop\nversion = 1.0\n"}, "shop", "1.0"),
    "a path as version": ({"setup.cfg": "[metadata]\nname = shop\nversion = 1.0/../y\n"}, "shop", "0"),
    "a sentence as version": ({"setup.py": "setup(name='shop', version='1 (see notes/x)')"}, "shop", "0"),
    "a long version": ({"PKG-INFO": f"Name: shop\nVersion: 1.{'0' * 300}\n"}, "shop", "0"),
    "a path as version in code": (
        {"setup.py": "setup(name='shop')", "shop.py": "__version__ = '1/2'\nVERSION = '7.1'\n"},
        "shop",
        "7.1",
    ),
    "a name of half a character": ({"setup.py": "setup(name='\\udc80', version='1')"}, None, None),
    "a long name": ({"pyproject.toml": f"[project]\nname = '{'x' * 300}'\nversion = '1'\n"}, None, None),
    "texts for tables": (
        {"pyproject.toml": "project = 'x'\n[tool]\npoetry = 'x'\nflit = 1\nsetuptools = []\n"},
        None,
        None,
    ),
    "a list for a table": (
        {"pyproject.toml": "[project]\nname = 'shop'\nversion = '1'\nentry-points = ''\n[tool]\npoetry.plugins = []\n"},
        "shop",
        "1",
    ),
    "nested too deeply": (
        {
            "pyproject.toml": "a = " + "[" * 100_000,
            "setup.py": "-" * 100_000 + "1",
            "setup.cfg": "[metadata]\nname = shop\n",
        },
        "shop",
        "0",
    ),
    "nothing but a name": ({"setup.py": "from setuptools import setup\nsetup(name='shop', version=v())"}, "shop", "0"),
    "files that cannot be read": (
        {"pyproject.toml": "[broken", "setup.cfg": b"\xff", "setup.py": "setup(", "PKG-INFO": b"\xff"},
        None,
        None,
    ),
}


@pytest.mark.parametrize("kind", REPOSITORIES)
def test_name_and_version_are_read(tmp_path, kind):
    files, name, version = REPOSITORIES[kind]
    lay(tmp_path, {"VERSION": "6.6\n"})
    metadata = read_metadata(lay(tmp_path / "repository", files))
    assert (metadata.name, metadata.version) == (name, version) if name else metadata is None
    write_metadata(tmp_path / "repository", tmp_path)
    assert len(list(tmp_path.glob("*.dist-info/METADATA"))) == (metadata is not None)


@pytest.mark.parametrize(
    ("tag", "version"), [("v1.4.2", "1.4.2"), ("2024/01/05", "05"), ("pkg-a1/v1.2", "1.2"), ("2024/spring", "0")]
)
def test_a_tag_is_the_version_where_no_file_says_it(tmp_path, tag, version):
    lay(tmp_path, {"pyproject.toml": "[project]\nname = 'shop'\ndynamic = ['version']\n"})
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm x", f"tag {tag}"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    assert read_metadata(tmp_path).version == version


def test_the_standard_library_finds_what_is_written_except_plugins_of_pytest(tmp_path):
    project = (
        "[project]\nname = 'My-Shop'\nversion = '1.2'\n[project.scripts]\nshop = 'shop:main'\n"
        "[project.entry-points.'shop.Kinds']\nBook = 'shop.book:Book'\n"
        "[project.entry-points.pytest11]\nshop = 'shop.plugin'\n"
    )
    write_metadata(lay(tmp_path / "repository", {"pyproject.toml": project}), lay(tmp_path / "root", {"a": ""}))
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "root")])
    assert (found.metadata["Name"], found.version) == ("My-Shop", "1.2")
    assert {(entry.group, entry.name, entry.value) for entry in found.entry_points} == {
        ("console_scripts", "shop", "shop:main"),
        ("shop.Kinds", "Book", "shop.book:Book"),
    }


def test_a_source_distribution_s_own_entry_points_and_requirements_are_kept(tmp_path):
    files = {"PKG-INFO": PKG_INFO, "some_shop.egg-info/entry_points.txt": "[console_scripts]\nshop = shop:main\n"}
    write_metadata(lay(tmp_path / "repository", files), lay(tmp_path / "root", {"a": ""}))
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "root")])
    assert found.requires == ["rich"] and found.metadata.get_payload() == ""
    assert [entry.name for entry in found.entry_points] == ["shop"]
