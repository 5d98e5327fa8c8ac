"""The config of a run that has begun: what --config stands for when only --workdir is given."""

import json
from pathlib import Path

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.stages.config import run_config
from composer_jax.stages.schema import to_config_dict


def get_config(workdir: str) -> ConfigDict:
    """Returns the config that DIR/config.json holds, for --config.FIELD=VALUE to compare with.

    Raises:
      UserError: a file that is no config, or one of an older schema, with the names that changed.
    """
    file = Path(workdir) / "config.json"
    try:
        stored = json.loads(file.read_bytes())["config"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} is no config of a run: {error}.") from error
    return to_config_dict(run_config(stored))
