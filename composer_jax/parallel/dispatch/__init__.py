"""Expert dispatch: tokens to their experts and back. One contract, three implementations:

    dispatch(x[T,D], ids[T,k], gates[T,k], experts, activation) -> y[T,D] = sum_j gates[t,j] * expert_{ids[t,j]}(x[t])

and the number of dropped (token, choice) pairs (contract.py has the types). With experts divided over a group of n
devices that have T tokens each, a device sends the following number of rows of width D to where they are computed. As
many come back, and both directions repeat in the backward pass. The buffer holds the sorted rows:

                         rows sent                        rows in the buffer
    ring                 (n - 1) T                        capacity_factor k T    further rows in more rounds (rounds.py)
    ragged_all_to_all    at most (1 - 1/n) k T            capacity_factor k T    TPUs and GPUs only
    dense                none: experts are all-gathered

ragged_all_to_all sends less than the ring from n = k devices on. It sends a token with two experts on one device twice,
the ring once. Along a mesh axis that divides experts but not tokens (`tensor`), the ring sums whole outputs;
ragged_all_to_all first divides the tokens among the devices, so T is then the number per device.
"""

from composer_jax.extensions import resolve
from composer_jax.parallel.dispatch.contract import Biases, Dispatch, DispatchAxes, DispatchOutput, Experts
from composer_jax.parallel.dispatch.dense import dense
from composer_jax.parallel.dispatch.ragged import ragged_all_to_all
from composer_jax.parallel.dispatch.ring import ring

DISPATCH: dict[str, Dispatch] = {
    "dense": Dispatch(dense, may_drop=False),
    "ring": Dispatch(ring, may_drop=False),
    "ragged_all_to_all": Dispatch(ragged_all_to_all, may_drop=True),
}
"""Our implementations by name. A config may also name a user's, by import path."""


def find_dispatch(name: str) -> Dispatch:
    """Returns the implementation that `model.dispatch` names: a key of DISPATCH or the import path of a Dispatch.

    A bare function at an import path does not say whether it may drop pairs, and counts as one that may.

    Raises:
      UserError: `name` is neither, or cannot be imported.
    """
    found = resolve(name, DISPATCH, "config.model.dispatch")
    return found if isinstance(found, Dispatch) else Dispatch(found, may_drop=True)


def dispatch_without_drops(name: str) -> str:
    """Returns `name`, or "ring" if the dispatch of that name may drop pairs. Errors are those of find_dispatch."""
    return "ring" if find_dispatch(name).may_drop else name


__all__ = [
    "DISPATCH",
    "Biases",
    "Dispatch",
    "DispatchAxes",
    "DispatchOutput",
    "Experts",
    "dispatch_without_drops",
    "find_dispatch",
]
