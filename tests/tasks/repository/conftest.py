"""Fixtures of the candidates' tests: a small package with the coverage of its tests, and a way to run it."""

import subprocess
import sys
from pathlib import Path

import pytest

SHOP = {
    "shop/__init__.py": (
        "from .cart import Cart, total\nfrom .coupons import apply_coupon, parse_coupon\n"
        "from .report import report\n\n"
        "__all__ = [\n    'Cart',\n    'apply_coupon',  # since 1.2\n    'parse_coupon',\n"
        "    'report',\n    'total',\n]\n"
    ),
    "shop/cart.py": (
        "from .money import round_cents\n\n\n"
        "class Cart:\n"
        "    def __init__(self):\n        self.items = []\n\n"
        "    def add(self, price, count=1):\n        self.items.append((price, count))\n\n"
        "    def cheapest(self):\n        return min(self._prices())\n\n"
        "    def _prices(self):\n        return [price for price, _ in self.items]\n\n\n"
        "def total(cart):\n    return round_cents(sum(price * count for price, count in cart.items))\n"
    ),
    "shop/money.py": (
        '__all__ = ("round_cents", "euros")\n\n\n'
        "def round_cents(value):\n    return round(value, 2)\n\n\n"
        "def euros(value):\n    return f'{value:.2f} EUR'\n"
    ),
    "shop/coupons.py": (
        "import re\nfrom decimal import Decimal, ROUND_UP\n\nfrom .money import round_cents\n\n"
        "_FORM = re.compile(r'(\\d+)%')\n_LIMIT = Decimal(90)\n\n\n"
        "def parse_coupon(text):\n    match = _FORM.fullmatch(text)\n    return _checked(Decimal(match[1]))\n\n\n"
        "def _checked(percent):\n    return min(percent, _LIMIT).quantize(Decimal(1), ROUND_UP)\n\n\n"
        "def apply_coupon(value, percent):\n    return round_cents(value * (100 - float(percent)) / 100)\n"
    ),
    "shop/report.py": (
        "from shop.money import euros\n\n\ndef report(value):\n    lines = []\n    lines.append(euros(value))\n"
        "    return '\\n'.join(lines)\n"
    ),
    "tests/test_shop.py": "import shop\n\n\ndef test_total():\n    assert shop.total(shop.Cart()) == 0\n",
}
COVERAGE = {
    "tests/test_shop.py::test_total": frozenset(
        {"shop/cart.py::total", "shop/money.py::round_cents", "shop/cart.py::Cart.__init__"}
    ),
    "tests/test_shop.py::test_add": frozenset({"shop/cart.py::Cart.add", "shop/cart.py::Cart.__init__"}),
    "tests/test_shop.py::test_min": frozenset(
        {
            "shop/cart.py::Cart.cheapest",
            "shop/cart.py::Cart._prices",
            "shop/cart.py::Cart.add",
            "shop/cart.py::Cart.__init__",
        }
    ),
    "tests/test_shop.py::test_parse": frozenset({"shop/coupons.py::parse_coupon", "shop/coupons.py::_checked"}),
    "tests/test_shop.py::test_apply": frozenset({"shop/coupons.py::apply_coupon", "shop/money.py::round_cents"}),
    "tests/test_shop.py::test_report": frozenset({"shop/report.py::report", "shop/money.py::euros"}),
}


@pytest.fixture
def shop():
    return dict(SHOP)


@pytest.fixture
def coverage():
    return dict(COVERAGE)


@pytest.fixture
def run_with(tmp_path):
    """Writes files with a candidate's changes, runs Python code beside them and returns its output."""

    def run(sources, candidate, code):
        for path, text in {**sources, **(candidate.files if candidate else {})}.items():
            if text is not None:
                place = tmp_path / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, newline="")
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture(scope="session")
def library():
    """Modules of the standard library as a repository: path -> text with the line ends of the files."""
    import asyncio.locks
    import asyncio.queues
    import contextlib
    import heapq
    import json.decoder
    import textwrap

    modules = (asyncio.locks, asyncio.queues, contextlib, heapq, json.decoder, textwrap)
    return {f"{m.__name__.replace('.', '/')}.py": Path(m.__file__).read_bytes().decode() for m in modules}
