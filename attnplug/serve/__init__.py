"""attnplug's methods inside serving engines, a room for each engine."""
