"""Which layers are compressed, and which are sent this step."""
