"""The parts of `python -m benchmarks.gpu`; each module but timing, packed_batch, training_speed and worker is one
process of it."""
