"""Groups of which the infrastructure lost episodes."""

import itertools

from composer_jax.rl.batch import Group

INCOMPLETE = ("keep", "repeat", "drop")


def complete_group(group: Group, size: int, rule: str) -> Group | None:
    """Returns the group that is trained in place of one whose graded episodes are fewer than `size`, or None.

    A group with at most half of its episodes is dropped, because the baseline of a few is noise (GLM-5, arXiv
    2602.15763). For others the rule decides: "keep" trains the graded episodes with their own mean as the baseline;
    the constant normaliser counts the lost ones, so that they are terms of zero. "repeat" is GLM-5's: graded episodes
    are repeated, in their order, up to `size`, so that the group has its whole weight. "drop" trains complete groups
    only.
    """
    missing = size - len(group.episodes)
    if missing <= 0:
        return group
    if 2 * len(group.episodes) <= size or rule == "drop":
        return None
    if rule == "keep":
        return group
    repeated = list(itertools.islice(itertools.cycle(range(len(group.episodes))), size))
    return Group([group.episodes[i] for i in repeated], [group.rewards[i] for i in repeated])
