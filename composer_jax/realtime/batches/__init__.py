"""Batches: labelled sessions of users become groups with given advantages, which RL's learner trains."""
