"""Folders on this machine and in buckets (gs://...): a run's folder, its lease and mirror, copies of URLs."""
