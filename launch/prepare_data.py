"""Prepares pretraining data: source trees, git repositories and rows of text become shards of token ids.

    python -m launch.prepare_data --source=repositories,rows.jsonl --tokenizer=DIR --out=data/mine

A config trains on them by pretrain.sources = {"mine": {"kind": "prepared", "options": {"path": "data/mine"}}}.

A source is a folder with source code, a git repository or a folder of several, or a .jsonl or .parquet file. Vendored,
built, generated, binary, minified and secret-looking files are left out, and so are exact and near duplicates;
OUT/statistics.md has the number of each. Finding near duplicates and reading Parquet need
`pip install "composer_jax[prepare]"`.

The same command continues a preparation that was stopped. The result depends on the sources, the tokenizer and the
flags only, not on --workers. docs/prepare_data.md says more.
"""

import os

from absl import flags as absl_flags

from launch import flags, hosts


def define(values):
    from composer_jax.data.prepare.config import PrepareConfig
    from launch.dataclass_flags import define_fields

    absl_flags.DEFINE_list("source", None, "Folders and files, separated by commas.", flag_values=values)
    absl_flags.DEFINE_string(
        "tokenizer", None, "A folder with tokenizer.json: the model to be trained, or a run.", flag_values=values
    )
    absl_flags.DEFINE_string("out", None, "A new folder, or that of a preparation to continue.", flag_values=values)
    absl_flags.DEFINE_integer(
        "workers", os.cpu_count() or 1, "Processes, of one core each.", lower_bound=1, flag_values=values
    )
    define_fields(values, PrepareConfig)
    return ("source", "tokenizer", "out")


def main(values):
    from composer_jax.data.prepare.config import PrepareConfig
    from composer_jax.data.prepare.prepare import prepare
    from launch.dataclass_flags import read_fields

    config = read_fields(values, PrepareConfig)
    index = prepare(values.source, values.tokenizer, values.out, config, values.workers)
    for split in ("train", "heldout"):
        print(f"{split}: {index[split]['tokens']:,} tokens in {index[split]['documents']:,} documents")
    print(f"wrote {values.out}; what was left out is in {values.out}/statistics.md")


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
