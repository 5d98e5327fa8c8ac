"""Expert dispatch: tokens to experts and back. One contract, four ways to move what has to be moved:

    dispatch(x[T,D], ids[T,k], gates[T,k], experts, activation) -> y[T,D] = sum_j gates[t,j] * expert_{ids[t,j]}(x[t])

and how many (token, choice) pairs were dropped (contract.py has the types). Where experts are spread over a group of
n devices that have T tokens each, a device sends so many rows of width D to where they are computed. As many come
back, and both again in the backward pass; and there is a buffer of sorted rows:

                         rows sent                        rows in the buffer
    ring                 (n - 1) T                        capacity_factor k T    more take another round (rounds.py)
    all_to_all           (1 - 1/n) capacity_factor k T    capacity_factor k T    buffers travel, full or not
    ragged_all_to_all    at most (1 - 1/n) k T            capacity_factor k T    TPUs and GPUs only
    dense                none: the experts of the others come here

So all_to_all moves less than the ring from n = capacity_factor k devices on, ragged_all_to_all from n = k on. A token
with two experts on one device travels twice with these two, and once with the ring. Along a mesh axis that splits
experts but not tokens (`tensor`), the ring adds up whole outputs; the other two divide the tokens among the devices
first, so that T is then the share of one.
"""

from composer_jax.parallel.dispatch.all_to_all import all_to_all
from composer_jax.parallel.dispatch.contract import Biases, Dispatched, Experts, Split
from composer_jax.parallel.dispatch.dense import dense
from composer_jax.parallel.dispatch.ragged import ragged_all_to_all
from composer_jax.parallel.dispatch.ring import ring

DISPATCH = {"dense": dense, "ring": ring, "all_to_all": all_to_all, "ragged_all_to_all": ragged_all_to_all}

__all__ = ["DISPATCH", "Biases", "Dispatched", "Experts", "Split"]
