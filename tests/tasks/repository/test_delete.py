"""Deleted features and files: the remaining code imports, exports no removed name, and works."""

import ast

import pytest

from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.delete_feature import FeatureFinder
from composer_jax.tasks.repository.imports import Repository
from composer_jax.tasks.repository.remove_symbols import delete_file


def features(sources, coverage):
    return list(FeatureFinder(Repository(sources, []), coverage).candidates(seeded_random(0)))


def feature(sources, coverage, entity):
    """The smallest candidate that deletes an entity."""
    deletion = [candidate for candidate in features(sources, coverage) if entity in candidate.entities]
    return min(deletion, key=lambda candidate: len(candidate.entities))


def test_a_feature_goes_with_its_helpers_constants_imports_and_exports(shop, coverage, run_with):
    deletion = feature(shop, coverage, "shop/coupons.py::parse_coupon")
    assert set(deletion.entities) == {"shop/coupons.py::parse_coupon", "shop/coupons.py::_checked"}
    assert set(deletion.files) == {"shop/__init__.py", "shop/coupons.py"}
    left = deletion.files["shop/coupons.py"]
    assert (
        left
        == "from .money import round_cents\n\n\n"
        + shop["shop/coupons.py"][shop["shop/coupons.py"].index("def apply") :]
    )
    init = deletion.files["shop/__init__.py"]
    assert "from .coupons import apply_coupon\n" in init
    assert "    'apply_coupon',  # since 1.2\n    'report',\n" in init
    assert "parse_coupon" not in init
    code = "from shop import *; import shop; print(apply_coupon(10, 50), hasattr(shop, 'parse_coupon'))"
    assert run_with(shop, deletion, code) == "5.0 False"
    old = "".join(shop[path] for path in sorted(deletion.files))
    assert all(block in old for block in deletion.removed)
    assert any("def _checked(percent):\n    return min(percent" in block for block in deletion.removed)


def test_a_method_goes_with_its_private_helper_and_its_class_stays(shop, coverage, run_with):
    deletion = feature(shop, coverage, "shop/cart.py::Cart.cheapest")
    assert set(deletion.entities) == {"shop/cart.py::Cart.cheapest", "shop/cart.py::Cart._prices"}
    code = "import shop; c = shop.Cart(); c.add(2, 3); print(shop.total(c), hasattr(c, 'cheapest'))"
    assert run_with(shop, deletion, code) == "6 False"


def test_a_helper_that_something_else_uses_stays(shop, coverage):
    shop["shop/report.py"] += "\n\ndef check(x):\n    from shop.coupons import _checked\n    return _checked(x)\n"
    coverage["tests/test_shop.py::test_check"] = frozenset({"shop/coupons.py::_checked", "shop/report.py::check"})
    deletion = [c for c in features(shop, coverage) if "shop/coupons.py::parse_coupon" in c.entities]
    assert deletion and all(
        "shop/coupons.py::_checked" not in c.entities or "shop/report.py::check" in c.entities for c in deletion
    )


def test_definitions_that_the_import_needs_stay(shop, coverage):
    shop["shop/report.py"] += "\n\nDEFAULT = report(0)\n"
    touched = {entity for candidate in features(shop, coverage) for entity in candidate.entities}
    assert "shop/coupons.py::apply_coupon" in touched
    assert not touched & {"shop/report.py::report", "shop/money.py::euros"}


def test_a_name_that_a_decorator_a_base_or_a_default_needs_stays(shop, coverage):
    shop["shop/report.py"] += "\n\nclass Big(Base): pass\n\n\ndef f(x=plain): pass\n"
    shop["shop/more.py"] = "import shop.cart as c\n\n\nclass More(c.Cart): pass\n"
    shop["shop/report.py"] = "class Base: pass\n\n\ndef plain(): pass\n\n\n" + shop["shop/report.py"]
    coverage["t"] = frozenset({"shop/report.py::Base", "shop/report.py::plain", "shop/report.py::report"})
    touched = {entity for candidate in features(shop, coverage) for entity in candidate.entities}
    assert "shop/report.py::report" in touched
    assert not touched & {"shop/report.py::Base", "shop/report.py::plain", "shop/cart.py::Cart"}


def test_a_method_that_the_import_needs_to_instantiate_stays():
    text = "import abc\n\n\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n\n\n"
    text += "class B(A):\n    def f(self): return 1\n    def g(self): return 2\n\n\nb = B()\n"
    coverage = {"t": {"a.py::B.f"}, "u": {"a.py::B.g"}, "v": set(), "w": set()}
    assert [candidate.entities for candidate in features({"a.py": text}, coverage)] == [("a.py::B.g",)]


def test_code_that_all_tests_share_is_not_a_feature(shop, coverage):
    common = {test: ids | {"shop/cart.py::total"} for test, ids in coverage.items()}
    assert not any("shop/cart.py::total" in candidate.entities for candidate in features(shop, common))


def test_every_feature_of_the_shop_leaves_a_package_that_imports(shop, coverage, run_with):
    deletion = features(shop, coverage)
    assert len(deletion) >= 4
    for candidate in deletion:
        run_with(shop, candidate, "from shop import *")
        assert not any(path.startswith("tests/") for path in candidate.files)
        for path, text in candidate.files.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.alias):
                    assert not any(name.endswith(f"::{node.name}") for name in candidate.entities), (path, node.name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("__all__ = ['f', 'g']", "__all__ = ['g']"),
        ("__all__ = ['g', 'f']", "__all__ = ['g']"),
        ("__all__ = ['g', 'f',]", "__all__ = ['g',]"),
        ("__all__ = ['f']", "__all__ = []"),
        ("__all__ = 'f', 'g'", "__all__ = ('g',)"),
        ("__all__ = ('f', 'g', 'h')", "__all__ = ('g', 'h')"),
        ("__all__ = ['g']\n__all__ += ['f']", "__all__ = ['g']\n__all__ += []"),
        ("__all__ = ['g']\n__all__.append('f')", "__all__ = ['g']"),
        ("__all__ = ['g'] + ['f', 'h']", "__all__ = ['g'] + ['h']"),
    ],
)
def test_every_way_to_export_a_name_is_understood(before, after):
    text = "\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n"
    sources = {"a.py": before + text, "b.py": "from a import f as x, g\nfrom a import f\n\n__all__ = ['x']\n"}
    coverage = {"t": {"a.py::f"}, "u": {"a.py::g"}, "v": set()}
    deletion = feature(sources, coverage, "a.py::f")
    assert deletion.files["a.py"].split("\n\n\n")[0].rstrip() == after
    assert deletion.files["b.py"] == "from a import g\n\n__all__ = []\n"


def test_a_removed_name_is_followed_through_star_imports():
    sources = {
        "p/__init__.py": "from .a import *\n\n__all__ = ['f', 'g']\n",
        "p/a.py": "def f():\n    return 1\n\n\ndef g():\n    return 2\n",
        "p/b.py": "from p import f, g\n",
    }
    deletion = feature(sources, {"t": {"p/a.py::f"}, "u": {"p/a.py::g"}}, "p/a.py::f")
    assert deletion.files["p/__init__.py"] == "from .a import *\n\n__all__ = ['g']\n"
    assert deletion.files["p/b.py"] == "from p import g\n"


def deleted(sources, path):
    repository = Repository(sources, [])
    return delete_file(repository, repository.modules[path])


def test_a_file_that_is_only_re_exported_goes_with_its_exports(shop, run_with):
    deletion = deleted(shop, "shop/coupons.py")
    assert deletion.files["shop/coupons.py"] is None
    assert set(deletion.files) == {"shop/coupons.py", "shop/__init__.py"}
    assert deletion.removed[-1] == shop["shop/coupons.py"]
    assert "shop/coupons.py::_checked" in deletion.entities
    code = "from shop import *; import shop; print(report(1), sorted(shop.__all__))"
    assert run_with({k: v for k, v in shop.items() if k != "shop/coupons.py"}, deletion, code) == (
        "1.00 EUR ['Cart', 'report', 'total']"
    )


@pytest.mark.parametrize(
    "use",
    [
        "from shop import apply_coupon\n\n\ndef half(x):\n    return apply_coupon(x, 50)\n",
        "import shop.coupons\n",
        "from shop import coupons as c\n\nX = c\n",
        "def half(x):\n    from .coupons import apply_coupon\n    return apply_coupon(x, 50)\n",
        "import importlib\n\nC = importlib.import_module('shop.coupons')\n",
        "import shop\n\nHALF = shop.coupons.apply_coupon\n",
        "from .coupons import *\n\n\ndef half(x):\n    return apply_coupon(x, 50)\n",
    ],
)
def test_a_file_that_another_one_uses_stays(shop, use):
    shop["shop/half.py"] = use
    assert deleted(shop, "shop/coupons.py") is None


@pytest.mark.parametrize("path", ["shop/__init__.py", "tests/test_shop.py", "shop/money.py"])
def test_packages_tests_and_needed_files_are_not_deleted(shop, path):
    assert deleted(shop, path) is None
