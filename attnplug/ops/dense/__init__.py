"""Dense attention against a long cache."""
