"""The stages of the pipeline, one file each: what an entry point in launch/ calls, and all that it calls."""
