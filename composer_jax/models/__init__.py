"""The network: configuration -> Flax NNX modules -> pure functions of arrays.

Shape legend. The letters are suffixes of array names (`q_BSHK`), einsum letters, and what ops/shapes.py checks:

    B  batch rows              H  query heads                   E  routed experts
    S  positions in a row      R  latent rank of MLA            F  expert hidden width
    T  flat tokens (B*S)       K  head dim without position     L  layers
    D  model width             P  rotary head dim               Z  pages of the cache
    V  value head dim          W  vocabulary (one shard of it)  G  groups of a cache entry; episodes of a group
    C  choices of a token in all expert layers (cache)
    N  heads of keys and values in attention; (token, choice) pairs (T*k) in dispatch; slots of a row for a teacher
    M  slots of dispatch; MTP modules                            J  pages of a row's context
    X  width that depends on the attention kind: a query or key head, a cache entry
    k  experts per token

In attention over whole rows, T is the position of a key. Modules are typed containers with an initialiser and a
`__call__`. Everything outside this folder uses a `ModelDef` (static) and `Params` (a nested dict of arrays), see
model_def.py.
"""
