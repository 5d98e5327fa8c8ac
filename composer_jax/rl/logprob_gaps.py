"""How far the log-probabilities of two programs or two policies are apart."""

import numpy as np


def gap_figures(gaps: np.ndarray) -> dict[str, float]:
    """Returns the figures of log p - log p_sampler of sampled tokens, in nats, with four significant digits.

    p50, p99, max: of the absolute gap. beyond_2: fraction of the tokens whose ratio of probabilities is beyond 2 or 1/2
    (F(2) of arXiv 2510.11370). k1, k3: estimates of KL(sampler || p), the means of -log r and of r - 1 - log r with
    r = p / p_sampler.

    Raises:
      ValueError: there are no tokens.
    """
    if not gaps.size:
        raise ValueError("gaps of no tokens have no figures")
    gaps = gaps.astype(np.float64)
    size = np.abs(gaps)
    figures = {
        "tokens": gaps.size,
        "p50": np.median(size),
        "p99": np.quantile(size, 0.99),
        "max": size.max(),
        "beyond_2": (size > np.log(2)).mean(),
        "k1": -gaps.mean(),
        "k3": (np.expm1(gaps) - gaps).mean(),
    }
    return {name: float(f"{value:.4g}") if name != "tokens" else int(value) for name, value in figures.items()}
