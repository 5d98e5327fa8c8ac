"""Expert dispatch: tokens to experts and back. One contract, four ways to move what has to be moved:

    dispatch(x[T,D], ids[T,k], gates[T,k], experts, activation) -> y[T,D] = sum_j gates[t,j] * expert_{ids[t,j]}(x[t])

and how many (token, choice) pairs were dropped (contract.py has the types). Where experts are spread over a group of
n devices that have T tokens each, a device moves so many rows of width D, in each direction and in each of the
forward and the backward pass:

    ring                 (n - 1) T                      every token to every device; the sums come back as many
    all_to_all           capacity_factor (1 - 1/n) k T  every choice to its device, the buffers being of fixed size
    ragged_all_to_all    at most (1 - 1/n) k T          exactly the choices that belong elsewhere
    dense                none of tokens, but all experts of the other devices

So the ring is the choice for groups up to about k devices, and where no pair may ever be dropped. A token with two
experts on one device travels twice with the last two, and once with the ring. Along a mesh axis that splits experts
but not tokens (`tensor`), the ring adds up whole outputs; the other two divide the tokens among the devices first.
"""

from composer_jax.parallel.dispatch.all_to_all import all_to_all
from composer_jax.parallel.dispatch.contract import Biases, Dispatched, Experts, Split
from composer_jax.parallel.dispatch.dense import dense
from composer_jax.parallel.dispatch.ragged import ragged_all_to_all
from composer_jax.parallel.dispatch.ring import ring

DISPATCH = {"dense": dense, "ring": ring, "all_to_all": all_to_all, "ragged_all_to_all": ragged_all_to_all}

__all__ = ["DISPATCH", "Biases", "Dispatched", "Experts", "Split"]
