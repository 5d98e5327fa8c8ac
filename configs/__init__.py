"""One file per run a user would start; its get_config() explains every setting where it is set."""
