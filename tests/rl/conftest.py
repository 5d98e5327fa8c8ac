from tests.agent.conftest import pool  # noqa: F401  # a fixture
from tests.coroutine_tests import pytest_pyfunc_call  # noqa: F401  # a hook
