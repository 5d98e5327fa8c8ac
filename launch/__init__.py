"""Entry points: `python -m launch.NAME --config=configs/FILE.py --workdir=DIR`; flags -> config -> a call."""
