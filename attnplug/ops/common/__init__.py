"""What every family of ops stands on. A piece has a file by what it means; two families call it."""
