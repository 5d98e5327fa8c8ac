"""The network: configuration -> Flax NNX modules -> pure functions of arrays.

Shape legend, used as suffixes of local arrays (`q_BSHK`) and as einsum letters throughout the package:

    B  batch rows              H  attention heads             E  routed experts
    S  positions in a row      R  latent rank of MLA          F  expert hidden width
    T  flat tokens (B*S)       K  head dim without position   L  layers
    D  model width             P  rotary head dim             C  cache length
    V  value head dim          W  vocabulary                  G  episodes of a group
    N  heads of keys and values in attention; pairs of a token and a chosen expert (T*k) in dispatch
    X  a width that depends on the kind of attention

Modules are typed containers with an initialiser and a `__call__`. Everything outside this folder sees a `ModelDef`
(static) and `Params` (a nested dict of arrays): see `composer_jax.models.model_def`.
"""
