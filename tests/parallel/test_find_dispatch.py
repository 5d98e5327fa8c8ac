"""What the config names: a dispatch of ours or of a user's, and whether it may drop pairs."""

import pytest

from composer_jax.errors import UserError
from composer_jax.parallel.dispatch import DISPATCH, Dispatch, dispatch_without_drops, find_dispatch
from composer_jax.parallel.dispatch.ring import ring
from tests.parallel.test_dispatch import CROWD, on_mesh


def test_a_dispatch_is_found_by_name_or_by_import_path():
    assert find_dispatch("ragged_all_to_all") is DISPATCH["ragged_all_to_all"]
    bare = find_dispatch("composer_jax.parallel.dispatch.ring:ring")
    assert bare == Dispatch(ring, may_drop=True)
    with pytest.raises(UserError, match="config.model.dispatch='rign' is unknown; use one of dense, ring, ragged_all"):
        find_dispatch("rign")


@pytest.mark.parametrize("name", DISPATCH)
def test_a_dispatch_says_whether_it_may_drop(name):
    _, dropped = on_mesh(name, "biases_clamped", (2, 4, 1), **CROWD, capacity_factor=0.7)
    assert (dropped > 0) == DISPATCH[name].may_drop
    assert dispatch_without_drops(name) == ("ring" if dropped else name)
