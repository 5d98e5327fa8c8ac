"""Short scripts, one extension or task each; run one with `python -m examples.NAME`. Tests run all of them."""
