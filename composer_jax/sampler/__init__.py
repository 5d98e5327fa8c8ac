"""The policy as a token machine: tokens in, tokens and their log-probabilities out."""
