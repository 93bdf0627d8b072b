"""The strategy `pilots`."""
