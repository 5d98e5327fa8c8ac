"""libtpu is asked for its compiler only, by several workers at once."""

import os

from composer_jax.scale.topology import without_hardware

if os.environ["JAX_PLATFORMS"] == "cpu":
    without_hardware()
