"""Scores tokens or a text under any weights: log-probabilities per token, and bits per byte of a text.

    python -m launch.score --checkpoint=hf:DIR --tokens=tokens.npy --out=scores.npz [--logits]
    python -m launch.score --checkpoint=runs/demo/checkpoints/sft --text=module.py --out=scores.npz
    python -m launch.score --checkpoint=hf:DIR --text=FOLDER --window=8192 --stride=1024 --out=scores.npz

--tokens is an integer array [B,S]; every row is a document, and negative ids at its end are padding. The output holds
`logprobs` [B,S-1] of tokens[:, 1:] and, with --logits, `logits` [B,S,W], all float32. A text is encoded with the
checkpoint's tokenizer.json, without special tokens, and divided into windows that begin --stride tokens apart. Every
token but the first is counted once: all of the first window, and of each later one the last --stride, which have at
least window - stride tokens before them. `logprobs` are 0 where a window before has counted the token.

A --text that is a folder is one document, as launch.prepare_data writes it: its source files in the order of their
paths, each under a comment with its path, and an end token. The output then holds `tokens` [N] and `logprobs` [N-1] of
tokens[1:], and by file `paths`, `file_bytes`, `file_tokens` and `file_nll`; a picture beside it (.png) has the loss by
tokens of context.

The last line printed is JSON: number of scored tokens, nll (mean, nats per token), and for a text bits_per_byte and
nll_by_context, which takes in all predictions of all windows. Of a folder it also names the files that were left out.
"""

from absl import flags as absl_flags

from launch import flags


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    integer = lambda name, default, meaning, least=1: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, lower_bound=least, flag_values=values
    )
    string("checkpoint", "Weights: a folder of our checkpoints, hf:DIR in Hugging Face's format, or gguf:FILE.")
    string("tokens", "A .npy file of token ids [B,S].")
    string("text", "A UTF-8 file or a folder of source files, instead of --tokens.")
    absl_flags.DEFINE_list(
        "extensions",
        [],
        "Endings of the source files of a folder, separated by commas; none reads all languages of prepare_data.",
        flag_values=values,
    )
    string("out", "The .npz file to write.")
    absl_flags.DEFINE_bool("logits", False, "Also write the logits.", flag_values=values)
    absl_flags.DEFINE_string("dtype", "float32", "Dtype of weights and computation.", flag_values=values)
    integer("rows", 1, "Rows per device and call.")
    integer("window", 2048, "Tokens per window of a text, at most the model's max_context.", 2)
    integer("stride", None, "Tokens between the beginnings of two windows; the default is one less than a window has.")
    integer("data", 1, "Devices that share the dense weights (mesh axis data).")
    integer("expert", 1, "Devices that share the experts (mesh axis expert).")
    integer("context", 1, "Devices that share a row (mesh axis context).")
    integer("tensor", 1, "Devices that share heads, hidden columns and vocabulary (mesh axis tensor).")
    return ("checkpoint", "out")


def main(values):
    from composer_jax.evals.score_files import score_files

    score_files(
        values.checkpoint,
        values.out,
        tokens=values.tokens,
        text=values.text,
        logits=values.logits,
        dtype=values.dtype,
        rows=values.rows,
        window=values.window,
        stride=values.stride,
        extensions=values.extensions,
        axes={axis: values[axis].value for axis in ("data", "expert", "context", "tensor")},
    )


if __name__ == "__main__":
    flags.run(main, define=define)
