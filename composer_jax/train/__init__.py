"""Training: state and jitted step (learner), losses, optimizers, and the loop of pretraining and SFT."""
