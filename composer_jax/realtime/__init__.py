"""Production traffic -> labels -> gate -> canary -> release or rollback. serve/traffic/ writes what is read here."""
