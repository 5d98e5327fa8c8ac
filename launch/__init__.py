"""Entry points: `python -m launch.NAME --config=tiny:smoke --workdir=DIR`; flags -> config -> one library call."""
