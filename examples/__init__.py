"""Short scripts and configs, one extension or task each: `python -m examples.NAME` runs a script. Tests run all."""
