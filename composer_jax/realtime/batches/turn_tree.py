"""A session's tree of turns as the Transcript of one episode, whose rows RL's learner trains.

Each turn is a node: the ids of its prompt after its parent's end, then the sampled ids. Roots (a compaction, an edited
history) share the node of the ids with which all of them begin. Nothing is tokenised again.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from composer_jax.agent.transcript import Node, Transcript
from composer_jax.serve.token_details import read_routed_experts
from composer_jax.serve.traffic.records import SampledTurn


def session_transcript(
    turns: Sequence[SampledTurn], trained: Collection[str], *, has_routes: bool = False
) -> Transcript:
    """Returns the transcript of the turns that are trained and of all before them.

    Its trained nodes are in the order of the turns.

    Args:
      turns: of one session; a parent stands before its children.
      trained: ids of turns.
      has_routes: whether nodes get the experts of their tokens, for router replay.

    Raises ValueError if a parent is missing.
    """
    by_id = {turn.id: turn for turn in turns}
    needed = {turn.id for one in trained for turn in path_of(by_id[one], by_id)}
    used = [turn for turn in turns if turn.id in needed]
    roots = [turn for turn in used if not turn.parent]
    transcript = Transcript()
    nodes: dict[str, Node] = {}
    routes: dict[str, np.ndarray | None] = {}
    start = _common_length([turn.suffix for turn in roots]) if len(roots) > 1 else 0
    shared = transcript.append("prompt", roots[0].suffix[:start]) if len(roots) > 1 else None
    for turn in used:
        if before := nodes.get(turn.parent) or shared:
            transcript.branch(before)
        routes[turn.id] = _all_routes(turn, routes.get(turn.parent)) if has_routes else None
        nodes[turn.id] = transcript.append(
            "summary" if turn.kind == "summary" else "assistant",
            turn.suffix if turn.parent else turn.suffix[start:],
            turn.tokens,
            turn.logprobs,
            turn.versions,
            trained=turn.id in trained,
            routes=routes[turn.id],
        )
    return transcript


def path_of(turn: SampledTurn, by_id: Mapping[str, SampledTurn]) -> list[SampledTurn]:
    """Returns a turn and those before it, the last first. Raises ValueError if a parent is missing."""
    path = [turn]
    while path[-1].parent:
        if path[-1].parent not in by_id:
            raise ValueError(f"turn {path[-1].id} has a parent that is not stored")
        path.append(by_id[path[-1].parent])
    return path


def _all_routes(turn: SampledTurn, before: np.ndarray | None) -> np.ndarray | None:
    """int16 [n-1, L, k]: the experts of all ids up to a turn's last but one; before: the same of its parent."""
    own = own_routes(turn)
    if own is None or not turn.parent:
        return own
    return None if before is None else np.concatenate([before, own])


def own_routes(turn: SampledTurn) -> np.ndarray | None:
    """Returns the stored experts of a turn, int16 [n, L, k]: from its parent's last id on, of a root from the first.

    None where they are not stored, as of a stream that was cut, or have another length.
    """
    if turn.routing is None:
        return None
    routes = read_routed_experts(turn.routing)
    expected = len(turn.suffix) + len(turn.tokens) - (0 if turn.parent else 1)
    return routes.astype(np.int16) if routes.ndim == 3 and len(routes) == expected else None


def _common_length(sequences: Sequence[Sequence[int]]) -> int:
    """Returns with how many equal ids all sequences begin."""
    first, last = min(map(list, sequences)), max(map(list, sequences))
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
