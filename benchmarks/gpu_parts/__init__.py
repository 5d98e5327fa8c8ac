"""The parts of `python -m benchmarks.gpu`: train, train_torch, moe, attention, grouped, decode and rl are processes."""
