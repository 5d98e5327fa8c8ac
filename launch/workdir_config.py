"""The config of a run that has begun: what --config stands for when only --workdir is given."""

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.schema.config_dict import to_config_dict
from composer_jax.schema.run_config import run_config
from composer_jax.storage.workdir import read_run_config


def get_config(workdir: str) -> ConfigDict:
    """Returns the config that WORKDIR/config.json holds, for --config.FIELD=VALUE to compare with.

    Raises:
      UserError: a file that is not a config, or one of an older schema, with the names that changed.
    """
    stored = read_run_config(workdir)
    if stored is None:
        raise UserError(f"{workdir} has no config.json of a run.")
    return to_config_dict(run_config(stored["config"]))
