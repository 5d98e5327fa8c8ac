"""Groups of which the infrastructure lost episodes."""

from composer_jax.rl.batch import Group


def has_enough_graded(group: Group, size: int) -> bool:
    """Returns whether a group is trained of whose `size` episodes only those in `group` were graded.

    A group of which half or more is lost is left out, because the baseline of a few is noise (GLM-5, arXiv 2602.15763).
    Of another one the graded episodes are trained with their own mean as the baseline; the constant normaliser counts
    the lost ones, so that they are terms of zero.
    """
    return 2 * len(group.episodes) > size
