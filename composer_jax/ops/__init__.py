"""Functions of arrays that know nothing of networks: attention, grouped matmul, permutations, and shape checks."""
