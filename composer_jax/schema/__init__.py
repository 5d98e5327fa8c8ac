"""The schema of a run's config: its dataclasses, conversion to ConfigDicts, docs of fields, names that are gone."""
