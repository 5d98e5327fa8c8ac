"""The text of --help: what the entry point does, its flags, and the fields of the config where one is named."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator, Sequence

from absl import flags as absl_flags
from ml_collections import ConfigDict

from launch.config_file import define_config, fields, load_config

WIDTH = 120


def help_text(
    program: str, argv: Sequence[str], values: absl_flags.FlagValues, required: Sequence[str], arguments: str
) -> str:
    """Returns what --help prints.

    program: as in `python -m program`.
    values: the flags of the entry point; --config is added if `required` names it.
    required: the flags that must be present.
    arguments: what the words that are no flags are called; "" if there are none.
    """
    if "config" in required:
        define_config(values, argv[:1])
    placeholders = {"config": "CONFIG", "workdir": "DIR"}
    needed = [f"--{name}={placeholders.get(name, name.upper())}" for name in required]
    overrides = ["[--config.FIELD=VALUE ...]"] if "config" in required else ["[flags]"]
    usage = ["usage: python -m", program, *needed, *overrides, arguments]
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", " ".join(usage).rstrip()]
    for name in (*required, *(name for name in values if name not in required)):
        default = "" if values[name].default is None else f" (default: {values[name].default})"
        lines.append(f"  --{name}: {values[name].help}{default}")
    if "config" in required:
        config = load_config([arg for arg in argv if arg not in ("-h", "--help", "-help")])
        if config is None:
            lines.append("  --help --config=CONFIG lists the fields of that config with their meaning and default.")
        else:
            lines += ["", "fields of this config: value (default where it differs), meaning", *_field_lines(config)]
    return "\n".join(lines).strip()


def _field_lines(config: ConfigDict) -> Iterator[str]:
    """Yields the value of each field, its default where that differs, and its meaning."""
    # Imports the schema, and with it JAX, only for this.
    from composer_jax.schema.field_docs import field_default, field_meaning
    from composer_jax.schema.run_config import RunConfig

    for path, value in fields(config):
        default = field_default(RunConfig, path)
        differs = default is not dataclasses.MISSING and default != value
        yield f"  --config.{path}={value}" + (f" (default: {default})" if differs else "")
        if meaning := field_meaning(RunConfig, path):
            yield from textwrap.wrap(meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")
