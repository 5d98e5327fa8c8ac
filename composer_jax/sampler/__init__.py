"""The rollout engine: token ids in; sampled token ids, their log-probabilities and weight versions out."""
