"""pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1)."""

import math


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k attempts solves a task, from `solved` of n attempts.

    1 - C(n - solved, k) / C(n, k). Raises ValueError if k > n, which cannot be estimated.
    """
    if not 0 < k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {solved} of {n} attempts")
    return 1 - math.comb(n - solved, k) / math.comb(n, k)
