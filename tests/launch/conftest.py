"""libtpu is asked for its compiler only, by several workers at once."""

import os

from composer_jax.scale.topology import disable_tpu_hardware

if os.environ["JAX_PLATFORMS"] == "cpu":
    disable_tpu_hardware()
