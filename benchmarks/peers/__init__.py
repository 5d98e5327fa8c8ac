"""Other engines that play the conversations of benchmarks/conversations.py, each in an environment of its own.

environments.py installs a peer and runs its script; the scripts are
    play_tunix.py           google-tunix's sampler on a network of equal cost (equal_cost.py)
    play_transformers.py    transformers' `generate` on the same weights
    play_llama_cpp.py       llama.cpp's `llama_decode` on the same weights (gguf_file.py)
train_tunix.py has google-tunix's GRPO learner train on the completions of completions.py, for benchmarks/rl_step.py.
The scripts, arguments.py, completions.py and gguf_file.py run where neither composer_jax nor JAX is installed, and
import neither.
"""
