"""Evaluation: suites, pass@k, compaction error, and the records that tables and pictures are made from."""
