"""Bytes and host seconds of RL at the size of Kimi K2.5, once and now: `python -m benchmarks.host_costs`.

Prints the Markdown table of docs/scale.md for configs/kimi_k2_5.py:32k: a learner of 1,024 chips v5p (256 hosts) and 8
engines of 128 chips (32 hosts). "Before" is commit 9f466d7, by its formulas and the rates that were measured of it;
"now" is scale/message_costs.py and scale/step_bytes.py, whose bytes tests count.

    --chips=N --engines=N --sampled=N --observed=N: other sizes
"""

import argparse
import dataclasses
import math

from composer_jax.scale.message_costs import (
    decode_call_bytes,
    message_route_bytes,
    message_seconds,
    reply_bytes,
    request_bytes,
)
from composer_jax.scale.simulation.table import format_bytes
from composer_jax.scale.step_bytes import batch_seconds, part_bytes, sent_bytes, token_bytes
from configs import kimi_k2_5

CHIPS_PER_HOST = 4
LENGTH = "32k"
OLD_TOKEN_BYTES, OLD_ENCODE_S, OLD_DECODE_S = 754, 590 / 16_777_216, 295 / 16_777_216
"""Of a token with 60 x 8 routes in a step's compressed JSON: its bytes, and the seconds of process 0 and of every host,
measured of commit 9f466d7 on this project's cores."""
OLD_ROUTE_WIDTH = 512
"""Choices of a token in the cache, padded."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the costs depend on."""

    chips: int = 1024
    """Of the learner, and of all engines together."""
    engines: int = 8
    sampled: int = 300
    """New tokens of a message that the model samples."""
    observed: int = 600
    """New tokens that it reads."""

    @property
    def hosts(self) -> int:
        return self.chips // CHIPS_PER_HOST


def message_rows(sizes: Sizes) -> list[tuple[str, str, str]]:
    """Returns (what, before, now) of one message."""
    run = kimi_k2_5.run(LENGTH)
    model, capacity = run.model, run.sampler.max_model_len
    assert run.sampler.mesh is not None, "engines have a mesh of their own"
    shards = sizes.chips // run.sampler.mesh.tensor
    new = sizes.sampled + sizes.observed
    routes = message_route_bytes(model, new)
    asked, answered = request_bytes(sizes.observed), reply_bytes(sizes.sampled, routes.frame)
    context, seconds = capacity // 2, message_seconds(asked + answered)
    return [
        (
            "routes of a message, devices to process 0",
            format_bytes(shards * capacity * OLD_ROUTE_WIDTH * 2),
            format_bytes(routes.device_to_host),
        ),
        (
            f"a message, to the engine and back, in a context of {context:,} tokens",
            format_bytes(4 * context + message_route_bytes(model, context).frame),
            f"{format_bytes(asked)} and {format_bytes(answered)}",
        ),
        ("a message, seconds of the learner's process 0", "", f"{1000 * seconds:.2f} ms"),
        ("messages that it carries in a second", "", f"{1 / seconds:.0f}"),
    ]


def call_row(sizes: Sizes) -> tuple[str, str, str]:
    """Returns (what, before, now) of one device call."""
    sampler = kimi_k2_5.run(LENGTH).sampler
    table = 4 * sampler.slots * math.ceil(sampler.max_model_len / sampler.page_size)
    slots, hosts = sampler.slots // sizes.engines, sizes.hosts // sizes.engines
    # A row gains a page in every page_size / decode_steps calls; the smallest write has an entry for each row.
    call = decode_call_bytes(slots, slots)
    return (
        f"a decode call of {sampler.decode_steps} tokens, to the other hosts",
        f"{sizes.hosts - 1} x {format_bytes(table)} = {format_bytes((sizes.hosts - 1) * table)}",
        f"{hosts - 1} x {format_bytes(call)} = {format_bytes((hosts - 1) * call)} of each engine",
    )


def step_rows(sizes: Sizes) -> list[tuple[str, str, str]]:
    """Returns (what, before, now) of the batches of a step."""
    run = kimi_k2_5.run(LENGTH)
    tokens = sum(length * rows for length, rows in run.rl.batches)
    token = token_bytes(run.rl.route_shape(run.model), run.model.n_experts)
    part, sent = part_bytes(tokens, token, sizes.hosts), sent_bytes(tokens, token, sizes.hosts)
    old = OLD_TOKEN_BYTES * tokens
    return [
        (f"a step of {tokens:,} tokens, to each host of the learner", format_bytes(old), format_bytes(part)),
        ("the same, sent by process 0", format_bytes((sizes.hosts - 1) * old), format_bytes(sent)),
        ("the same, held by each host", format_bytes(tokens * token), format_bytes(part)),
        (
            "the same, seconds until every host has it, on a network that is as fast",
            f"{tokens * OLD_ENCODE_S:.0f} s to encode, {tokens * OLD_DECODE_S:.0f} s to decode",
            f"{batch_seconds(tokens, token, sizes.hosts):.1f} s",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    sizes = Sizes(**vars(parser.parse_args()))
    rows = [*message_rows(sizes), call_row(sizes), *step_rows(sizes)]
    for row in [("", "before", "now"), ("---",) * 3, *rows]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
