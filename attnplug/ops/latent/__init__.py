"""Attention over the compressed cache of multi-head latent attention, which all heads share."""
