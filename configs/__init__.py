"""One file per run that a user would start; its get_config() states what differs from the defaults of RunConfig."""
